"""The files of a decomposition: their checksums, and how they are written."""

import fcntl
import json
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tuneserve_engine.adapters.tensor_file import checksum_of
from tuneserve_engine.core.errors import FileDamaged
from tuneserve_engine.process import permissions

ARRAYS = ("u", "s", "v")
ID = "id"
SUMS = "xxh3"
"""The file of checksums in a target's folder."""


def sums_of(folder: Path) -> dict[str, str]:
    return {name: checksum_of(folder / name) for name in (ID, *(f"{each}.npy" for each in ARRAYS))}


def check_sums(folder: Path) -> None:
    """Raise ``FileDamaged`` if a file in a target's folder differs from what was written."""
    if not (folder / SUMS).exists():
        return  # made by an earlier release
    try:
        told, found = json.loads((folder / SUMS).read_text(encoding="utf-8")), sums_of(folder)
        bad = [name for name, digits in found.items() if told.get(name) != digits]
        reason = f"{', '.join(bad)} does not have its checksum" if bad else ""
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    if reason:
        raise FileDamaged(
            f"the base model's directions in {folder} are damaged: {reason}; ask the operator to "
            "restore that folder from a backup, or to remove it while the workers are stopped: "
            "then it is made again; or use lora",
            reason,
        )


def write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    described = np.lib.format.dtype_to_descr(np.dtype(np.float32))
    np.lib.format.write_array_header_1_0(
        file, {"descr": described, "fortran_order": False, "shape": shape}
    )


def is_held(lock: Path) -> bool:
    """Return whether the writer that made this lock is alive."""
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held, or unknown
        return True
    return False


def write_member(path: Path, content: bytes) -> None:
    with permissions.open_shared(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Sync a file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
