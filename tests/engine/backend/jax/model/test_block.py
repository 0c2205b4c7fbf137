"""One layer: the shapes of its weights, and a projection with a bias and an adapter.

``test_decoder`` and ``test_layer_stack`` compare whole layers with references.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tuneserve_engine.backend.jax.model.block import Layer, plus_lora, project
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes

CONFIG = ModelConfig("llama", 61, 8, 2, 4, 2, 6, 10, 64)
"""Hidden 8, 4 query heads and 2 key heads of 6, intermediate 10."""


def test_projections_are_stored_as_inputs_by_outputs() -> None:
    assert layer_shapes(CONFIG) == {
        "input_norm": (8,),
        "q_proj": (8, 24),
        "k_proj": (8, 12),
        "v_proj": (8, 12),
        "o_proj": (24, 8),
        "post_attention_norm": (8,),
        "gate_proj": (8, 10),
        "up_proj": (8, 10),
        "down_proj": (10, 8),
    }


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("attention_bias", {"q_proj_bias": (24,), "k_proj_bias": (12,), "v_proj_bias": (12,)}),
        ("output_bias", {"o_proj_bias": (8,)}),
        ("mlp_bias", {"gate_proj_bias": (10,), "up_proj_bias": (10,), "down_proj_bias": (8,)}),
        ("qk_norm", {"q_norm": (6,), "k_norm": (6,)}),
    ],
)
def test_an_option_adds_its_weights(option: str, more: dict[str, tuple[int, ...]]) -> None:
    plain, optional = layer_shapes(CONFIG), layer_shapes(replace(CONFIG, **{option: True}))
    assert optional == plain | more


LORA = LoraRows(
    a={"up_proj": jnp.array([[[0.0], [0.0]], [[1.0], [1.0]]])},
    b={"up_proj": jnp.array([[[0.0, 0.0]], [[2.0, 4.0]]])},
    scale=jnp.array([0.0, 0.5]),
    slot=jnp.array([1, 0]),
)
"""Row 0 uses slot 1, whose delta of (x, y) is (x + y) / 2 * (2, 4); row 1 uses the empty slot 0."""
X = jnp.array([[[1.0, 2.0]], [[1.0, 2.0]]])


def test_a_projection_adds_the_bias_and_each_rows_own_adapter() -> None:
    weights = {
        "up_proj": jnp.array([[1.0, 0.0], [0.0, 3.0]]),
        "up_proj_bias": jnp.array([10.0, 20.0]),
    }
    out = project(X, "up_proj", Layer(weights, LORA))
    np.testing.assert_array_equal(out, [[[14, 32]], [[11, 26]]])
    plain = project(X, "up_proj", Layer({"up_proj": weights["up_proj"]}, None))
    np.testing.assert_array_equal(plain, [[[1, 6]], [[1, 6]]])


def test_an_adapter_leaves_other_projections_alone() -> None:
    first, second = plus_lora([X, X], X, ("gate_proj", "up_proj"), LORA)
    assert first is X
    assert second is not X
    (out,) = plus_lora([X], X, ("up_proj",), None)
    assert out is X
