"""The buffers of a rank bucket, and the slots of them that each running batch has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TrainingAdapter, Weights
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots


class RankSlots:
    """The adapter slots (``adapter_slots``) and gradient buffers (``gradient_slots``) of a rank
    bucket.

    Both are allocated when first needed; ``empty_slots`` and ``empty_gradients`` return zeros on
    the devices. Each device has gradient slots of its own. ``held`` maps each adapter slot to the
    weights that it holds. Programs take both buffers and give them back, so an exception may leave
    neither: then ``spoil`` drops them, and the new ``version`` shows running batches that their
    gradients are lost.
    """

    def __init__(
        self,
        rank_bucket: int,
        count: int,
        empty_slots: Callable[[], AdapterSlots],
        empty_gradients: Callable[[], LoraWeights],
    ) -> None:
        self.rank_bucket = rank_bucket
        self.adapter_slots: AdapterSlots | None = None
        self.gradient_slots: LoraWeights | None = None
        self.held: dict[int, Weights] = {}
        self.version = 0
        self._count = count
        self._empty_slots = empty_slots
        self._empty_gradients = empty_gradients
        self._taken = 0

    def allocate(self) -> None:
        """Allocate the buffers that do not exist."""
        if self.adapter_slots is None:
            self.held.clear()
            self.adapter_slots = self._empty_slots()
        if self.gradient_slots is None:
            self.gradient_slots = self._empty_gradients()

    def spoil(self) -> None:
        """Drop the buffers, and with them the gradients of all running batches."""
        self.adapter_slots = self.gradient_slots = None
        self.version += 1

    @contextmanager
    def claimed(self, requests: int) -> Iterator["BatchSlots"]:
        """Claim slots for a batch, after those of the batches that it interrupts.

        If too few slots are left, the gradients of the interrupted batches wait on the host; their
        bits do not change.
        """
        first, aside = self._taken, None
        if first + requests > self._count:
            first, aside = 0, self._set_aside()
        taken, self._taken = self._taken, first + requests
        try:
            yield BatchSlots(self, first)
        finally:
            self._taken = taken
            if aside is not None:
                self._restore(*aside)

    def _set_aside(self) -> tuple[int, Any]:
        return self.version, jax.tree.map(_HostCopy, self.gradient_slots)

    def _restore(self, version: int, saved: Any) -> None:
        """Put the saved gradients back on the device, unless the buffers were spoiled meanwhile."""
        if self.version == version:
            self.gradient_slots = None  # frees the memory of this one before the other is allocated
            self.gradient_slots = jax.tree.map(_HostCopy.on_devices, saved)


class _HostCopy:
    """A copy on the host of the parts of an array that this process's devices have."""

    def __init__(self, array: jax.Array) -> None:
        self._shape, self._sharding = array.shape, array.sharding
        # Copies: on a CPU these are views, and programs will write to the buffers.
        self._parts = [(part.device, np.array(part.data)) for part in array.addressable_shards]

    def on_devices(self) -> jax.Array:
        parts = [jax.device_put(part, device) for device, part in self._parts]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)


class BatchSlots(NamedTuple):
    """The slots of a batch: one for each request, from ``first`` on."""

    slots: RankSlots
    first: int


class GradientsLost(Exception):
    """The gradients of a batch are lost: a batch that interrupted it failed on the device.

    The batch's ``adapters`` have not changed.
    """

    def __init__(self, adapters: Sequence[TrainingAdapter]) -> None:
        super().__init__("a batch that ran in between failed on the device")
        self.adapters = adapters
