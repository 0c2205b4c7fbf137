"""The data that outlives a process: jobs, records, recovery points and checkpoint files."""
