"""The format of our own adapter files: their metadata, and an adapter's initial numbers.

NumPy only: the API process writes such files too.

Dimension key: L layers, D inputs of a projection, r true rank.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from tuneserve_engine.core.adapter import AdapterConfig

MEMBER = "adapter.safetensors"
FORMAT = "tuneserve-adapter-1"
FRESH = {"optimizer": "fresh"}
"""The metadata of a file without moments that training can resume from: its moments are zero."""

Array = np.ndarray[Any, np.dtype[np.float32]]


def metadata_of(
    config: AdapterConfig, base_model: str, step: int, revision: str = ""
) -> dict[str, str]:
    """Return a file's metadata; ``revision`` is the base model's, if it has any."""
    of_base = {"base_model_revision": revision} if revision else {}
    return {
        "format": FORMAT,
        "base_model": base_model,
        "config": json.dumps(asdict(config)),
        "step": str(step),
        **of_base,
    }


def config_in(metadata: Mapping[str, str]) -> AdapterConfig:
    """Return the adapter's configuration in a file's metadata.

    Raises msgspec's errors, ``KeyError`` and ``ValueError``.
    """
    config = msgspec.json.decode(metadata["config"], type=AdapterConfig)  # types; refuses NaN
    if config.rank < 1:
        raise ValueError(f"its rank is {config.rank}")
    return config


def initial_a(seed: int, index: int, shape: tuple[int, ...]) -> Array:
    """Return the initial A [.., D, r] of the ``index``-th target.

    Its numbers are uniform in ±1/sqrt(D), as with PEFT's ``kaiming_uniform_(a=sqrt(5))``. They
    depend only on the seed, the target and the shape. They are drawn on the host, so that they are
    the same on every device; a ``jax.random`` program would be compiled for each new rank, which
    takes two seconds while a client waits for its model.
    """
    return _drawn(_generator(seed, index), shape)


def initial_layers(seed: int, index: int, shape: tuple[int, int, int]) -> Iterator[Array]:
    """Yield the same A [L, D, r] layer by layer, bit for bit.

    Only one layer is in memory at a time.
    """
    generator = _generator(seed, index)
    for _ in range(shape[0]):
        yield _drawn(generator, shape[1:])


def _generator(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, index], np.uint64)))


def _drawn(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    uniform = generator.random(shape, np.float32)
    return (2 * uniform - 1) / np.float32(np.sqrt(shape[-2]))
