"""The adapters of a batch's requests side by side, and the sums of the requests' gradients.

Bank (adapter slots) and scratch (gradients) are allocated once per rank class and live for ever.
Requests come and go by slot. Slot numbers are inputs of the programs, so no program is compiled for
one slot.

Dimension key: L layers, J slots, D inputs of a projection, F its outputs, R rank class.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TargetShapes, host_zeros
from tuneserve_engine.core.adapter import UNEMBED

Slot = Int[Array, ""] | np.int32
Flag = Bool[Array, ""] | np.bool_


class AdapterSlots(NamedTuple):
    """Adapters by slot: ``a[target]`` is [L, J, D, R], ``b[target]`` is [L, J, R, F].

    ``unembed`` has an L of 1. A slot that was never filled is the base model.
    """

    a: dict[str, Array]
    b: dict[str, Array]
    scale: Float[Array, " J"]
    trained: Bool[Array, " J"]  # whether the slot's adapter trains the unembedding


def new_bank(shapes: TargetShapes, rank_class: int, slots: int) -> AdapterSlots:
    """Return a bank whose slots are all the base model."""
    a, b = new_scratch(shapes, rank_class, slots)
    scale, trained = jax.device_put((host_zeros((slots,)), np.zeros(slots, np.bool_)))
    return AdapterSlots(a, b, scale, trained)


def new_scratch(shapes: TargetShapes, rank_class: int, slots: int) -> LoraWeights:
    """Return zero gradients by slot, shaped as the bank: ``a[target]`` and ``b[target]``."""
    a, b = {}, {}
    for name, (*layers, inputs, outputs) in shapes.items():
        stack = (*(layers or (1,)), slots)
        a[name] = host_zeros((*stack, inputs, rank_class))
        b[name] = host_zeros((*stack, rank_class, outputs))
    return LoraWeights(*jax.device_put((a, b)))


@partial(jax.jit, donate_argnums=0)
def place(
    bank: AdapterSlots,
    slot: Slot,
    weights: LoraWeights,
    scale: Float[Array, ""] | np.float32,
    trained: Flag,
) -> AdapterSlots:
    """Return the bank, donated, with a copy of an adapter in the slot."""

    def put(name: str, buffer: Array, array: Array) -> Array:
        layers = array[None] if name == UNEMBED else array
        placed: Array = jax.lax.dynamic_update_index_in_dim(buffer, layers, slot, 1)
        return placed

    return AdapterSlots(
        a={name: put(name, bank.a[name], x) for name, x in weights.a.items()},
        b={name: put(name, bank.b[name], x) for name, x in weights.b.items()},
        scale=bank.scale.at[slot].set(scale),
        trained=bank.trained.at[slot].set(trained),
    )


@jax.jit
def finite_sum(
    accumulator: LoraWeights, scratch: LoraWeights, slot: Slot, trained: Flag
) -> Bool[Array, ""]:
    """Return whether accumulator plus gradient is finite everywhere.

    ``trained`` says whether the adapter trains the unembedding. If not, the scratch holds an
    earlier request's gradient there.
    """
    total = _sum(accumulator, scratch, slot, trained)
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(total)]))


@partial(jax.jit, donate_argnums=0)
def add(
    accumulator: LoraWeights, scratch: LoraWeights, slot: Slot, trained: Flag, finite: Flag
) -> LoraWeights:
    """Return the accumulator, donated, plus the slot's gradient.

    Unless ``finite``, the result of ``finite_sum``, the accumulator keeps its bits. One program for
    both would need room for the sum beside the accumulator; this one works in place.
    """
    total = _sum(accumulator, scratch, slot, trained)
    kept: LoraWeights = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), total, accumulator
    )
    return kept


def _sum(accumulator: LoraWeights, scratch: LoraWeights, slot: Slot, trained: Flag) -> LoraWeights:
    def plus(name: str, old: Array, buffer: Array) -> Array:
        gradient: Array = jax.lax.dynamic_index_in_dim(buffer, slot, 1, keepdims=False)
        if name != UNEMBED:
            return old + gradient
        return jnp.where(trained, old + gradient[0], old)

    return LoraWeights(
        a={name: plus(name, x, scratch.a[name]) for name, x in accumulator.a.items()},
        b={name: plus(name, x, scratch.b[name]) for name, x in accumulator.b.items()},
    )
