"""The tile of kernels for adapters. Needs no JAX: plans are made without it."""

TILE = 128
"""Inputs or outputs of a projection that a program handles at once."""
