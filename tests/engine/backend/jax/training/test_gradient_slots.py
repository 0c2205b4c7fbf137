"""Gradients are added to their request's slot in the order of its blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners, add_blocks


def owners(*blocks: tuple[int, bool, bool]) -> BlockOwners:
    slot, first, used = zip(*blocks, strict=True)
    return BlockOwners(jnp.asarray(slot, jnp.int32), jnp.asarray(first), jnp.asarray(used))


def test_a_first_block_overwrites_later_ones_add_and_unused_ones_do_nothing() -> None:
    """Two layers of three slots, and blocks of 10, 1, 100 and NaN."""
    buffers = {"q": jnp.full((2, 3, 1, 2), 7.0)}
    numbers = jnp.asarray([10.0, 1.0, 100.0, jnp.nan])
    gradients = {"q": jnp.ones((4, 1, 2)) * numbers[:, None, None]}
    blocks = owners((0, False, True), (2, True, True), (2, False, True), (0, False, False))
    added = np.asarray(add_blocks(buffers, gradients, jnp.int32(1), blocks)["q"])
    np.testing.assert_array_equal(added[0], np.full((3, 1, 2), 7.0))
    np.testing.assert_array_equal(added[1, :, 0, 0], [17.0, 7.0, 101.0])


def test_the_sum_of_a_request_has_the_bits_of_adding_one_block_after_the_other() -> None:
    """Requests of 1 to 4 blocks in a chunk of 8, each compared with a loop in NumPy."""
    generator = np.random.default_rng(0)
    slots = [3, 0, 0, 0, 0, 2, 2, 1]
    first = [False, True, False, False, False, False, False, True]
    gradients = generator.normal(size=(8, 5, 3)).astype(np.float32)
    buffer = generator.normal(size=(1, 4, 5, 3)).astype(np.float32)
    expected = buffer.copy()
    for slot, is_first, gradient in zip(slots, first, gradients, strict=True):
        expected[0, slot] = gradient if is_first else expected[0, slot] + gradient
    blocks = owners(*zip(slots, first, [True] * 8, strict=True))
    added = jax.jit(add_blocks)({"q": buffer}, {"q": gradients}, jnp.int32(0), blocks)
    np.testing.assert_array_equal(added["q"], expected)


def test_a_first_block_of_another_request_overwrites_the_slot() -> None:
    buffers = {"q": jnp.full((1, 1, 1, 1), jnp.nan)}
    gradients = {"q": jnp.full((1, 1, 1), 3.0)}
    added = add_blocks(buffers, gradients, jnp.int32(0), owners((0, True, True)))
    assert added["q"].item() == 3.0


def test_a_part_of_the_owners_has_the_owners_of_its_blocks() -> None:
    part = owners((0, True, True), (1, False, True), (2, False, False)).part(jnp.int32(1), 2)
    assert [x.tolist() for x in part] == [[1, 2], [False, False], [True, False]]
