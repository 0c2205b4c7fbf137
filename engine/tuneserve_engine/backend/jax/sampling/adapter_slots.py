"""Frozen adapters on the device, and the adapter slots of decoding.

On a CPU, every decode slot has its own adapter slot. On a GPU, decode slots share the adapter slots
of a few adapters, because reading an adapter in float32 takes long.

Dimension key: L layers, J adapter slots, B decode slots, D inputs of a projection, F its outputs, R
rank bucket.
"""

from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TargetShapes
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.model.shared_lora import SharedLora, fits, row_tiles
from tuneserve_engine.backend.jax.target import target_platform
from tuneserve_engine.core.adapter import UNEMBED

Scalar = Array | np.generic


class FrozenAdapter(NamedTuple):
    """A frozen adapter on the device, padded to its rank bucket; the base model is all zeros."""

    weights: LoraWeights
    scale: Scalar

    @property
    def rank_bucket(self) -> int:
        return int(next(iter(self.weights.a.values())).shape[-1])

    def one_row(self) -> LoraRows:
        """Return the adapter for a single row, with layers still stacked."""
        weights = jax.tree.map(lambda x: jnp.expand_dims(x, x.ndim - 2), self.weights)
        return LoraRows(weights.a, weights.b, jnp.asarray(self.scale)[None])


def scans_layers() -> bool:
    """Return whether sampling loops over the layers instead of having arrays for each.

    A CPU would copy a layer's weights before it multiplies with them.
    """
    return target_platform() != "cpu"


class DecodeAdapters(NamedTuple):
    """The adapters in all adapter slots.

    On a CPU, every layer has its own arrays, like the base weights for decoding: see
    ``Decoder.unstacked``. Elsewhere, one pair of all layers is a[target] [L, J, R, D] and b[target]
    [L, J, F, R].
    """

    layers: tuple[LoraWeights, ...]  # L of a[target] [J, D, R] and b[target] [J, R, F]
    unembed: LoraWeights
    scale: Float[Array, " J"]

    def of_layer(self, index: int) -> LoraRows:
        return LoraRows(*_turned(self.layers[index]), self.scale)

    def of_unembedding(self) -> LoraRows:
        return LoraRows(*_turned(self.unembed), self.scale)

    def of_tokens(
        self, slot: Int[Array, " B"]
    ) -> tuple[LoraRows | SharedLora, LoraRows | SharedLora]:
        """Return the adapters of all layers and of the unembedding, on a GPU, for a token per row.

        Row b uses adapter slot ``slot[b]``.
        """
        (layers,) = self.layers
        if not all(
            fits(part.a[name], part.b[name]) for part in (layers, self.unembed) for name in part.a
        ):
            return self.of_layer(0)._replace(slot=slot), self.of_unembedding()._replace(slot=slot)
        tiles = row_tiles(slot, self.scale.shape[0])
        return (
            SharedLora(layers.a, layers.b, self.scale, tiles, jnp.int32(0)),
            SharedLora(self.unembed.a, self.unembed.b, self.scale, tiles, jnp.int32(0)),
        )


def _turned(weights: LoraWeights) -> LoraWeights:
    """Turn both matrices on a GPU, where slots hold them with the contracted dimension last.

    It is the order in which decoding reads them. Otherwise XLA would turn all slots in every call.
    """
    if not scans_layers():
        return weights
    turned: LoraWeights = jax.tree.map(lambda x: x.swapaxes(-1, -2), weights)
    return turned


def set_slot_adapter(
    adapters: DecodeAdapters, slot: Int[Array, ""], adapter: FrozenAdapter
) -> DecodeAdapters:
    """Return the adapter slots with the adapter in one of them."""

    def place(slots: Array, new: Array) -> Array:
        axis = slots.ndim - 3  # adapters of several layers have an axis before
        updated: Array = jax.lax.dynamic_update_index_in_dim(slots, new, slot, axis)
        return updated

    layers, unembed = _by_layer(adapter.weights)
    return DecodeAdapters(
        layers=jax.tree.map(place, adapters.layers, layers),
        unembed=jax.tree.map(place, adapters.unembed, unembed),
        scale=adapters.scale.at[slot].set(jnp.asarray(adapter.scale)),
    )


def empty_adapters(weights: LoraWeights, *, slots: int) -> DecodeAdapters:
    """Return adapter slots of zeros, in the shapes of these weights."""

    def zeros(x: Array) -> Array:
        return jnp.zeros((*x.shape[:-2], slots, *x.shape[-2:]), x.dtype)

    layers, unembed = jax.tree.map(zeros, _by_layer(weights))
    return DecodeAdapters(layers, unembed, jnp.zeros(slots, jnp.float32))


def adapter_specs(shapes: TargetShapes, rank: int) -> Any:
    """Return a ``FrozenAdapter`` of specs."""
    a, b = {}, {}
    for name, (*layers, inputs, outputs) in shapes.items():
        a[name] = _float32((*layers, inputs, rank))
        b[name] = _float32((*layers, rank, outputs))
    return FrozenAdapter(LoraWeights(a, b), _float32(()))


def weights_bytes(shapes: TargetShapes, rank: int) -> int:
    """Return the size of the weights of a ``FrozenAdapter``."""
    weights = adapter_specs(shapes, rank).weights
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))


def _by_layer(weights: LoraWeights) -> tuple[tuple[LoraWeights, ...], LoraWeights]:
    """Split the weights into each layer's part and the unembedding's."""

    def side(arrays: dict[str, Array], is_unembed: bool) -> dict[str, Array]:
        return {name: x for name, x in arrays.items() if (name == UNEMBED) == is_unembed}

    stacked = LoraWeights(side(weights.a, False), side(weights.b, False))
    unembed = LoraWeights(side(weights.a, True), side(weights.b, True))
    if scans_layers():
        return (_turned(stacked),), _turned(unembed)
    count = next(iter(stacked.a.values())).shape[0]
    layers = (jax.tree.map(itemgetter(index), stacked) for index in range(count))
    return tuple(layers), unembed


def _float32(shape: tuple[int, ...]) -> Any:
    """Return the spec of a float32 array."""
    return jax.ShapeDtypeStruct(shape, np.float32)  # type: ignore[no-untyped-call]
