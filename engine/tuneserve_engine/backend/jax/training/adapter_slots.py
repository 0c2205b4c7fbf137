"""The adapters of a batch's requests side by side, and the sums of the requests' gradients.

Adapter slots and gradient slots are allocated once per rank bucket and live for ever.
Requests come and go by slot. Slot numbers are inputs of the programs, so no program is compiled for
one slot.

Dimension key: L layers, J slots, D inputs of a projection, F its outputs, R rank bucket.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TargetShapes
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


def new_adapter_slots(shapes: TargetShapes, rank_bucket: int, slots: int) -> AdapterSlots:
    """Return adapter slots that are all the base model."""
    a, b = new_gradient_slots(shapes, rank_bucket, slots)
    return AdapterSlots(a, b, jnp.zeros(slots, jnp.float32), jnp.zeros(slots, jnp.bool_))


def new_gradient_slots(shapes: TargetShapes, rank_bucket: int, slots: int) -> LoraWeights:
    """Return zero gradients by slot: ``a[target]`` and ``b[target]``, as in ``AdapterSlots``."""
    a, b = {}, {}
    for name, (*layers, inputs, outputs) in shapes.items():
        stack = (*(layers or (1,)), slots)
        a[name] = jnp.zeros((*stack, inputs, rank_bucket), jnp.float32)
        b[name] = jnp.zeros((*stack, rank_bucket, outputs), jnp.float32)
    return LoraWeights(a, b)


@partial(jax.jit, donate_argnums=0)
def write_slot(
    adapter_slots: AdapterSlots,
    slot: Slot,
    weights: LoraWeights,
    scale: Float[Array, ""] | np.float32,
    trained: Flag,
) -> AdapterSlots:
    """Return the adapter slots, donated, with a copy of an adapter in the slot."""

    def put(name: str, buffer: Array, array: Array) -> Array:
        layers = array[None] if name == UNEMBED else array
        placed: Array = jax.lax.dynamic_update_index_in_dim(buffer, layers, slot, 1)
        return placed

    return AdapterSlots(
        a={name: put(name, adapter_slots.a[name], x) for name, x in weights.a.items()},
        b={name: put(name, adapter_slots.b[name], x) for name, x in weights.b.items()},
        scale=adapter_slots.scale.at[slot].set(scale),
        trained=adapter_slots.trained.at[slot].set(trained),
    )


@jax.jit
def copy_gradient(gradient_slots: LoraWeights, slot: Slot) -> LoraWeights:
    """Return the slot's gradient: [L, D, R] and [L, R, F]. ``unembed`` has an L of 1."""
    copied: LoraWeights = jax.tree.map(partial(_of_slot, slot), gradient_slots)
    return copied


@partial(jax.jit, donate_argnums=0)
def add_earlier_gradient(
    gradient_slots: LoraWeights, slot: Slot, earlier: LoraWeights
) -> LoraWeights:
    """Return the gradient slots, donated, with ``earlier`` added to the slot's gradient."""
    added: LoraWeights = jax.tree.map(
        lambda buffer, x: buffer.at[:, slot].add(x, unique_indices=True), gradient_slots, earlier
    )
    return added


def _of_slot(slot: Slot, buffer: Array) -> Array:
    part: Array = jax.lax.dynamic_index_in_dim(buffer, slot, 1, keepdims=False)
    return part


@jax.jit
def is_sum_finite(
    accumulator: LoraWeights, gradient_slots: LoraWeights, slot: Slot, trained: Flag
) -> Bool[Array, ""]:
    """Return whether accumulator plus gradient is finite everywhere.

    ``trained`` says whether the adapter trains the unembedding. If not, the slot holds an earlier
    request's gradient there.
    """
    total = _sum(accumulator, gradient_slots, slot, trained)
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(total)]))


@partial(jax.jit, donate_argnums=0)
def accumulate_slot(
    accumulator: LoraWeights, gradient_slots: LoraWeights, slot: Slot, trained: Flag, finite: Flag
) -> LoraWeights:
    """Return the accumulator, donated, plus the slot's gradient.

    Unless ``finite``, the result of ``is_sum_finite``, the accumulator keeps its bits. One program
    for both would need room for the sum beside the accumulator; this one works in place.
    """
    total = _sum(accumulator, gradient_slots, slot, trained)
    kept: LoraWeights = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), total, accumulator
    )
    return kept


def _sum(
    accumulator: LoraWeights, gradient_slots: LoraWeights, slot: Slot, trained: Flag
) -> LoraWeights:
    def plus(name: str, old: Array, buffer: Array) -> Array:
        gradient = _of_slot(slot, buffer)
        if name != UNEMBED:
            return old + gradient
        return jnp.where(trained, old + gradient[0], old)

    return LoraWeights(
        a={name: plus(name, x, gradient_slots.a[name]) for name, x in accumulator.a.items()},
        b={name: plus(name, x, gradient_slots.b[name]) for name, x in accumulator.b.items()},
    )
