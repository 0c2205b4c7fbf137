"""The settings of the worker and those that every process shares."""
