"""Weights of base models: supported ones load, and refusals have clear words."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine.backend.jax.model.test_config import LLAMA, QWEN2
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.weights import (
    expected_tensors,
    load_base_model,
    read_config,
)
from tuneserve_engine.core.hub import BadCheckpoint


def tensors(hf: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    places = expected_tensors(ModelConfig.from_hf(hf))
    return {name: rng.normal(size=at.shape).astype(np.float32) for name, at in places.items()}


def write(folder: Path, hf: dict[str, Any], weights: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def test_generation_config_decides_the_end_of_sequence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).eos_token_ids == (3, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_config(tmp_path).eos_token_ids == (3, 5)


def test_weights_land_transposed_in_their_layer(tmp_path: Path) -> None:
    weights = tensors(QWEN2)
    model, _ = load_base_model(write(tmp_path, QWEN2, weights), dtype="float32")
    for layer in range(2):
        stored = weights[f"model.layers.{layer}.mlp.down_proj.weight"]
        np.testing.assert_array_equal(model.layers["down_proj"][layer], stored.T)
        stored = weights[f"model.layers.{layer}.self_attn.k_proj.bias"]
        np.testing.assert_array_equal(model.layers["k_proj_bias"][layer], stored)
    np.testing.assert_array_equal(model.unembedding(), weights["lm_head.weight"])


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_load_as_float32(tmp_path: Path, stored: Any) -> None:
    """Norms often stay in float32 beside half-precision projections."""
    weights = {
        name: x if "norm" in name else x.astype(stored) for name, x in tensors(LLAMA).items()
    }
    model, _ = load_base_model(write(tmp_path, LLAMA, weights), dtype="float32")
    want = weights["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(model.embed[...], want)
    stored_queries = weights["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(model.layers["q_proj"][1], stored_queries.T.astype(np.float32))


def test_a_head_stored_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    weights = tensors(LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}
    model, _ = load_base_model(write(tmp_path, tied, weights), dtype="float32")
    np.testing.assert_array_equal(model.unembedding(), weights["model.embed_tokens.weight"])


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    weights = tensors(LLAMA)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_norm.weight"] = np.ones(4, np.float32)
    weights["model.norm.weight"] = np.ones(9, np.float32)
    weights["lm_head.weight"] = np.ones((11, 8), np.int8)
    with pytest.raises(BadCheckpoint) as error:
        load_base_model(write(tmp_path, LLAMA, weights), dtype="float32")
    message = str(error.value)
    assert "missing model.layers.1.mlp.up_proj.weight;" in message
    assert "unexpected model.layers.0.self_attn.q_norm.weight;" in message
    assert "model.norm.weight is (9,), config.json implies (8,)" in message
    assert "lm_head.weight is I8" in message


def test_many_missing_tensors_are_summed_up(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"lm_head.weight, .* and 13 more"):
        load_base_model(write(tmp_path, LLAMA, {}), dtype="float32")


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"]
)
def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, name: str) -> None:
    weights = tensors(LLAMA)
    weights[name][2, 3] = np.nan
    with pytest.raises(BadCheckpoint, match=f"{name} holds NaN"):
        load_base_model(write(tmp_path, LLAMA, weights), dtype="float32")


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "must be a JSON object"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", "garbage, no header", "model.safetensors is damaged"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}',
            "model-00002-of-00002.safetensors is missing",
        ),
    ],
)
def test_missing_or_damaged_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    write(tmp_path, LLAMA, tensors(LLAMA))
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadCheckpoint, match=message):
        load_base_model(str(tmp_path), dtype="float32")
