"""Checks of a base model's files before a start. The files are made by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from tuneserve_engine.backend.jax.model.check import BaseModelReport, look_at
from tuneserve_engine.settings.common import TINY_MODEL

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1100,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
FIRST = {
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
}
SECOND = {
    "model.embed_tokens.weight": (1100, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.up_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 6),
}
PARAMETERS = 1100 * 8 + 3 * 8 + 4 * 64 + 3 * 48
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(folder: Path, **changes: Any) -> Path:
    """A model in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF | changes))
    places: dict[str, str] = {}
    for shard, shapes in zip(SHARDS, (FIRST, SECOND), strict=True):
        save_file({n: np.ones(shape, np.float32) for n, shape in shapes.items()}, folder / shard)
        places |= dict.fromkeys(shapes, shard)
    index = {"metadata": {"total_size": 4 * PARAMETERS}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the model "someone/model" in the hub's cache, with downloads allowed."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    repo = tmp_path / "models--someone--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    return repo / "snapshots" / "abc"


def problem(model: object) -> str:
    found = look_at(str(model))
    assert found.problem is not None
    return found.problem


def test_the_embedded_model_is_in_order() -> None:
    size = (TINY_MODEL / "model.safetensors").stat().st_size
    assert look_at(str(TINY_MODEL)) == BaseModelReport(str(TINY_MODEL), bytes=size)


def test_a_model_without_a_tokenizer_can_be_loaded(tmp_path: Path) -> None:
    found = look_at(str(write(tmp_path)))
    assert found.problem is None
    assert "No such file" in (found.tokenizer_problem or "")
    assert found.bytes == sum((tmp_path / each).stat().st_size for each in SHARDS)


def test_a_missing_shard_of_the_index_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / SHARDS[1]).unlink()
    assert f"{tmp_path / SHARDS[1]} is missing" in problem(tmp_path)
    assert look_at(str(tmp_path)).folder == str(tmp_path)  # its needs can still be planned


@pytest.mark.parametrize("content", [b"", b"garbage, no header", b"\xff" * 64])
def test_a_file_that_is_not_safetensors_is_damaged(tmp_path: Path, content: bytes) -> None:
    (write(tmp_path) / SHARDS[0]).write_bytes(content)
    assert f"{tmp_path / SHARDS[0]} is damaged" in problem(tmp_path)


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    file = write(tmp_path) / SHARDS[0]
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is damaged" in problem(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    assert "model.norm.weight is (8,), config.json implies (16,)" in problem(
        write(tmp_path, hidden_size=16)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}, "'gemma3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"vocab_size": None}, "config.json lacks vocab_size"),
        ({"hidden_size": "wide"}, "invalid literal"),
    ],
)
def test_an_unsupported_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    found = look_at(str(write(tmp_path, **changes)))
    assert found.folder is None
    assert words in (found.problem or "")


@pytest.mark.parametrize("weight_map", [{}, {"model.norm.weight": 7}, "all"])
def test_an_index_without_names_is_refused(tmp_path: Path, weight_map: object) -> None:
    index = write(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "has no weight_map" in problem(tmp_path)


def test_a_name_that_cannot_be_a_model_is_refused() -> None:
    assert "no such directory" in problem("/no/such/model")
    assert "neither a directory nor a hub id" in problem("no good")


def test_a_complete_model_of_the_hub_is_in_order(snapshot: Path) -> None:
    write(snapshot)
    found = look_at("someone/model")
    assert (found.folder, found.problem, found.is_to_download) == (str(snapshot), None, False)


def test_missing_weights_of_a_hub_model_are_to_be_downloaded(snapshot: Path) -> None:
    there, missing = ((write(snapshot) / each).stat().st_size for each in SHARDS)
    (snapshot / SHARDS[1]).unlink()
    found = look_at("someone/model")
    assert (found.problem, found.is_to_download, found.bytes) == (None, True, there)
    assert found.to_download_bytes == pytest.approx(missing, abs=4096)  # except for the headers
    assert found.free_bytes > 0


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_without_an_index_the_configuration_gives_the_size(
    snapshot: Path, dtype: str, item: int
) -> None:
    snapshot.mkdir(parents=True)  # as tuneserve plan leaves it
    (snapshot / "config.json").write_text(json.dumps(HF | {"torch_dtype": dtype}))
    found = look_at("someone/model")
    assert (found.folder, found.problem) == (str(snapshot), None)
    assert found.to_download_bytes == item * PARAMETERS


def test_with_an_index_without_a_size_the_size_is_unknown(snapshot: Path) -> None:
    write(snapshot)
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    (snapshot / SHARDS[0]).unlink()
    found = look_at("someone/model")
    assert (found.is_to_download, found.to_download_bytes) == (True, None)


def test_a_damaged_or_unsupported_hub_model_is_not_downloaded(
    snapshot: Path,
) -> None:
    (write(snapshot) / SHARDS[1]).unlink()
    (snapshot / SHARDS[0]).write_bytes(b"x")
    assert "is damaged" in problem("someone/model")
    (snapshot / "config.json").write_text(json.dumps(HF | {"model_type": "gemma3"}))
    assert "'gemma3'" in problem("someone/model")


def test_a_model_missing_from_the_cache_is_to_be_downloaded(snapshot: Path) -> None:
    assert look_at("nobody/nothing") == BaseModelReport(is_to_download=True)
    assert not snapshot.exists()


def test_with_downloads_forbidden_missing_files_are_a_problem(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "config.json of nobody/nothing is not in the hub's cache" in problem("nobody/nothing")
    (write(snapshot) / SHARDS[1]).unlink()
    assert f"{SHARDS[1]} of someone/model is not" in problem("someone/model")
