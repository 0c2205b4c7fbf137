"""Checkpoints converted to PEFT piece by piece have the bits of the worker's export."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.engine.adapters.test_checkpoint import CONFIG, on_disk, state
from tests.engine.adapters.test_damage import flips
from tuneserve_engine.adapters import checkpoint, kinds, peft_export
from tuneserve_engine.adapters.checkpoint_format import MEMBER, metadata_of
from tuneserve_engine.adapters.export_files import CONFIG as CONFIG_FILE
from tuneserve_engine.adapters.export_files import WEIGHTS, check_member
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.adapters.tensor_file import Damaged
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import FileDamaged

NAME = "tinker://m/weights/a"
SHAPES = {"q_proj": (2, 24, 32), "k_proj": (2, 24, 16), "v_proj": (2, 24, 16)}
SHAPES |= {"o_proj": (2, 32, 24)}


def files(found: peft_export.Converted) -> dict[str, bytes]:
    made = b"".join(found.weights())
    assert len(made) == found.weights_size
    return {CONFIG_FILE: found.config, WEIGHTS: made}


def exported(saved: AdapterState, revision: str = "") -> dict[str, bytes]:
    """The files that the worker writes when it exports a model in this state."""
    config = kinds.exported(saved.config)
    return checkpoint.peft_members(AdapterState(config, saved.weights), "base", revision)


def osft_sampler() -> AdapterState:
    """The LoRA in a sampler checkpoint of an OSFT adapter."""
    config = AdapterConfig(3, 1.0, 0, True, False, False, "osft", {"form": "core"}, "abc")
    rng = np.random.default_rng(4)
    pairs = {}
    for name, (layers, inputs, outputs) in SHAPES.items():
        pairs[f"{name}.A"] = rng.standard_normal((layers, inputs, 3)).astype("f4")
        pairs[f"{name}.B"] = rng.standard_normal((layers, 3, outputs)).astype("f4")
    return AdapterState(kinds.exported(config), pairs)


def rslora(moments: bool) -> AdapterState:
    return state(AdapterConfig(5, 16.0, 3, train_mlp=False, kind="rslora"), moments=moments)


STATES: dict[str, Callable[[], AdapterState]] = {
    "lora": state,
    "lora of a sampler": lambda: state(moments=False),
    "attention alone": lambda: state(AdapterConfig(1, 8.0, 0, True, False, False)),
    "unembedding alone": lambda: state(AdapterConfig(64, 8.0, 0, False, False, True)),
    "rslora": lambda: rslora(True),
    "rslora of a sampler": lambda: rslora(False),
    "osft of a sampler": osft_sampler,
}


@pytest.mark.parametrize("piece", [1, 100, 2**20])
@pytest.mark.parametrize("of", STATES)
def test_the_bits_equal_those_of_the_workers_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, piece: int
) -> None:
    monkeypatch.setattr(peft_export, "PIECE_BYTES", piece)
    saved = STATES[of]()
    on_disk(tmp_path, checkpoint.to_members(saved, "base", "aaa", name=NAME))
    made = files(peft_export.converted(tmp_path, NAME))
    assert made == exported(saved, "aaa")
    out = tmp_path / "out"
    out.mkdir()
    for member in on_disk(out, made).iterdir():
        check_member(out, member.name)


def test_a_file_of_a_release_without_checksums_is_converted(tmp_path: Path) -> None:
    saved = state(moments=False)
    arrays = {f"weights/{name}": x for name, x in saved.weights.items()}
    (tmp_path / MEMBER).write_bytes(save(arrays, metadata_of(CONFIG, "base", 0)))
    assert files(peft_export.converted(tmp_path, NAME)) == exported(saved)


def test_no_flipped_bit_is_sent(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.to_members(state(moments=False), "base", name=NAME))
    path = tmp_path / MEMBER
    whole = path.read_bytes()
    for changed in flips(whole):
        path.write_bytes(changed)
        with pytest.raises(FileDamaged, match=f"{NAME} is damaged.* {tmp_path.name}/{MEMBER}: "):
            peft_export.converted(tmp_path, NAME)
    for cut in (0, 7, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(FileDamaged):
            peft_export.converted(tmp_path, NAME)


def old_files() -> Iterator[bytes]:
    """Files without checksums, whose damage shows in the list of tensors only."""
    arrays = {f"weights/{name}": x for name, x in state(moments=False).weights.items()}
    yield save({n: x for n, x in arrays.items() if n != "weights/k_proj.B"}, told())
    yield save({**arrays, "weights/k_proj.B": arrays["weights/k_proj.B"][:1]}, told())
    yield save({**arrays, "weights/k_proj.B": arrays["weights/k_proj.B"][:, :1]}, told())
    yield save({**arrays, "weights/k_proj.B": arrays["weights/k_proj.B"][0]}, told())
    yield save({**arrays, "weights/k_proj.B": arrays["weights/k_proj.B"].astype("f8")}, told())
    yield save(arrays, told(format="tuneserve-adapter-9"))
    yield save(arrays, told(config="{}"))
    yield save(arrays, told(config=json.dumps({"rank": 0, "alpha": 1.0, "seed": 0})))


def told(**changes: str) -> dict[str, str]:
    return metadata_of(CONFIG, "base", 0) | changes


def test_a_file_that_is_not_an_adapter_is_damaged(tmp_path: Path) -> None:
    for data in old_files():
        (tmp_path / MEMBER).write_bytes(data)
        with pytest.raises(FileDamaged):
            peft_export.converted(tmp_path, NAME)


def test_a_missing_file_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        peft_export.converted(tmp_path, NAME)


def test_a_file_that_changes_while_it_is_sent_ends_in_an_error(tmp_path: Path) -> None:
    on_disk(tmp_path, checkpoint.to_members(state(moments=False), "base"))
    found = peft_export.converted(tmp_path, NAME)
    path = tmp_path / MEMBER
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Damaged, match=r"lm_head.lora_B.weight changed while it was read"):
        list(found.weights())


def test_a_file_deleted_while_it_is_sent_is_sent_to_its_end(tmp_path: Path) -> None:
    saved = state(moments=False)
    on_disk(tmp_path, checkpoint.to_members(saved, "base"))
    pieces = peft_export.converted(tmp_path, NAME).weights()
    begin = next(pieces)
    (tmp_path / MEMBER).unlink()
    assert b"".join([begin, *pieces]) == exported(saved)[WEIGHTS]


def test_memory_holds_one_matrix_and_one_piece(tmp_path: Path) -> None:
    config = AdapterConfig(32, 16.0, 0, True, False, False)
    sizes = {"q_proj": 65_536, "k_proj": 8, "v_proj": 8, "o_proj": 8}
    arrays = {}
    for name, size in sizes.items():
        arrays[f"{name}.A"] = np.ones((2, size, 32), np.float32)
        arrays[f"{name}.B"] = np.ones((2, 32, size), np.float32)
    on_disk(tmp_path, checkpoint.to_members(AdapterState(config, arrays), "base"))
    matrix = 4 * 32 * 65_536
    del arrays
    tracemalloc.start()
    try:
        found = peft_export.converted(tmp_path, NAME)
        for piece in found.weights():
            assert len(piece) <= peft_export.PIECE_BYTES
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.weights_size > 4 * matrix
    assert peak < matrix + 4 * peft_export.PIECE_BYTES
