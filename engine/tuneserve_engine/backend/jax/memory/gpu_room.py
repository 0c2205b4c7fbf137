"""Temporary memory of programs on a GPU. It is fitted to programs compiled for an H200.

Letters in formulas: as in ``sizes``.
"""

from typing import NamedTuple

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.tile import TILE
from tuneserve_engine.core.shapes import StaticShapes, power_of_two_from

TOKEN_BYTES = 96
"""Bytes per token that the layers compute beside its hidden states: masks, and block owners."""


_LEAST_TILE = 16
"""The least head_dim that the kernels of decoding take."""
_WORKSPACE_BYTES = 2**25
"""The workspace of the library that multiplies."""


class Logits(NamedTuple):
    """A chunk of the head: its tokens, and the bytes of its logits in both programs."""

    tokens: int
    trained: int
    scored: int


class LayerRoom(NamedTuple):
    """A layer: the bytes of its weights, which a loop over chunks copies, or 0 without a loop.

    ``is_recomputed`` says whether the backward pass computes a chunk's products again. If devices
    share the weights, the bytes are those of what is gathered.
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


def decoding_has_kernels(config: ModelConfig, device_kind: str, item: int) -> bool:
    """Return whether kernels compute attention and adapters of decoding: see ``paged_gpu.fits``."""
    size = config.head_dim
    is_tiled = size >= _LEAST_TILE and size == power_of_two_from(size)
    return has_kernels(config, device_kind) and item == 2 and is_tiled


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


def prefill_bytes(config: ModelConfig, shapes: StaticShapes) -> int:
    """Return the bytes of a step of prefill in bfloat16, which copies the adapter of each block.

    It is in its MLP or its attention with one projection's adapter, or in its MLP with two, in a
    product with them, or in their own product if the rank is high.
    """
    tokens, inner = shapes.prefill_tokens, config.intermediate
    per_width = tokens // shapes.block * 4 * shapes.max_rank
    adapter = per_width * (config.hidden + inner)
    one = tokens * (14 * inner + 3 * config.heads * config.head_dim + 1024) + adapter
    two = tokens * (11 * inner + 1024) + 2 * adapter
    in_product = _WORKSPACE_BYTES + tokens * 7 * inner + 2 * adapter
    high_rank = tokens * (5 * inner + 3072) + 2 * (adapter + per_width * config.hidden)
    return max(one, two, in_product, high_rank) + 2 * tokens * config.hidden


def decoded_bytes(config: ModelConfig, rows: int) -> int:
    """Return the bytes of a decoding step in bfloat16: in its layers, or while it draws tokens.

    For a single row, XLA multiplies by itself, with a float32 copy of the unembedding.
    """
    layers = _WORKSPACE_BYTES + rows * 24 * config.intermediate + 2**19
    draws = rows * (23 * config.vocab_size + 4 * config.hidden) + 2**20
    copied = 4 * config.vocab_size * config.hidden if rows == 1 else 0
    return max(layers, draws) + copied


def prompt_score_bytes(config: ModelConfig, shapes: StaticShapes) -> int:
    """Return the bytes of the scores of a block of a prompt: four float32 copies of its logits."""
    logits = shapes.block * (16 * config.vocab_size + 1024)
    return max(logits, _WORKSPACE_BYTES) + 2**22
