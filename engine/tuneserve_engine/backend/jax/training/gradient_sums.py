"""Sums of the gradients of a request's bins, which run one after the other or on several devices.

A request's gradient is the sum of its bins' gradients, added in the request's order: so it has the
same bits on any number of devices. After each round, every device has the sum in the request's
gradient slot.

Dimension key: L layers, J slots, D inputs of a projection, F its outputs, R rank bucket.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights
from tuneserve_engine.backend.jax.mesh import DEVICES, OWN, WHOLE, Parts
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.training.adapter_slots import (
    Slot,
    add_earlier_gradient,
    copy_gradient,
)
from tuneserve_engine.backend.jax.training.running_batch import RunningBatch

Earlier = dict[int, LoraWeights]
"""Gradients of requests in earlier rounds, by slot."""


class GradientSums:
    """The programs that add the gradients of a request's bins."""

    def __init__(self, programs: ProgramRegistry, use: str) -> None:
        self._devices = programs.mesh.count
        self._copy = programs.add_program(
            "copy_gradient", copy_gradient, use=use, parts=Parts((OWN, WHOLE), WHOLE)
        )
        if self._devices == 1:
            self._add = programs.add_program(
                "add_earlier_gradient", add_earlier_gradient, use=use, donate=(0,)
            )
        else:
            parts = Parts((OWN, WHOLE, WHOLE, WHOLE), OWN)
            self._add = programs.add_program(
                "sum_gradients", sum_gradients, use=use, donate=(0,), parts=parts
            )

    def declare(
        self, rank_bucket: int, gradient_slots: Any, all_gradient_slots: Any, order: int
    ) -> None:
        """Declare the programs of a rank bucket; the second specs are those of all devices."""
        index = np.int32(0)
        self._copy.declare(rank_bucket, all_gradient_slots, index, order=order)
        earlier = jax.eval_shape(copy_gradient, gradient_slots, index)
        if self._devices == 1:
            self._add.declare(rank_bucket, gradient_slots, index, earlier, order=order)
            return
        holds = np.zeros(self._devices, np.bool_)
        for before in (None, earlier):
            key = rank_bucket, before is not None
            self._add.declare(key, all_gradient_slots, index, holds, before, order=order)

    def earlier(self, running: RunningBatch, due: Sequence[MicroBatch]) -> Earlier:
        """Return the gradients of the round's requests in earlier rounds.

        Call it once per round, before the round.
        """
        slots = running.claimed.slots
        return {
            slot: self._copy(slots.rank_bucket, slots.gradient_slots, np.int32(slot))
            for slot in running.continued(due)
        }

    def added(
        self,
        gradient_slots: LoraWeights,
        running: RunningBatch,
        due: Sequence[MicroBatch],
        earlier: Earlier,
    ) -> LoraWeights:
        """Return the gradient slots after a round, donated, with the sums of its requests.

        Empties ``earlier``, whose memory is needed until a gradient is added.
        """
        rank_bucket = running.claimed.slots.rank_bucket
        if self._devices == 1:
            while earlier:
                slot, gradient = earlier.popitem()
                gradient_slots = self._add(rank_bucket, gradient_slots, np.int32(slot), gradient)
            return gradient_slots
        members = [running.slots_of(micro_batch) for micro_batch in due]
        for slot in sorted(set().union(*members)):
            holds = np.zeros(self._devices, np.bool_)
            holds[: len(members)] = [slot in each for each in members]
            key = rank_bucket, slot in earlier
            before = earlier.pop(slot, None)
            gradient_slots = self._add(key, gradient_slots, np.int32(slot), holds, before)
        return gradient_slots


def sum_gradients(
    gradient_slots: LoraWeights,
    slot: Slot,
    holds: Bool[Array, " N"],
    earlier: LoraWeights | None,
) -> LoraWeights:
    """Return a device's gradient slots with the sum over devices in the slot.

    The sum is that of ``earlier``, if given, and of the slot's gradients on the devices that
    ``holds`` names, added in the order of the devices: [L, J, D, R] and [L, J, R, F].
    """
    sides = (None, None) if earlier is None else (earlier.a, earlier.b)
    return LoraWeights(
        *(
            {
                name: _summed(buffer, slot, holds, None if before is None else before[name])
                for name, buffer in buffers.items()
            }
            for buffers, before in zip(gradient_slots, sides, strict=True)
        )
    )


def _summed(buffer: Array, slot: Slot, holds: Array, earlier: Array | None) -> Array:
    """Return the buffer with the sum of one matrix; a layer at a time, for the memory of it."""

    def one(layer: Array, buffer: Array) -> Array:
        parts = jax.lax.all_gather(buffer[layer, slot], DEVICES)
        total = parts[0] if earlier is None else earlier[layer]
        is_begun = jnp.bool_(earlier is not None)
        for part, is_held in zip(parts, holds, strict=True):
            total = jnp.where(is_held, jnp.where(is_begun, total + part, part), total)
            is_begun |= is_held
        return buffer.at[layer, slot].set(total)

    summed: Array = jax.lax.fori_loop(0, buffer.shape[0], one, buffer)
    return summed
