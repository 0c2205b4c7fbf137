"""Training passes: forward, loss, backward, and AdamW."""
