"""The logs, the traces and the names of the metrics."""
