"""The base model: its configuration, layers, weights, and the adapters' products."""
