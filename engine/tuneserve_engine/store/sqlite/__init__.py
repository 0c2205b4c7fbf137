"""The store of one machine: one SQLite file."""
