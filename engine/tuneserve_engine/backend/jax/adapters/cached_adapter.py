"""One training adapter, in one of three places: the device, host memory or a spill file."""

from dataclasses import dataclass, replace

import numpy as np

from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.jax.adapters.arrays import (
    TrainingAdapter,
    arrays_of,
)
from tuneserve_engine.backend.jax.adapters.spill_files import SpillFile
from tuneserve_engine.core.adapter import AdapterConfig


@dataclass(eq=False)
class CachedAdapter:
    """One adapter. It is in one of three places, or in none while it moves."""

    config: AdapterConfig
    rank_bucket: int
    device_bytes: int
    is_sharing: bool = False  # whether it needs the decomposition of the base weights
    device: TrainingAdapter | None = None
    host: AdapterState | None = None
    host_bytes: int = 0
    file: SpillFile | None = None

    def keep(self, state: AdapterState) -> None:
        """Keep the state in host memory."""
        self.host, self.host_bytes = state, state.nbytes

    def stored(self) -> AdapterState:
        """Return the state that is in host memory or in the file."""
        if self.host is not None:
            return self.host
        assert self.file is not None, "the adapter is on its way"
        return self.file.read()

    def forget_stored(self) -> None:
        self.host = None
        if self.file is not None:
            self.file.delete()
            self.file = None

    def discard(self) -> None:
        """Free the memory or the file of the adapter, in all three places."""
        self.forget_stored()
        if self.device is not None:
            free_arrays(self.device)
            self.device = None


def free_arrays(adapter: TrainingAdapter) -> None:
    """Free the adapter's memory now, not when the last reference goes.

    The trainer keeps references, to know which weights it has copied. Deleted arrays also cannot be
    trained any more by mistake.
    """
    for array in arrays_of(adapter):
        array.delete()


def resumable_copy(state: AdapterState) -> AdapterState:
    """Return a copy of the part of the state that a restored adapter has."""
    has_stepped = state.step > 0 and bool(state.first_moment)
    copy = AdapterState(
        state.config, _copied(state.weights), accumulator=_copied(state.accumulator)
    )
    if not has_stepped:
        return copy
    return replace(
        copy,
        step=state.step,
        first_moment=_copied(state.first_moment),
        second_moment=_copied(state.second_moment),
    )


def part_of_state(state: AdapterState, *, optimizer: bool, accumulator: bool) -> AdapterState:
    """Return what ``saved_state`` would return for an adapter, from its evicted state."""
    part = AdapterState(state.config, _copied(state.weights))
    if optimizer:
        zeros = {name: np.zeros_like(tensor) for name, tensor in state.weights.items()}
        part = replace(
            part,
            step=state.step,
            first_moment=_copied(state.first_moment or zeros),
            second_moment=_copied(state.second_moment or zeros),
        )
    if accumulator:
        part = replace(part, accumulator=_copied(state.accumulator))
    return part


def _copied(tensors: Tensors) -> Tensors:
    return {name: np.array(tensor, order="C") for name, tensor in tensors.items()}
