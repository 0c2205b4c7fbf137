"""Files of evicted adapters. They are not checkpoints: another process cannot use them."""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.adapters.tensor_file import checksum
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.process.disk_room import check_room
from tuneserve_engine.process.lock import lock_name
from tuneserve_engine.process.permissions import make_folder, open_new

_SUFFIX = ".page"
_LOCK = "pages"
_LOCK_S = 5.0


class SpillFolder:
    """A new directory for one process's files, in ``root`` or, if None, in the system's.

    The directory is deleted with this object. If a process could not delete its directory in
    ``root``, the next process that makes one there does: the lock of the dead process is free.
    """

    def __init__(self, root: Path | None) -> None:
        if root is not None:
            make_folder(root)
            _delete_abandoned(root)
        self.path = Path(tempfile.mkdtemp(prefix="tuneserve-pages-", dir=root))
        lock = lock_name(self.path, _LOCK, timeout_s=_LOCK_S)
        weakref.finalize(self, _delete, self.path, lock)


def _delete_abandoned(root: Path) -> None:
    # Only directories with a lock are deleted: the operator may have put ``root`` anywhere.
    for path in root.glob(f"*/{_LOCK}.lock"):
        try:
            lock = lock_name(path.parent, _LOCK, timeout_s=0)
        except OSError:
            continue  # its process is alive
        _delete(path.parent, lock)


def _delete(directory: Path, lock: IO[bytes]) -> None:
    with lock:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class SpillFile:
    """One adapter's tensors on disk; the small fields stay in memory."""

    path: Path
    config: AdapterConfig
    step: int
    sums: Mapping[str, str]

    @classmethod
    def write(cls, path: Path, state: AdapterState, *, min_free_bytes: int = 0) -> "SpillFile":
        """Write the state, whose arrays are contiguous, to ``path`` with a suffix.

        Raises ``OutOfMemory``, and leaves no file, if that fails or would leave less than
        ``min_free_bytes`` of the disk free.
        """
        path = path.with_suffix(_SUFFIX)
        tensors = state.to_tensors()
        try:
            check_room(path.parent, state.nbytes, min_free_bytes)
            open_new(path).close()  # ``save_file`` writes into this file and keeps its permissions
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            _unlink(path)
            raise OutOfMemory(
                f"an adapter of {state.nbytes} bytes could not be written to {path.parent}: "
                f"{error}; make room there, or give adapters more of the host's memory"
            ) from error
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        return cls(path, state.config, state.step, sums)

    def read(self) -> AdapterState:
        """Return the state, bit for bit.

        Raises ``DeviceFailed`` if the file is gone or damaged. No other call could read it either;
        the next process restores the adapter without it.
        """
        try:
            tensors = load_file(self.path)
            found = {name: checksum(tensor) for name, tensor in tensors.items()}
            if found != self.sums:
                raise ValueError("its tensors do not have their checksums")
        except (OSError, ValueError, SafetensorError) as error:
            raise DeviceFailed(
                f"a paged-out adapter could not be read from {self.path}: {error}; restart the "
                "worker, which restores it from its last recovery point"
            ) from error
        return AdapterState.from_tensors(self.config, self.step, tensors)

    def delete(self) -> None:
        _unlink(self.path)


def _unlink(path: Path) -> None:
    with suppress(OSError):  # if the disk fails, the file goes with its folder or the next folder
        path.unlink()
