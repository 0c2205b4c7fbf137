"""The merge of an adapter into a base model of a few numbers, with the sums worked out by hand."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tuneserve_engine.adapters.merge import CannotMerge, main, merge

EMBED, HEAD, GATE = "model.embed_tokens.weight", "lm_head.weight", "model.gate.weight"
TABLE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def adapter_on(folder: Path, weight: str, a: Any, b: Any) -> Path:
    """An adapter of rank 1 and scale 2 on one weight."""
    folder.mkdir()
    module = f"base_model.model.{weight.removesuffix('.weight')}"
    pair = {"A": np.array(a, np.float32), "B": np.array(b, np.float32)}
    tensors = {f"{module}.lora_{part}.weight": value for part, value in pair.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 1, "lora_alpha": 2, "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def base_in(folder: Path, *, tied: bool, **files: dict[str, Any]) -> Path:
    """A base model with these files of weights, and a tokenizer."""
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    if len(files) > 1:
        places = {name: f"{file}.safetensors" for file, held in files.items() for name in held}
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"tie_word_embeddings": tied, "hidden_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    made = tmp_path / "out"
    made.mkdir()
    return made


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_the_scaled_product_is_added_and_the_other_weights_stay(tmp_path: Path, out: Path) -> None:
    gate = np.array([[1, 1], [1, 1]], np.float16)
    base = base_in(tmp_path / "base", tied=False, model={EMBED: TABLE, GATE: gate})
    merge(adapter_on(tmp_path / "adapter", GATE, [[1, 10]], [[1], [-1]]), base, out)
    found = load_file(out / "model.safetensors")
    assert found.keys() == {EMBED, GATE}
    np.testing.assert_array_equal(found[GATE], np.array([[3, 21], [-1, -19]], np.float16))
    assert found[GATE].dtype == np.float16
    np.testing.assert_array_equal(found[EMBED], TABLE)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert config_of(out) == {"tie_word_embeddings": False, "hidden_size": 2}


def test_a_changed_unembedding_is_untied_from_the_embedding(tmp_path: Path, out: Path) -> None:
    base = base_in(tmp_path / "base", tied=True, model={EMBED: TABLE})
    merge(adapter_on(tmp_path / "adapter", HEAD, [[1, 10]], [[1], [0], [2]]), base, out)
    found = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(found[HEAD], [[3, 22], [3, 4], [9, 46]])
    np.testing.assert_array_equal(found[EMBED], TABLE)
    assert config_of(out)["tie_word_embeddings"] is False


def test_an_unchanged_unembedding_stays_tied_and_its_unread_copy_is_dropped(
    tmp_path: Path, out: Path
) -> None:
    tensors = {EMBED: TABLE, HEAD: np.zeros_like(TABLE), GATE: TABLE}
    base = base_in(tmp_path / "base", tied=True, model=tensors)
    merge(adapter_on(tmp_path / "adapter", GATE, [[0, 0]], [[0], [0], [0]]), base, out)
    assert load_file(out / "model.safetensors").keys() == {EMBED, GATE}
    assert config_of(out)["tie_word_embeddings"] is True


def test_the_index_of_a_model_in_several_files_names_the_new_ones(
    tmp_path: Path, out: Path
) -> None:
    base = base_in(tmp_path / "base", tied=True, first={GATE: TABLE}, second={EMBED: TABLE})
    merge(adapter_on(tmp_path / "adapter", HEAD, [[1, 1]], [[1], [1], [1]]), base, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    second = "second.safetensors"
    assert index["weight_map"] == {GATE: "first.safetensors", EMBED: second, HEAD: second}
    sizes = [(out / name).stat().st_size for name in ("first.safetensors", second)]
    assert index["metadata"] == {"total_size": sum(sizes)}


@pytest.mark.parametrize(
    ("weight", "a", "told"),
    [
        (GATE, [[1, 2, 3]], r"\(3, 2\) in the base model and \(3, 3\) in the adapter"),
        ("model.up.weight", [[1, 2]], "has no model.up.weight, which the adapter changes"),
    ],
)
def test_an_adapter_of_another_model_leaves_no_loadable_model(
    weight: str, a: Any, told: str, tmp_path: Path, out: Path
) -> None:
    base = base_in(tmp_path / "base", tied=False, model={EMBED: TABLE, GATE: TABLE})
    adapter = adapter_on(tmp_path / "adapter", weight, a, [[1], [1], [1]])
    with pytest.raises(CannotMerge, match=told):
        merge(adapter, base, out)
    assert not (out / "config.json").exists()


def test_the_command_ends_with_2_and_the_reason_or_with_0(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_in(tmp_path / "base", tied=False, model={GATE: TABLE})
    wrong = adapter_on(tmp_path / "wrong", "model.up.weight", [[1, 2]], [[1]])
    right = adapter_on(tmp_path / "right", GATE, [[1, 2]], [[1], [1], [1]])
    monkeypatch.setattr(sys, "argv", ["merge", str(wrong), str(base), str(out)])
    assert main() == 2
    assert "has no model.up.weight" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["merge", str(right), str(base), str(out)])
    assert main() == 0
    np.testing.assert_array_equal(
        load_file(out / "model.safetensors")[GATE], [[3, 6], [5, 8], [7, 10]]
    )
