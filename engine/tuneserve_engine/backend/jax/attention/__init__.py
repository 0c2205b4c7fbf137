"""Attention over packed sequences and over pages of the KV cache."""
