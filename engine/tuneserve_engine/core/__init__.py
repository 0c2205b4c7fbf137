"""The plain data that every process knows: jobs, records, adapters, shapes, errors."""
