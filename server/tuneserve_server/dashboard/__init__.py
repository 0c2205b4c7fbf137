"""The dashboard: its state and its static files."""
