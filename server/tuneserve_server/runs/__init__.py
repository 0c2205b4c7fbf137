"""Training runs as people look at them: their states, progress, names and notes."""
