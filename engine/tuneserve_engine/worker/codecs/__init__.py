"""The codecs: request bytes to checked arrays, and results to bytes."""
