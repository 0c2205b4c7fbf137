"""The worker: it takes jobs, batches them, runs them on a backend and stores their results."""
