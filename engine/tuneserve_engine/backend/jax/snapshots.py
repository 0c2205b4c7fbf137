"""Frozen adapters: all that are kept are on the host, those used last on the device too."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import AdapterState, OutOfMemory, Tensors
from tuneserve_engine.backend.jax.adapters import TargetShapes, check_state, restored_weights
from tuneserve_engine.backend.jax.device import on_device
from tuneserve_engine.backend.jax.sample_adapters import Adapter, weights_bytes
from tuneserve_engine.kinds import kind_of
from tuneserve_engine.lattice import ShapeLattice


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights that never change, on the host. Whoever samples from them holds on to them."""

    name: str
    state: AdapterState
    rank_class: int

    @property
    def size(self) -> int:
        return _bytes(self.state.weights)


NO_ADAPTER = AdapterState(
    AdapterConfig(1, 0.0, 0, train_attn=False, train_mlp=False, train_unembed=False), {}
)
"""The base model as an adapter of zeros, so that its rows can share lanes with any other's."""


class Snapshots:
    """At most ``device_bytes`` of them, or one, are on the device. The host has at most
    ``host_bytes`` and, beyond that, those put in or asked for since the last ``settle``."""

    def __init__(
        self, shapes: TargetShapes, lattice: ShapeLattice, *, device_bytes: int, host_bytes: int
    ) -> None:
        self._shapes = shapes
        self._lattice = lattice
        self._sizes = {rank: weights_bytes(shapes, rank) for rank in lattice.rank_classes}
        self._device_bytes = device_bytes
        self._host_bytes = host_bytes
        self._host: OrderedDict[str, Snapshot] = OrderedDict()  # least recently used first
        self._device: OrderedDict[str, Adapter] = OrderedDict()  # the same
        self._wanted: set[str] = set()
        self.base_model = Snapshot("", NO_ADAPTER, lattice.rank_class(1))

    def put(self, name: str, state: AdapterState) -> None:
        """Keeps a copy of the weights. Raises UserError if they do not fit the base model."""
        check_state(state, self._shapes)
        weights = {tensor: values.copy() for tensor, values in state.weights.items()}
        rank_class = self._lattice.rank_class(state.config.rank)
        self._host[name] = Snapshot(name, AdapterState(state.config, weights), rank_class)
        self._host.move_to_end(name)
        self._device.pop(name, None)
        self._wanted.add(name)
        self._make_room()

    def get(self, name: str) -> Snapshot | None:
        """None if it is not here."""
        if name in self._host:
            self._host.move_to_end(name)
            self._wanted.add(name)
        return self._host.get(name)

    def settle(self) -> None:
        """Nothing that was wanted before need be kept for that."""
        self._wanted.clear()
        self._make_room()

    def on_device(self, snapshot: Snapshot) -> Adapter:
        """Its weights on the device, where the least recently used ones make room for them: as many
        as the limit asks for, and more if the device has less room."""
        if snapshot.name in self._device:
            self._device.move_to_end(snapshot.name)
            return self._device[snapshot.name]
        room = self._device_bytes - self._sizes[snapshot.rank_class]
        while self._device and self._on_device_bytes() > room:
            self._device.popitem(last=False)
        while (adapter := self._loaded(snapshot)) is None:
            self._device.popitem(last=False)
        self._device[snapshot.name] = adapter
        return adapter

    def leave_device(self) -> bool:
        """Gives back what they have of the device; whether that was something."""
        had = bool(self._device)
        self._device.clear()
        return had

    def _make_room(self) -> None:
        size = sum(snapshot.size for snapshot in self._host.values())
        for name in [name for name in self._host if name not in self._wanted]:
            if size <= self._host_bytes:
                break
            size -= self._host.pop(name).size

    def _loaded(self, snapshot: Snapshot) -> Adapter | None:
        """None if the device has no room and there are others to drop."""
        state = snapshot.state
        try:
            weights = on_device(restored_weights, state, self._shapes, snapshot.rank_class)
        except OutOfMemory:
            if not self._device:
                raise
            return None
        return Adapter(weights, np.float32(kind_of(state.config).scale(state.config)))

    def _on_device_bytes(self) -> int:
        return sum(self._sizes[adapter.rank_class] for adapter in self._device.values())


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
