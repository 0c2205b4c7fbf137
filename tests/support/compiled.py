"""The needs of a compiled program, read without running it."""

from typing import Any

import jax

UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Options for code that is compiled quickly. It needs the same memory, because buffers are assigned
before machine code is made."""


def memory_of(lowered: jax.stages.Lowered) -> Any:
    """Return the memory analysis of a program that is compiled for this alone."""
    return lowered.compile(UNOPTIMISED).memory_analysis()
