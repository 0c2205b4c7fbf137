"""Safetensors files of float32 tensors, with checksums that detect each changed bit.

The file's metadata has a checksum of every tensor (``xxh3``, a JSON object by name, in the order of
the file) and one of everything before the tensors (``header_xxh3``, computed with its own digits as
zeros). Other programs read such a file like any other. Files of earlier releases have no checksums,
and are read unchecked. NumPy only: the API process uses it too.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

MAX_HEADER_BYTES = 2**20
"""The largest list of tensors that is parsed; our own take a few kilobytes."""

Array = np.ndarray[Any, np.dtype[np.float32]]

_SUMS, _HEADER_SUM = "xxh3", "header_xxh3"
_ZEROS = "0" * 16
_READ_BYTES = 2**20
_UNCHECKED = frozenset({"format", "base_model", "config", "step", "optimizer"})
"""All metadata names of files without checksums. A file with any other name must have checksums: a
flipped bit in the name of the checksums must not make it a file without checksums."""


class Damaged(ValueError):
    """The file's bytes differ from the bytes that were written."""


def checksum(data: Any) -> str:
    """Return the hex digits of the XXH3 of any contiguous buffer, without a copy of it."""
    return xxhash.xxh3_64_hexdigest(data)


def encoded(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file with these tensors and this metadata."""
    pieces = {name: np.ascontiguousarray(tensor, "<f4") for name, tensor in tensors.items()}
    sums = {name: checksum(_bytes(piece)) for name, piece in pieces.items()}
    shapes = {name: piece.shape for name, piece in pieces.items()}
    start = encoded_header(shapes, metadata, sums)
    return b"".join([start, *(_bytes(piece) for piece in pieces.values())])


def write(
    file: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str],
    pieces: Iterable[Array],
) -> None:
    """Write the file from its start.

    ``pieces`` are the contents of the tensors, one after the other. Only one piece is in memory at
    a time, and each piece belongs to one tensor.
    """
    file.write(encoded_header(shapes, metadata, dict.fromkeys(shapes, _ZEROS)))
    sums: dict[str, str] = {}
    rest = iter(pieces)
    for name, shape in shapes.items():
        running, left = xxhash.xxh3_64(), 4 * math.prod(shape)
        while left > 0:
            data = _bytes(np.ascontiguousarray(next(rest), "<f4"))
            running.update(data)
            file.write(data)
            left -= len(data)
        assert left == 0, f"{-left} bytes more than {name} has"
        sums[name] = running.hexdigest()
    assert next(rest, None) is None, "more pieces than tensors"
    end = file.tell()
    file.seek(0)
    file.write(encoded_header(shapes, metadata, sums))
    file.seek(end)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def encoded_header(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str], sums: Mapping[str, str]
) -> bytes:
    """Return everything before the tensors; its length does not depend on the checksums' digits."""
    assert metadata.keys().isdisjoint((_SUMS, _HEADER_SUM))
    own = {**metadata, _SUMS: json.dumps(sums), _HEADER_SUM: _ZEROS}
    entries: dict[str, Any] = {"__metadata__": own}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header.replace(_marked(_ZEROS), _marked(checksum(header)))


def _marked(digits: str) -> bytes:
    return f'"{_HEADER_SUM}": "{digits}"'.encode()


@dataclass(frozen=True)
class Header:
    """A file's header. ``sums`` are the tensors' checksums by name, None in a file without them."""

    metadata: Mapping[str, str]
    sums: Mapping[str, str] | None
    start: int  # offset of the tensors in the file
    entries: Mapping[str, Any]  # the file's list of tensors

    def place(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return a float32 tensor's offset in the file, and its shape. Raises ``Damaged``."""
        try:
            entry = self.entries[name]
            first, end = map(int, entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"it does not say where {name} is: {error!r}") from None
        is_sound = entry.get("dtype") == "F32" and 0 <= first and min(shape, default=0) > 0
        if not is_sound or end - first != 4 * math.prod(shape):
            raise Damaged(f"{name} is no tensor of float32: {entry}")
        return self.start + first, shape

    def check(self, name: str, data: Any) -> None:
        """Raise ``Damaged`` if these are not the bytes that the tensor had when it was written."""
        if self.sums is not None and checksum(data) != self.sums.get(name):
            raise Damaged(f"{name} does not have its checksum")


def read_header(path: Path) -> Header:
    """Read and check the header. Raises ``Damaged``, or ``OSError``."""
    with path.open("rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if size > MAX_HEADER_BYTES:
            raise Damaged(f"its header claims {size} bytes; at most {MAX_HEADER_BYTES} are read")
        text = file.read(size)
    if len(length) < 8 or len(text) < size:
        raise Damaged("it ends within its header")
    try:
        entries = json.loads(text)
        metadata = _strings(entries.pop("__metadata__", {}))
        if not all("data_offsets" in each for each in entries.values()):
            raise ValueError("it lists something that is no tensor")  # e.g. misnamed metadata
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header cannot be read: {error}") from None
    if metadata.keys() <= _UNCHECKED:
        return Header(metadata, None, 8 + size, entries)
    _check_header(length + text, metadata.get(_HEADER_SUM, ""))
    return Header(metadata, _strings(json.loads(metadata[_SUMS])), 8 + size, entries)


def _strings(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError("it has something else where texts should be")
    return found


def _check_header(header: bytes, digits: str) -> None:
    marked = _marked(digits)
    if len(digits) != len(_ZEROS) or header.count(marked) != 1:
        raise Damaged("its header has no checksum")
    if checksum(header.replace(marked, _marked(_ZEROS))) != digits:
        raise Damaged("its header does not have its checksum")


def check(path: Path) -> Mapping[str, str]:
    """Check the whole file, piece by piece, and return its metadata.

    Raises ``Damaged``, or ``OSError``.
    """
    header = read_header(path)
    if header.sums is None:
        return header.metadata
    with path.open("rb") as file:
        file.seek(header.start)
        for name, digits in header.sums.items():
            start, end = header.entries[name]["data_offsets"]
            if _checksum_of_next(file, end - start) != digits:
                raise Damaged(f"{name} does not have its checksum")
        if file.read(1):
            raise Damaged("it goes on behind its tensors")
    return header.metadata


def checksum_of(path: Path) -> str:
    """Return the checksum of a whole file, read piece by piece."""
    with path.open("rb") as file:
        return _checksum_of_next(file, path.stat().st_size)


def _checksum_of_next(file: BinaryIO, size: int) -> str:
    running = xxhash.xxh3_64()
    while size > 0 and (data := file.read(min(size, _READ_BYTES))):
        running.update(data)
        size -= len(data)
    return running.hexdigest()
