"""The kernel that adds gradients of adapters, interpreted, against NumPy and ``add_blocks``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compiled import UNOPTIMISED
from tuneserve_engine.backend.jax.model.block_lora import Factors
from tuneserve_engine.backend.jax.training.gradient_kernels import add_factors, runs_of
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners, add_blocks

LAYERS, SLOTS, SIZE, CHUNK = 2, 4, 16, 4
OUTPUTS = {"q": 256, "k": 128}
OWNERS = [
    (3, False, True), (0, True, True), (0, False, True), (0, False, True),
    (0, False, True), (2, True, True), (1, True, True), (0, False, False),
]  # fmt: skip
"""Two chunks: slot 3 goes on from an earlier batch, and slot 0 has blocks in both."""
CASES = [
    (2, 128, jnp.bfloat16),
    (24, 256, jnp.float32),
    (32, 384, jnp.bfloat16),
    (64, 128, jnp.float32),
]


def owners(blocks: list[tuple[int, bool, bool]]) -> BlockOwners:
    slot, first, used = zip(*blocks, strict=True)
    return BlockOwners(jnp.asarray(slot, jnp.int32), jnp.asarray(first), jnp.asarray(used))


def factors_of(rank: int, inputs: int, dtype: Any) -> Factors:
    """Factors of all blocks of a micro-batch. NaN where no request is."""
    rng = np.random.default_rng(rank)
    width = max(16, 1 << (rank - 1).bit_length())

    def numbers(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        x[..., -1, :, :] = np.nan
        return x

    def low() -> jax.Array:
        x = numbers(len(OUTPUTS), len(OWNERS), SIZE, width)
        x[..., rank:] = 0
        return jnp.asarray(x, jnp.float32)

    return Factors(
        jnp.asarray(numbers(len(OWNERS), SIZE, inputs), dtype),
        low(),
        low(),
        tuple(jnp.asarray(numbers(len(OWNERS), SIZE, n), dtype) for n in OUTPUTS.values()),
    )


def part(factors: Factors, at: int) -> Factors:
    """Return the factors of a chunk."""
    cut = slice(at, at + CHUNK)
    return Factors(
        factors.x[cut],
        factors.low[:, cut],
        factors.by_low[:, cut],
        tuple(each[cut] for each in factors.by_outs),
    )


def buffers_of(rank: int, inputs: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Gradient slots with numbers of an earlier batch, but NaN in a slot that is not used yet."""
    rng = np.random.default_rng(1)

    def numbers(*shape: int) -> jax.Array:
        x = rng.normal(size=(LAYERS, SLOTS, *shape))
        x[:, 2] = np.nan
        return jnp.asarray(x, jnp.float32)

    return (
        {name: numbers(inputs, rank) for name in OUTPUTS},
        {name: numbers(rank, outputs) for name, outputs in OUTPUTS.items()},
    )


def added(
    buffers: Any, factors: Factors, blocks: BlockOwners, *, chunks: tuple[int, ...] = (0, CHUNK)
) -> Any:
    runs = runs_of(blocks, CHUNK)
    for at in chunks:
        buffers = _added(buffers, part(factors, at), runs, jnp.int32(at))
    return buffers


@partial(jax.jit, compiler_options=UNOPTIMISED)
def _added(buffers: Any, factors: Factors, runs: Any, at: jax.Array) -> Any:
    return add_factors(buffers, [(tuple(OUTPUTS), factors)], jnp.int32(1), runs, at)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize(("rank", "inputs", "dtype"), CASES)
def test_the_gradients_of_a_request_are_added_to_its_slot(
    rank: int, inputs: int, dtype: Any
) -> None:
    """To 1e-6 of the sum of the terms' sizes, in float64 by NumPy. Other slots keep their bits."""
    buffers, factors = buffers_of(rank, inputs), factors_of(rank, inputs, dtype)
    got = added(buffers, factors, owners(OWNERS))
    for index, name in enumerate(OUTPUTS):
        for side, old, new in zip("ab", buffers, got, strict=True):
            want, size = wide(old[name]), abs(wide(old[name]))
            for block, (slot, first, used) in enumerate(OWNERS):
                if not used:
                    continue
                left, right = (
                    (factors.x[block], factors.by_low[index, block, :, :rank])
                    if side == "a"
                    else (factors.low[index, block, :, :rank], factors.by_outs[index][block])
                )
                for total, more in (
                    (want, wide(left).T @ wide(right)),
                    (size, abs(wide(left)).T @ abs(wide(right))),
                ):
                    total[1, slot] = more if first else total[1, slot] + more
            np.testing.assert_array_equal(new[name][0], old[name][0])
            error = abs(wide(new[name])[1] - want[1])
            assert (error <= 1e-6 * size[1]).all(), (side, name)


def test_both_ways_to_add_gradients_agree() -> None:
    """To 1e-6 of the largest number, with gradients by block from NumPy."""
    buffers, factors = buffers_of(8, 128), factors_of(8, 128, jnp.float32)
    (a, b), blocks = added(buffers, factors, owners(OWNERS)), owners(OWNERS)
    x, by_low = wide(factors.x), wide(factors.by_low)[0, ..., :8]
    low, by_q = wide(factors.low)[0, ..., :8], wide(factors.by_outs[0])
    for got, old, left, right in ((a, buffers[0], x, by_low), (b, buffers[1], low, by_q)):
        gradient = jnp.asarray(np.einsum("nsi,nsj->nij", left, right), jnp.float32)
        want = add_blocks({"q": old["q"]}, {"q": gradient}, jnp.int32(1), blocks)["q"]
        np.testing.assert_allclose(got["q"], want, rtol=0, atol=1e-6 * np.nanmax(abs(want)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_request_has_the_same_bits_in_company_and_across_chunks(dtype: Any) -> None:
    """Slot 0's blocks 1 to 4 lie in two chunks, or behind one another in one chunk alone."""
    buffers, factors = buffers_of(32, 128), factors_of(32, 128, dtype)
    together = added(buffers, factors, owners(OWNERS))
    moved = jax.tree.map(lambda x: jnp.roll(x, -1, x.ndim - 3), factors)
    alone = [(0, i == 0, i < 4) for i in range(len(OWNERS))]
    want = added(buffers, moved, owners(alone), chunks=(0,))
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one[1, 0], other[1, 0])


def test_a_block_that_does_not_add_leaves_the_others_sum() -> None:
    """The second of slot 0's three blocks in the first chunk is NaN, or zero."""
    runs = runs_of(owners(OWNERS), CHUNK)
    some = runs._replace(adds=jnp.ones(len(OWNERS), bool).at[2].set(False))
    found = []
    for number, given in ((jnp.nan, some), (0.0, runs)):
        factors = jax.tree.map(
            lambda x, number=number: x.at[..., 2, :, :].set(number), factors_of(8, 128, jnp.float32)
        )
        found.append(_added(buffers_of(8, 128), part(factors, 0), given, jnp.int32(0)))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.isfinite(one[1, 0]).all()
        np.testing.assert_array_equal(one, other)


def test_the_runs_of_a_micro_batch_end_with_their_request_and_their_chunk() -> None:
    runs = runs_of(owners(OWNERS), CHUNK)
    assert runs.end.tolist() == [1, 4, 0, 0, 5, 6, 7, 0]
    assert runs.in_chunk.tolist() == [2, 2, 2, 2, 3, 3, 3, 3]
    assert runs.begins.tolist() == [0, 1, 8, 8, 4, 5, 6, 8]
    unused = runs_of(owners([(0, True, False)] * 4), 2)
    assert unused.end.tolist() == unused.in_chunk.tolist() == [0] * 4
