"""A decoder for tests that need the shapes of its weights only."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder


def zero_decoder(config: ModelConfig, dtype: Any = jnp.float32) -> Decoder:
    """Return a decoder of zeros. Random weights would compile a program per shape."""
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    )
    zeros = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
    return nnx.merge(graph, zeros)
