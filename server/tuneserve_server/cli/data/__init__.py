"""Training data: the sources of rows, the forms of a row, and the preview of a run's data."""
