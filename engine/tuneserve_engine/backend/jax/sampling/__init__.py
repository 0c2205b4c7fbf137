"""Sampling: prefill, decoding, the KV cache, logits and stops."""
