"""The tiles of kernels for adapters. Needs no JAX: plans are made without it."""

TILE = 128
"""Inputs or outputs of a projection that a program handles at once."""
_LEAST_RANKS = 16  # Triton multiplies no smaller matrices


def padded_rank(rank: int) -> int:
    """Return the rank, padded to whole tiles."""
    return max(1 << (rank - 1).bit_length(), _LEAST_RANKS)
