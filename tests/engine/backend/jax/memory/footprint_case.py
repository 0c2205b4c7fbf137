"""Models and shapes whose memory is counted."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from tests.support.decoders import zero_decoder
from tests.support.nightly import at_night
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.memory.footprint import Footprint
from tuneserve_engine.backend.jax.memory.sizes import EngineShape
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.sampling.kv_pages import most_pages
from tuneserve_engine.backend.jax.training.adapter_slots import AdapterSlots, new_adapter_slots
from tuneserve_engine.core.shapes import StaticShapes

QWEN3 = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    hidden=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate=20,
    context_length=48,
    qk_norm=True,
    tied_embeddings=True,
)
QWEN2 = replace(QWEN3, architecture="qwen2", qk_norm=False, attention_bias=True)
LLAMA = replace(
    QWEN3,
    architecture="llama",
    qk_norm=False,
    tied_embeddings=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)
MODELS = pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA], ids=lambda c: c.architecture)
SIDES = ("float32", "bfloat16")
DTYPES = pytest.mark.parametrize("dtype", SIDES)
STATIC_SHAPES = StaticShapes(
    48, block=8, chunk=16, requested_tokens=64, request_slots=6, rank_buckets=(2, 4)
)


UNLIKE = replace(QWEN3, hidden=64, intermediate=160, head_dim=16, vocab_size=400)
"""A configuration in which all sizes differ."""
SHAPES = {
    "usual": (UNLIKE, STATIC_SHAPES),
    "long": (replace(UNLIKE, context_length=512), replace(STATIC_SHAPES, context_length=512)),
    "many words": (replace(UNLIKE, vocab_size=8000), STATIC_SHAPES),
    "wide layers": (replace(UNLIKE, hidden=256, intermediate=640), STATIC_SHAPES),
    "high ranks": (UNLIKE, replace(STATIC_SHAPES, rank_buckets=(2, 64))),
}
BY_DAY = {("usual", "float32"), ("long", "bfloat16"), ("high ranks", "bfloat16")}
"""The others are compiled at night."""
EVERY_SHAPE = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype) if (name, dtype) in BY_DAY else at_night(name, dtype)
        for name in SHAPES
        for dtype in SIDES
    ],
)


def footprint(config: ModelConfig, **changes: Any) -> Footprint:
    pages = most_pages(changes.get("static_shapes", STATIC_SHAPES), changes.get("sample_rows", 8))
    shape = EngineShape(STATIC_SHAPES, "dots", 8, 8, "float32", "cpu", pages)
    return Footprint(config, replace(shape, **changes))


def size(arrays: Any) -> int:
    """Bytes of arrays, or of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def decoder(
    config: ModelConfig,
    dtype: Any,
    remat: Any = "dots",
    static_shapes: StaticShapes = STATIC_SHAPES,
) -> Decoder:
    model = zero_decoder(config, dtype)
    model.use_shapes(static_shapes)
    model.remat = remat
    return model


def adapter_slots(
    config: ModelConfig, static_shapes: StaticShapes = STATIC_SHAPES, rank: int | None = None
) -> AdapterSlots:
    rank = rank or static_shapes.max_rank
    return new_adapter_slots(target_shapes(config), rank, static_shapes.slots(rank))
