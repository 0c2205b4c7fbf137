"""Compile the programs of a worker before it starts, also for a GPU that is not there."""
