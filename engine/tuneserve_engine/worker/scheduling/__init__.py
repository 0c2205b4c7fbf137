"""The scheduling of jobs: the jobs that run together, their turn and their estimated time."""
