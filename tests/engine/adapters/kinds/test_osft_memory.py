"""Operations and memory of OSFT's projections, read from their compiled programs.

They are measured where the engine uses them: the subtraction on the longer side of a weight of K
directions, and the remainder on the shorter side.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tuneserve_engine.adapters.kinds.base import SvdFactors
from tuneserve_engine.adapters.kinds.osft import right

LAYERS, K, RANK = 2, 1024, 256


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ours(outputs: int, inputs: int) -> Any:
    """The program for V [L, r, M] of a weight [N, M]."""
    directions = min(outputs, inputs)
    frozen = SvdFactors(
        spec(LAYERS, outputs, directions if outputs > inputs else RANK),
        spec(LAYERS, RANK),
        spec(LAYERS, directions if inputs > outputs else RANK, inputs),
        spec(directions),
    )
    return jax.jit(right).lower(spec(LAYERS, RANK, inputs), frozen).compile()


def gram(inputs: int) -> Any:
    """The control: a whole matrix [M, M]."""

    def project(x: jax.Array, strong: jax.Array) -> jax.Array:
        return x - x @ (strong.mT @ strong)

    shapes = spec(LAYERS, RANK, inputs), spec(LAYERS, K - RANK, inputs)
    return jax.jit(project).lower(*shapes).compile()


def flops(program: Any) -> float:
    counted = program.cost_analysis()["flops"]
    assert counted > 0
    return counted


def temp_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.acceptance("O6")
def test_a_projection_takes_a_fraction_of_the_operations_of_a_whole_matrix():
    whole = flops(gram(K))
    # by hand: 2 (K - r) K² to make the matrix and 2 r K² to use it
    assert whole >= 2 * LAYERS * K**3
    assert flops(ours(K, K)) <= 0.14 * whole
    assert flops(ours(K, 2 * K)) <= 0.40 * flops(gram(2 * K))


@pytest.mark.acceptance("O7")
def test_a_projection_takes_a_fraction_of_the_memory_of_a_whole_matrix():
    assert temp_bytes(gram(2 * K)) >= LAYERS * 4 * (2 * K) ** 2
    assert temp_bytes(ours(K, 2 * K)) <= 0.25 * temp_bytes(gram(2 * K))
    assert temp_bytes(gram(K)) >= LAYERS * 4 * K**2
    assert temp_bytes(ours(K, K)) <= 0.25 * temp_bytes(gram(K))
