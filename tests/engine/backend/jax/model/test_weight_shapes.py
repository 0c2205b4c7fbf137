"""Devices share the outputs of projections in whole heads, and in whole tiles of kernels."""

import pytest

from scripts.gpu_compile.shapes import MODELS
from tests.engine.conftest import TINY
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes, most_parts


@pytest.mark.parametrize(
    ("name", "heads", "hidden", "inner"),
    [("qwen3-0.6b", 8, 8, 24), ("qwen3-32b", 8, 40, 200), ("llama-70b", 8, 64, 224)],
)
def test_heads_of_128_values_are_tiles(name: str, heads: int, hidden: int, inner: int) -> None:
    """Of 1,024, 5,120 and 8,192 hidden values, and of 3,072, 25,600 and 28,672 in the MLP."""
    parts = most_parts(MODELS[name])
    assert [parts[f"{each}_proj"] for each in "qkv"] == [heads] * 3
    assert (parts["o_proj"], parts["down_proj"]) == (hidden, hidden)
    assert (parts["gate_proj"], parts["up_proj"]) == (inner, inner)


def test_widths_without_tiles_are_divided_by_heads_and_values() -> None:
    """Two heads of 6 values, 16 hidden values and 24 in the MLP."""
    config = ModelConfig.from_hf(TINY)
    parts = most_parts(config)
    assert [parts[f"{each}_proj"] for each in "qkv"] == [2] * 3
    assert (parts["o_proj"], parts["gate_proj"]) == (16, 24)
    shapes = layer_shapes(config)
    assert all(shapes[name][-1] % count == 0 for name, count in parts.items())


def test_narrow_heads_share_a_tile() -> None:
    """Llama-3.2-1B has 8 key/value heads of 64: two of them are a tile."""
    config = ModelConfig.from_hf(
        TINY | {"head_dim": 64, "num_key_value_heads": 8, "num_attention_heads": 32}
    )
    assert most_parts(config)["k_proj"] == 4
