"""Adapters as data and files: checkpoints, PEFT's layout, and decomposed base weights."""
