"""The buffers of a rank class, and the slots of them that each running batch has."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from tuneserve_engine.backend.base import IntArray
from tuneserve_engine.backend.jax.adapters.arrays import (
    LoraWeights,
    TargetShapes,
    TrainingAdapter,
    Weights,
)
from tuneserve_engine.backend.jax.training import adapter_slots as banks
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots


class RankSlots:
    """The adapter slots (``bank``) and gradient buffers (``scratch``) of a rank class.

    Both are allocated when first needed. ``held`` maps each slot of the bank to the weights that it
    holds. Programs take both buffers and give them back, so an exception may leave neither: then
    ``spoil`` drops them, and the new ``version`` shows running batches that their gradients are
    lost.
    """

    def __init__(self, shapes: TargetShapes, rank_class: int, count: int) -> None:
        self.rank_class = rank_class
        self.bank: AdapterSlots | None = None
        self.scratch: LoraWeights | None = None
        self.held: dict[int, Weights] = {}
        self.version = 0
        self._shapes = shapes
        self._count = count
        self._taken = 0

    def allocate(self) -> None:
        """Allocate the buffers that do not exist."""
        if self.bank is None:
            self.held.clear()
            self.bank = banks.new_bank(self._shapes, self.rank_class, self._count)
        if self.scratch is None:
            self.scratch = banks.new_scratch(self._shapes, self.rank_class, self._count)

    def spoil(self) -> None:
        """Drop the buffers, and with them the gradients of all running batches."""
        self.bank = self.scratch = None
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
                self._come_back(*aside)

    def _set_aside(self) -> tuple[int, Any]:
        # Copies: device_get may return views, and programs will write to the buffers.
        return self.version, jax.tree.map(np.array, jax.device_get(self.scratch))

    def _come_back(self, version: int, scratch: Any) -> None:
        """Put the saved scratch back on the device, unless the buffers were spoiled meanwhile."""
        if self.version == version:
            self.scratch = None  # frees the memory of this one before the other is allocated
            self.scratch = jax.device_put(scratch)


class BatchSlots(NamedTuple):
    """The slots of a batch: one for each request, from ``first`` on."""

    slots: RankSlots
    first: int

    def shifted(self, requests: IntArray) -> IntArray:
        """Return the slots of requests given by number; -1 stays -1."""
        shifted: IntArray = np.where(requests >= 0, requests + np.int32(self.first), requests)
        return shifted


class Disturbed(Exception):
    """The gradients of a batch are lost: a batch that interrupted it failed on the device.

    The batch's ``adapters`` have not changed.
    """

    def __init__(self, adapters: Sequence[TrainingAdapter]) -> None:
        super().__init__("a unit that came in between failed on the device")
        self.adapters = adapters
