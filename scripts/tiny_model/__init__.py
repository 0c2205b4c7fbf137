"""Text from which the embedded base model learns; see `scripts/build_tiny_model.py`."""
