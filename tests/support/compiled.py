"""The needs of a compiled program, read without running it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Options for code that is compiled quickly. It needs the same memory, because buffers are assigned
before machine code is made."""


def memory_of(lowered: jax.stages.Lowered) -> Any:
    """Return the memory analysis of a program that is compiled for this alone."""
    return lowered.compile(UNOPTIMISED).memory_analysis()


def lowered_for_a_gpu(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the program for an absent H200, before XLA compiles it."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()
