"""The export of an adapter in PEFT's layout: its names, its configuration and its files.

The files are converted from a checkpoint's file piece by piece, while they are sent. NumPy only:
the API process exports too.

Dimension key: D inputs of a projection, F its outputs, r rank. A layer's pair is A [D, r] and
B [r, F]; PEFT stores the transposes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.checkpoint_format import FORMAT, MEMBER, config_in
from tuneserve_engine.adapters.export_files import CONFIG
from tuneserve_engine.adapters.tensor_file import (
    Damaged,
    Header,
    checksum,
    encoded_header,
    read_header,
)
from tuneserve_engine.core.adapter import ATTENTION, UNEMBED, AdapterConfig
from tuneserve_engine.core.errors import FileDamaged

PIECE_BYTES = 2**20
"""The approximate bytes in memory of a file that is being sent; while a piece is made, one matrix
more."""

Array = np.ndarray[Any, np.dtype[np.float32]]


# --- the layout -----------------------------------------------------------------------------------


def modules(target: str, shape: Sequence[int]) -> list[str]:
    """Return PEFT's names of the modules of a target whose A has this shape, layer by layer."""
    if target == UNEMBED:
        return ["base_model.model.lm_head"]
    block = "self_attn" if target in ATTENTION else "mlp"
    return [f"base_model.model.model.layers.{n}.{block}.{target}" for n in range(shape[0])]


def tensor_name(module: str, part: str) -> str:
    return f"{module}.lora_{part}.weight"


def encoded_config(config: AdapterConfig, base_model: str, revision: str) -> bytes:
    """Return the content of ``adapter_config.json`` for a LoRA."""
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [t if t != UNEMBED else "lm_head" for t in config.targets],
    }
    return json.dumps(told, indent=2).encode()


def metadata_of(config: bytes) -> dict[str, str]:
    """Return the metadata of ``adapter_model.safetensors``."""
    return {"format": "pt", CONFIG: checksum(config)}


# --- made of a checkpoint's file ------------------------------------------------------------------


class _Matrix(NamedTuple):
    """The A or B of one layer, and its place in the checkpoint's file."""

    name: str  # in PEFT's layout
    start: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return 4 * self.rows * self.columns


@dataclass(frozen=True)
class Converted:
    """A checkpoint's file as PEFT's two files, of which only the small parts are in memory."""

    config: bytes
    header: bytes  # of the weights' file
    path: Path
    matrices: tuple[_Matrix, ...]  # in the order of PEFT's file
    sums: dict[str, str]

    @property
    def weights_size(self) -> int:
        return len(self.header) + sum(each.size for each in self.matrices)

    def weights(self) -> Iterator[bytes]:
        """Yield the content of ``adapter_model.safetensors``.

        Raises ``Damaged`` if the file has changed since it was converted, and ``OSError``.
        """
        with self.path.open("rb") as file:  # open until the end, so a deleted file is sent too
            yield self.header
            for matrix in self.matrices:
                running = xxhash.xxh3_64()
                for first, last in _parts(matrix):
                    # Read again for each piece: with slow clients, kept matrices would add up.
                    piece = _transposed(_read(file, matrix), first, last)
                    running.update(piece)
                    yield piece
                if running.hexdigest() != self.sums[matrix.name]:
                    raise Damaged(f"{matrix.name} changed while it was read")


def converted(folder: Path, name: str, check: Callable[[], object] = lambda: None) -> Converted:
    """Return the checkpoint called ``name`` in PEFT's layout, bit for bit as
    ``save_weights_external`` gives it.

    Reads all of its weights, and calls ``check``, which may raise, before each matrix. Raises
    ``FileNotFoundError`` if the file is gone, and ``FileDamaged`` if it differs from what was
    written.
    """
    path = folder / MEMBER
    with _damage_told(folder, name):
        header = read_header(path)
        if header.metadata.get("format") != FORMAT:
            told = header.metadata.get("format")
            raise Damaged(f"its format is {told!r}, and this version reads {FORMAT!r}")
        own = config_in(header.metadata)
        assert not kinds.kind_of(own).needs_decomposition, "its pairs need the base model's weights"
        revision = header.metadata.get("base_model_revision", "")
        config = encoded_config(kinds.exported(own), header.metadata["base_model"], revision)
        with path.open("rb") as file:
            found = [each for target in own.targets for each in _pairs(file, header, target, check)]
        shapes = {each.name: (each.columns, each.rows) for each, _ in found}
        sums = {each.name: digits for each, digits in found}
        start = encoded_header(shapes, metadata_of(config), sums)
        return Converted(config, start, path, tuple(each for each, _ in found), sums)


@contextmanager
def _damage_told(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (msgspec.MsgspecError, OSError, KeyError, TypeError, ValueError) as error:
        raise FileDamaged(
            f"the checkpoint {name} is damaged, in its file {folder.name}/{MEMBER}: {error}; take "
            "another checkpoint, or ask the operator to restore that file from a backup",
            str(error),
        ) from error


def _pairs(
    file: BinaryIO, header: Header, target: str, check: Callable[[], object]
) -> Iterator[tuple[_Matrix, str]]:
    """Yield A and B of each layer, each with the checksum of its transpose."""
    parts = [list(_layers(file, header, target, part, check)) for part in "AB"]
    (a, _), (b, _) = (each[0] for each in parts)
    if len(parts[0]) != len(parts[1]) or a.columns != b.rows:
        raise Damaged(f"A and B of {target} do not belong together")
    for pair in zip(*parts, strict=True):
        yield from pair


def _layers(
    file: BinaryIO, header: Header, target: str, part: str, check: Callable[[], object]
) -> Iterator[tuple[_Matrix, str]]:
    """Yield the matrices of one tensor, each with the checksum of its transpose.

    Raises ``Damaged``, at the end, if the tensor does not have its checksum.
    """
    tensor = f"weights/{target}.{part}"
    start, shape = header.place(tensor)
    if len(shape) != (2 if target == UNEMBED else 3):
        raise Damaged(f"{tensor} is {list(shape)}")
    *_, rows, columns = shape
    whole = xxhash.xxh3_64()
    for module in modules(target, shape):
        check()
        matrix = _Matrix(tensor_name(module, part), start, rows, columns)
        start += matrix.size
        numbers = _read(file, matrix)
        whole.update(numbers.data)
        running = xxhash.xxh3_64()
        for first, last in _parts(matrix):
            running.update(_transposed(numbers, first, last))
        del numbers  # free it before the next is read
        yield matrix, running.hexdigest()
    if header.sums is not None and whole.hexdigest() != header.sums.get(tensor):
        raise Damaged(f"{tensor} does not have its checksum")


def _read(file: BinaryIO, matrix: _Matrix) -> Array:
    """Read a matrix from the file.

    The file is not memory-mapped: when a disk fails to read a mapped file, the process is killed.
    """
    file.seek(matrix.start)
    data = file.read(matrix.size)
    if len(data) < matrix.size:
        raise Damaged(f"it ends within {matrix.name}")
    return np.frombuffer(data, "<f4").reshape(matrix.rows, matrix.columns)


def _parts(matrix: _Matrix) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns that make about a piece each."""
    step = max(1, PIECE_BYTES // (4 * matrix.rows))
    for first in range(0, matrix.columns, step):
        yield first, min(first + step, matrix.columns)


def _transposed(matrix: Array, first: int, last: int) -> bytes:
    return np.ascontiguousarray(matrix[:, first:last].T).tobytes()  # lets other threads run
