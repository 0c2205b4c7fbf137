"""Configurations and weights of base models: supported ones load, and refusals have clear words."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from tuneserve_engine.backend.jax.model.config import Llama3Scaling, ModelConfig, UnsupportedModel
from tuneserve_engine.backend.jax.model.weights import (
    expected_tensors,
    load_base_model,
    read_config,
)
from tuneserve_engine.core.hub import BadCheckpoint, resolve_base_model, revision_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": [3, 5],
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def tensors(hf: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    places = expected_tensors(ModelConfig.from_hf(hf))
    return {name: rng.normal(size=at.shape).astype(np.float32) for name, at in places.items()}


def write(folder: Path, hf: dict[str, Any], weights: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def test_a_llama_config_is_read() -> None:
    assert ModelConfig.from_hf(LLAMA | {"rope_scaling": LLAMA3_SCALING}) == ModelConfig(
        architecture="llama",
        vocab_size=11,
        hidden=8,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=4,
        intermediate=6,
        context_length=32,
        rope_theta=500000.0,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16),
        rms_eps=1e-5,
        eos_token_ids=(3, 5),
    )


def test_qwen_biases_and_head_sizes_follow_their_architecture() -> None:
    qwen2, qwen3 = ModelConfig.from_hf(QWEN2), ModelConfig.from_hf(QWEN3)
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert (qwen2.head_dim, qwen3.head_dim) == (4, 128)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
            "rope_type 'yarn'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"vocab_size": None, "hidden_size": None}, "lacks vocab_size, hidden_size"),
    ],
)
def test_an_unsupported_feature_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_a_sliding_window_that_no_layer_uses_is_accepted() -> None:
    unused = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}
    disabled = {"use_sliding_window": False, "sliding_window": 16}
    assert ModelConfig.from_hf(QWEN2 | unused) == ModelConfig.from_hf(QWEN2 | disabled)


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
    weights = {name: x.astype(stored) for name, x in tensors(LLAMA).items()}
    model, _ = load_base_model(write(tmp_path, LLAMA, weights), dtype="float32")
    want = weights["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(model.embed[...], want)


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


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    weights = tensors(LLAMA)
    weights["model.layers.1.self_attn.o_proj.weight"][2, 3] = np.nan
    with pytest.raises(BadCheckpoint, match=r"layers.1.self_attn.o_proj.weight holds NaN"):
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


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "some/deep/model"])
def test_a_missing_directory_is_not_looked_up_in_the_hub(path: str) -> None:
    with pytest.raises(BadCheckpoint, match="no such directory"):
        resolve_base_model(path)


def test_a_hub_id_resolves_to_its_downloaded_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadCheckpoint, match="'someone/model' is neither a directory nor"):
        resolve_base_model("someone/model")
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert resolve_base_model("someone/model") == snapshot
    assert revision_of(snapshot) == "abc"


def test_a_pinned_revision_is_used_instead_of_the_main_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--model"
    commits = {"main": "a" * 40, "v2": "b" * 40}
    (repo / "refs").mkdir(parents=True)
    for ref, commit in commits.items():
        (repo / "refs" / ref).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
    found = [resolve_base_model("someone/model", each) for each in (None, "v2", "b" * 40)]
    assert [revision_of(folder) for folder in found] == ["a" * 40, "b" * 40, "b" * 40]
    with pytest.raises(BadCheckpoint, match=r"'someone/model' at revision 'v3' is neither"):
        resolve_base_model("someone/model", "v3")


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    assert revision_of(tmp_path) == ""
    with pytest.raises(BadCheckpoint, match=r"base_model_revision is 'v2', and .* is a directory"):
        resolve_base_model(str(tmp_path), "v2")
