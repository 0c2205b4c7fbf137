"""The training text and tokenizer of the embedded base model; see `scripts/build_tiny_model.py`."""
