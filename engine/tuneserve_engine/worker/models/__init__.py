"""The models on this worker: restored, saved as recovery points, handed over."""
