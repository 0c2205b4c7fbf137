"""Files of tensors: their bytes, their checksums, and the errors of damaged ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.engine.adapters.test_checkpoint import CONFIG, tensors
from tuneserve_engine.adapters import tensor_file


def test_a_file_written_in_pieces_equals_one_written_at_once(tmp_path: Path) -> None:
    arrays: Any = tensors(CONFIG, 0)
    shapes = {name: x.shape for name, x in arrays.items()}
    with (tmp_path / "pieces").open("wb") as file:
        pieces = (layer for x in arrays.values() for layer in (x if x.ndim == 3 else [x]))
        tensor_file.write(file, shapes, {"format": "pt"}, pieces)
    at_once = tensor_file.encoded(arrays, {"format": "pt"})
    assert (tmp_path / "pieces").read_bytes() == at_once
    tensor_file.check(tmp_path / "pieces")


TWO = {"a": np.array([[1, 2]], np.float32), "b": np.array([-1], np.float32)}


def test_the_tensors_follow_an_aligned_header_in_order(tmp_path: Path) -> None:
    data = tensor_file.encoded(TWO, {"step": "7"})
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    assert data[8 + size :] == bytes.fromhex("0000803f" + "00000040" + "000080bf")
    entries = json.loads(data[8 : 8 + size])
    assert entries["a"] == {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
    assert entries["b"] == {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}
    found = load(data)
    assert {name: x.tolist() for name, x in found.items()} == {"a": [[1.0, 2.0]], "b": [-1.0]}
    (tmp_path / "file").write_bytes(data)
    header = tensor_file.read_header(tmp_path / "file")
    assert header.metadata["step"] == "7"
    assert header.place("b") == (8 + size + 8, (1,))
    header.check("b", data[-4:])
    for name, content in (("b", bytes(4)), ("a", data[-4:])):
        with pytest.raises(tensor_file.Damaged, match=f"{name} does not have its checksum"):
            header.check(name, content)
    with pytest.raises(tensor_file.Damaged, match="does not say where c is"):
        header.place("c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:4], "ends within its header"),
        (lambda data: data[:20], "ends within its header"),
        (lambda data: data[:-1], "b does not have its checksum"),
        (lambda data: data + b"\0", "goes on behind its tensors"),
        (lambda data: data[:-1] + b"\0", "b does not have its checksum"),
        (lambda data: data.replace(b'"step": "7"', b'"step": "8"'), "header does not have its"),
        (lambda data: data.replace(b'"header_xxh3"', b'"header_xxh2"'), "header has no checksum"),
        (lambda data: (2**21).to_bytes(8, "little") + data[8:], "claims 2097152 bytes"),
        (lambda data: data.replace(b'"a"', b'"a\xff'), "header cannot be read"),
    ],
)
def test_a_changed_file_is_damaged(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(tensor_file.encoded(TWO, {"step": "7"}))
    assert tensor_file.check(path)["step"] == "7"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(tensor_file.Damaged, match=message):
        tensor_file.check(path)


def test_a_file_without_checksums_is_read_unchecked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(save(TWO, {"format": "pt"}))
    header = tensor_file.read_header(path)
    assert (header.metadata, header.sums) == ({"format": "pt"}, None)
    header.check("a", b"anything")
    assert tensor_file.check(path) == {"format": "pt"}


def test_the_checksum_of_a_file_is_the_checksum_of_its_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than one piece
    (tmp_path / "file").write_bytes(content)
    assert tensor_file.checksum_of(tmp_path / "file") == tensor_file.checksum(content)
    assert tensor_file.checksum(b"") == "2d06800538d394c2"  # XXH3 of an empty input, as published
