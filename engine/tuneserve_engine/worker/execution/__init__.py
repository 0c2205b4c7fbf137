"""The execution of a batch of jobs: packing, passes, samples, outcomes."""
