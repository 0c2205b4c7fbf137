"""Compiled programs: one for each shape, and a cache of them on disk."""
