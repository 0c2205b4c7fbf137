"""The one place that writes checkpoint files: a directory per file id, whole or absent."""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

_PARTIAL = ".partial-"


def new_file_id() -> str:
    """A fresh name for a set of files; never made from client input."""
    return uuid.uuid4().hex


class FileStore:
    """Directories of files under ``root``, immutable once they exist.

    A directory appears under its id only when every member is on disk: members are written to a
    temporary name and fsynced, then the directory is renamed and its parent fsynced.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, file_id: str, members: Mapping[str, bytes]) -> int:
        """Stores the members; returns their size in bytes. Raises ``OSError`` and leaves nothing
        visible if the disk refuses. Writing an id that exists again is a no-op (same content)."""
        final = self.path(file_id)
        size = sum(len(data) for data in members.values())
        if final.exists():
            return size
        partial = self._root / f"{_PARTIAL}{file_id}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            for name, data in members.items():
                _write_synced(partial / name, data)
            _sync_directory(partial)
            partial.rename(final)
            _sync_directory(self._root)
        except OSError:
            # Undo a rename whose fsync failed: whether it survives a power loss is not known.
            shutil.rmtree(final, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return size

    def discard_partial(self) -> None:
        """Removes what writers that were killed left behind. For the only writer, at its start."""
        for partial in self._root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)

    def path(self, file_id: str) -> Path:
        """Where the id's directory is. Raises ``ValueError`` for anything but an id we made."""
        if not _is_file_id(file_id):
            raise ValueError(f"{file_id!r} is no file id; expected 32 hexadecimal digits")
        return self._root / file_id

    def members(self, file_id: str) -> list[str]:
        """Names of the files stored under this id; empty if there are none."""
        path = self.path(file_id)
        return sorted(p.name for p in path.iterdir()) if path.is_dir() else []

    def ids(self) -> set[str]:
        """Every complete file id in the store."""
        return {p.name for p in self._root.iterdir() if _is_file_id(p.name)}

    def delete(self, file_id: str) -> None:
        """Removes the id's files; a no-op if there are none."""
        shutil.rmtree(self.path(file_id), ignore_errors=True)


def _is_file_id(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
