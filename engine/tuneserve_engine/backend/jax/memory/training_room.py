"""Temporary memory of training on a GPU. It is fitted to programs compiled for an H200.

Letters in formulas: as in ``footprint``.
"""

from typing import NamedTuple

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.tile import TILE
from tuneserve_engine.core.shapes import StaticShapes

TOKEN_BYTES = 96
"""Bytes per token that the layers compute beside its hidden states: masks, and block owners."""


class Logits(NamedTuple):
    """A chunk of the head: its tokens, and the bytes of its logits in both programs."""

    tokens: int
    trained: int
    scored: int


class LayerRoom(NamedTuple):
    """A layer: the bytes of its weights, which a loop over chunks copies, or 0 without a loop.

    ``is_recomputed`` says whether the backward pass computes a chunk's products again.
    """

    weights: int
    is_recomputed: bool


def has_kernels(config: ModelConfig, device_kind: str) -> bool:
    """Return whether kernels compute all adapters, so that none is copied for its blocks."""
    return layers_have_kernels(config, device_kind) and config.vocab_size % TILE == 0


def layers_have_kernels(config: ModelConfig, device_kind: str) -> bool:
    """Return whether kernels compute the adapters of the layers, whatever the LM head's."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    widths = config.hidden, queries, keys, config.intermediate
    return device_kind == "gpu" and all(width % TILE == 0 for width in widths)


def trained_bytes(
    config: ModelConfig, shapes: StaticShapes, item: int, layer: LayerRoom, logits: Logits
) -> int:
    """Return the bytes of a program of training: in its layers, or in its head if that is more.

    Beside the layer's weights, there are the values of a chunk. A chunk of the head has logits,
    their gradient, and its copy in the weights' type. Beside them, there are the last hidden states
    of all tokens, and in float32 those of the chunk and their gradient.
    """
    attended = config.heads * config.head_dim
    width = (8 + item) * config.intermediate + item * (2 * config.hidden + 3 * attended)
    width += 2 * item * config.intermediate * layer.is_recomputed
    head = logits.trained + 8 * logits.tokens * config.hidden
    head += shapes.micro_batch_tokens * (config.hidden * item + TOKEN_BYTES)
    return max(layer.weights + shapes.chunk * width, head)


def scored_bytes(
    config: ModelConfig, shapes: StaticShapes, item: int, layer: LayerRoom, logits: Logits
) -> int:
    """Return the bytes of a program of scoring, as ``trained_bytes``.

    In both phases, it holds hidden states into and out of the layer, and queries, keys, values and
    results of attention of all tokens.
    """
    heads = 2 * (config.heads + config.kv_heads) * config.head_dim
    width = (3 * config.hidden + heads) * item + 4 * config.heads
    chunk = layer.weights + shapes.chunk * 8 * (config.intermediate + config.hidden)
    head = logits.scored + 4 * logits.tokens * config.hidden
    return shapes.micro_batch_tokens * width + max(chunk, head)
