"""Decoders of tests, without the programs that JAX would compile to draw each weight."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder


def zero_decoder(config: ModelConfig, dtype: Any = jnp.float32) -> Decoder:
    """Return a decoder of zeros, for tests that need the shapes of its weights only."""
    return _decoder(config, dtype, lambda _, shape: np.zeros(shape))


def random_decoder(
    config: ModelConfig, dtype: Any = jnp.float32, *, std: float = 0.02, norm_std: float = 0.0
) -> Decoder:
    """Return a decoder with weights drawn around zero, those of norms around one."""
    random = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        is_norm = "norm" in name
        return is_norm + (norm_std if is_norm else std) * random.standard_normal(shape)

    return _decoder(config, dtype, draw)


def _decoder(
    config: ModelConfig, dtype: Any, value: Callable[[str, tuple[int, ...]], np.ndarray]
) -> Decoder:
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    )
    made = [
        (path, spec.replace(jnp.asarray(value(str(path), spec.shape).astype(spec.dtype))))
        for path, spec in nnx.to_flat_state(shapes)
    ]
    return nnx.merge(graph, nnx.from_flat_state(made))
