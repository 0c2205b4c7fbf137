"""The ``tuneserve`` command."""
