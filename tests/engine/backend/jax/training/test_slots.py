"""Running batches have slots side by side, or set the gradients of others aside."""

from functools import partial

import jax
import jax.numpy as jnp

from tests.support.adapters import SMALL, bits, random_like
from tuneserve_engine.backend.jax.training.adapter_slots import (
    new_adapter_slots,
    new_gradient_slots,
)
from tuneserve_engine.backend.jax.training.slots import RankSlots

COUNT = 4


def slots_of() -> RankSlots:
    slots = RankSlots(
        8,
        COUNT,
        partial(new_adapter_slots, SMALL, 8, COUNT),
        partial(new_gradient_slots, SMALL, 8, COUNT),
    )
    slots.allocate()
    return slots


def test_an_interrupting_batch_has_the_slots_after_those_of_the_interrupted_one() -> None:
    slots = slots_of()
    with slots.claimed(3) as outer:
        assert outer.first == 0
        with slots.claimed(1) as inner:
            assert inner.first == 3
        with slots.claimed(1) as inner:
            assert inner.first == 3
    with slots.claimed(4) as outer:
        assert outer.first == 0


def test_gradients_that_leave_no_room_wait_on_the_host_with_their_bits() -> None:
    slots = slots_of()
    with slots.claimed(3):
        assert slots.gradient_slots is not None
        slots.gradient_slots = random_like(slots.gradient_slots, 1)
        before = bits(slots.gradient_slots)
        with slots.claimed(2) as inner:
            assert inner.first == 0
            slots.gradient_slots = jax.tree.map(jnp.zeros_like, slots.gradient_slots)
        assert bits(slots.gradient_slots) == before


def test_spoiled_buffers_are_allocated_again_and_no_gradient_is_restored() -> None:
    slots = slots_of()
    slots.held[0] = {}
    with slots.claimed(3):
        assert slots.gradient_slots is not None
        slots.gradient_slots = random_like(slots.gradient_slots, 1)
        with slots.claimed(2):
            slots.spoil()
            slots.allocate()
        assert not any(x.any() for x in jax.tree.leaves(slots.gradient_slots))
    assert (slots.version, slots.held) == (1, {})
