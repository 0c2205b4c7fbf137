"""Snapshots (frozen adapters): all on the host, the most recently used on the device too."""

from collections import OrderedDict
from dataclasses import dataclass

import jax
import numpy as np

from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.base import OutOfMemory
from tuneserve_engine.backend.jax.adapters.arrays import (
    Put,
    TargetShapes,
    check_state,
    restored_weights,
)
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.sampling.adapter_slots import FrozenAdapter, weights_bytes
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights on the host that never change. Samples that use them hold a reference."""

    name: str
    state: AdapterState
    rank_bucket: int

    @property
    def size(self) -> int:
        return _bytes(self.state.weights)


NO_ADAPTER = AdapterState(
    AdapterConfig(1, 0.0, 0, train_attn=False, train_mlp=False, train_unembed=False), {}
)
"""The base model as an adapter of zeros, so that its rows can share decode slots with other
adapters'.
"""


class Snapshots:
    """The snapshots of a process, in two LRU caches.

    The device holds at most ``device_bytes`` of them, or one. The host holds at most ``host_bytes``
    and, beyond that, the snapshots put in or looked up since the last ``release_pins``.
    """

    def __init__(
        self,
        shapes: TargetShapes,
        static_shapes: StaticShapes,
        *,
        device_bytes: int,
        host_bytes: int,
        put: Put = jax.device_put,
    ) -> None:
        self._shapes = shapes
        self._static_shapes = static_shapes
        self._sizes = {rank: weights_bytes(shapes, rank) for rank in static_shapes.rank_buckets}
        self._put = put
        self._device_bytes = device_bytes
        self._host_bytes = host_bytes
        self._host: OrderedDict[str, Snapshot] = OrderedDict()  # least recently used first
        self._device: OrderedDict[str, FrozenAdapter] = OrderedDict()  # least recently used first
        self._pinned: set[str] = set()
        self.base_model = Snapshot("", NO_ADAPTER, static_shapes.rank_bucket(1))

    def register(self, name: str, state: AdapterState) -> None:
        """Keep a copy of the weights. Raises ``UserError`` if they do not fit the base model."""
        check_state(state, self._shapes)
        weights = {tensor: values.copy() for tensor, values in state.weights.items()}
        rank_bucket = self._static_shapes.rank_bucket(state.config.rank)
        self._host[name] = Snapshot(name, AdapterState(state.config, weights), rank_bucket)
        self._host.move_to_end(name)
        self._device.pop(name, None)
        self._pinned.add(name)
        self._make_room()

    def get(self, name: str) -> Snapshot | None:
        """Return the snapshot, or None if it is not on the host."""
        if name in self._host:
            self._host.move_to_end(name)
            self._pinned.add(name)
        return self._host.get(name)

    def release_pins(self) -> None:
        """Stop protecting the snapshots that were put in or looked up so far, and evict."""
        self._pinned.clear()
        self._make_room()

    def on_device(self, snapshot: Snapshot) -> FrozenAdapter:
        """Return the snapshot's weights on the device, after loading them if necessary.

        Evicts the least recently used snapshots: as many as the limit requires, and more if the
        device has less room.
        """
        if snapshot.name in self._device:
            self._device.move_to_end(snapshot.name)
            return self._device[snapshot.name]
        room = self._device_bytes - self._sizes[snapshot.rank_bucket]
        while self._device and self._on_device_bytes() > room:
            self._device.popitem(last=False)
        while (adapter := self._loaded(snapshot)) is None:
            self._device.popitem(last=False)
        self._device[snapshot.name] = adapter
        return adapter

    def leave_device(self) -> bool:
        """Evict all snapshots from the device. Returns whether there were any."""
        had = bool(self._device)
        self._device.clear()
        return had

    def _make_room(self) -> None:
        size = sum(snapshot.size for snapshot in self._host.values())
        for name in [name for name in self._host if name not in self._pinned]:
            if size <= self._host_bytes:
                break
            size -= self._host.pop(name).size

    def _loaded(self, snapshot: Snapshot) -> FrozenAdapter | None:
        """Load the snapshot; return None if the device lacks room and others can be evicted."""
        state = snapshot.state
        try:
            weights = translate_device_errors(
                restored_weights, state, self._shapes, snapshot.rank_bucket, self._put
            )
        except OutOfMemory:
            if not self._device:
                raise
            return None
        return FrozenAdapter(weights, np.float32(kind_of(state.config).scale(state.config)))

    def _on_device_bytes(self) -> int:
        return sum(self._sizes[adapter.rank_bucket] for adapter in self._device.values())


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
