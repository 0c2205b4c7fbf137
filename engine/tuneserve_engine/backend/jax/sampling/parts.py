"""The parts of sampling's arrays on each device.

A device decodes every token with its own outputs of the base weights, and its own heads in its own
pages. All devices have the whole hidden states and logits, and draw the same tokens.

Dimension key: L layers, P pages, S positions of a page, K key/value heads, H head_dim, J adapter
slots, R rank bucket, F outputs of a projection.
"""

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights
from tuneserve_engine.backend.jax.mesh import DEVICES, WHOLE, DeviceMesh
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes, most_parts
from tuneserve_engine.backend.jax.sampling.adapter_slots import DecodeAdapters, scans_layers


class SamplingParts(NamedTuple):
    """The parts of the arrays that are not whole on each device."""

    pages: PartitionSpec
    weights: tuple[Any, ...]  # of layers that are unstacked
    adapters: DecodeAdapters


def parts_of_sampling(config: ModelConfig, mesh: DeviceMesh) -> SamplingParts:
    """Return the parts of pages, unstacked layers and adapter slots."""
    shared = {name: mesh.divides(count) for name, count in most_parts(config).items()}
    pages = _axis(2 if scans_layers() else 1, is_shared=shared["k_proj"])
    weights: tuple[Any, ...] = ()
    if not scans_layers():
        of_layer = {
            name: _axis(len(shape) - 1, is_shared=shared.get(name, False))
            for name, shape in layer_shapes(config).items()
        }
        weights = (of_layer,) * config.layers
    return SamplingParts(pages, weights, _of_adapters(config, shared))


def _of_adapters(config: ModelConfig, shared: dict[str, bool]) -> DecodeAdapters:
    """Return the parts of adapter slots: A is whole on each device, B is shared like its weight.

    B of a layer is [J, R, F], and on a GPU [L, J, F, R].
    """
    of_layers = LoraWeights(
        dict.fromkeys(shared, WHOLE),  # type: ignore[arg-type]
        {name: _axis(2, is_shared=each) for name, each in shared.items()},  # type: ignore[misc]
    )
    count = 1 if scans_layers() else config.layers
    return DecodeAdapters((of_layers,) * count, WHOLE, WHOLE)  # type: ignore[arg-type]


def _axis(axis: int, *, is_shared: bool) -> PartitionSpec:
    """Return the part of an array whose axis devices share."""
    return PartitionSpec(*[None] * axis, DEVICES) if is_shared else WHOLE  # type: ignore[no-untyped-call]
