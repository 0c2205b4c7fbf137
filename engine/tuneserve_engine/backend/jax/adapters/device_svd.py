"""The base weights' decomposition, which adapters of some kinds share, on host and device.

Dimension key: L layers, K directions of a decomposition.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.kinds.base import (
    SvdFactors,
    decomposition_bytes,
    decomposition_shapes,
    mask_size,
)
from tuneserve_engine.adapters.svd import BaseWeightSvd, Layers, trainable_mask
from tuneserve_engine.backend.jax.adapters.arrays import Put, TargetShapes, host_zeros
from tuneserve_engine.backend.jax.fingerprint import weights_digest
from tuneserve_engine.backend.jax.model.weights import stored_layers
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.backend_options import DType

_DIGEST_CHARS = 16
_LAYOUT = b"directions are rows"
"""The layout of the files. Files of another layout are in folders of other names."""


class DeviceSvd:
    """The decomposition of one base model's layers, in a folder of its own under ``folder``.

    ``layers`` returns a weight's layers in the type that the device has them in.

    On the device it is padded; adapters of all ranks share it.
    """

    def __init__(  # noqa: PLR0913
        self,
        folder: Path,
        layers: Layers,
        shapes: TargetShapes,
        max_rank: int,
        *,
        min_free_bytes: int = 0,
        put: Put = jax.device_put,
    ) -> None:
        self._put_arrays = put
        self._shapes = shapes
        self._device_shapes = {
            name: decomposition_shapes(shape, max_rank)
            for name, shape in shapes.items()
            if len(shape) == 3
        }
        self._device: dict[str, tuple[Any, Any, Any]] | None = None
        self.decomposition = BaseWeightSvd(
            lambda: folder / _digest(layers, list(self._device_shapes)),
            shapes,
            layers,
            min_free_bytes=min_free_bytes,
        )
        self.bytes = decomposition_bytes(shapes, max_rank)
        """Size on the device, while it is there."""

    def svd_factors(self, config: AdapterConfig, target: str) -> SvdFactors | None:
        """Return the adapter's part of the target's decomposition, on the host.

        Returns None if the adapter needs none of it.
        """
        if not kinds.kind_of(config).needs_decomposition:
            return None
        return self.decomposition.frozen(config, target)

    def on_device(self, config: AdapterConfig) -> dict[str, SvdFactors] | None:
        """Return the adapter's parts of all targets, on the device.

        Puts the decomposition there if necessary. ``kept`` is 0 everywhere for targets that the
        adapter does not train.
        """
        kind = kinds.kind_of(config)
        if not kind.needs_decomposition:
            return None
        if self._device is None:
            self._device = self._put()
        found = {}
        for name, (u, s, v) in self._device.items():
            rank = kind.rank(config, self._shapes[name]) if name in config.targets else 0
            found[name] = SvdFactors(
                u, s, v, trainable_mask(rank, mask_size(self._device_shapes[name]))
            )
        return found

    def leave_device(self) -> None:
        self._device = None

    def _put(self) -> dict[str, tuple[Any, Any, Any]]:
        """Put one target after the other: the host never holds the padded arrays of two."""
        put = {}
        for name in self._device_shapes:
            put[name] = self._put_arrays(self._padded(name))
            jax.block_until_ready(put[name])  # type: ignore[no-untyped-call]
        return put

    def _padded(self, name: str) -> tuple[Any, Any, Any]:
        u, s, v = self.decomposition.arrays(name)
        shapes = self._device_shapes[name]
        return _fitted(u, shapes["u"]), _fitted(s, shapes["s"]), _fitted(v, shapes["v"])


def layers_in_files(folder: Path, dtype: DType) -> Layers:
    """Return a function that reads a projection's layers from the files of the base model.

    It raises ``ValueError`` if these have changed since this call.
    """
    digest = weights_digest(folder)

    def layers(weight: str) -> Iterator[Any]:
        if weights_digest(folder) != digest:
            raise ValueError(f"{folder} has changed since the worker started; restart the worker")
        return stored_layers(folder, dtype, weight)

    return layers


def _fitted(array: Any, shape: tuple[int, ...]) -> Any:
    """Return the array cut to this shape, and padded with zeros where it is shorter."""
    fitted = host_zeros(shape)
    both = tuple(slice(min(sizes)) for sizes in zip(array.shape, shape, strict=True))
    fitted[both] = array[both]
    return fitted


def _digest(layers: Layers, names: list[str]) -> str:
    """Return a digest of every bit of these weights and their dtype.

    Every bit matters: merging an adapter into a model changes few of its weights, but gives it
    other directions.
    """
    digest = hashlib.sha256(_LAYOUT)
    for name in names:
        for layer in layers(name):
            digest.update(f"{name} {layer.dtype}{layer.shape}".encode())
            digest.update(layer.tobytes())
    return digest.hexdigest()[:_DIGEST_CHARS]
