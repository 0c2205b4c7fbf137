"""The needs of a compiled program, read without running it."""

from typing import Any

import jax

_UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Buffers are assigned before machine code is made, so quick code needs the same memory."""


def memory_of(lowered: jax.stages.Lowered) -> Any:
    """Return the memory analysis of a program that is compiled for this alone."""
    return lowered.compile(_UNOPTIMISED).memory_analysis()
