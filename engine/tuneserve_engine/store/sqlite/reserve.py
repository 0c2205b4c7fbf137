"""Disk space set aside for the store, so that it can end jobs, delete and start on a full disk."""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from tuneserve_engine.store.errors import StoreFailed


class Reserve:
    """A file of ``size_bytes``, deleted when the disk is full and made again when twice as much is
    free.

    While the file is deleted, the store accepts nothing new. A size of 0 means no reserve: the
    store then tries every write.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self.is_held = False
        with suppress(OSError):
            self.is_held = path.stat().st_blocks * 512 >= size_bytes > 0
            if not self.is_held:  # of another size, or half made
                path.unlink()

    def hold(self) -> bool:
        """Set the space aside if there is enough; return whether the store may accept new data."""
        if not self.is_held and self._size_bytes:
            self.is_held = self._allocate(self._path, self._size_bytes)
        return self.is_held or not self._size_bytes

    def lengthen(self, log: Path, size_bytes: int) -> None:
        """Allocate ``size_bytes`` of the disk for the write-ahead log.

        SQLite fills the log and then uses it again from its beginning, so it can write when nothing
        else on this disk can.
        """
        if self._size_bytes:
            self._allocate(log, size_bytes)

    def _allocate(self, path: Path, size_bytes: int) -> bool:
        """Allocate the file's bytes on the disk; return False and change nothing if that fails."""
        with suppress(OSError):
            if _free_bytes(path.parent) < 2 * size_bytes:
                return False
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            before = os.fstat(descriptor).st_size
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
                return True
            except OSError:
                os.ftruncate(descriptor, before)
            finally:
                os.close(descriptor)
        return False

    def give(self) -> bool:
        """Free the space; return whether there was any to free."""
        if not self.is_held:
            return False
        self.is_held = False
        self._path.unlink(missing_ok=True)
        return True


NO_RESERVE = Reserve(Path(os.devnull) / "reserve", 0)


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def is_full(error: object) -> bool:
    """Return whether the error is SQLite's for a full disk."""
    return (
        isinstance(error, sqlite3.Error)
        and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    )


def no_room() -> StoreFailed:
    return StoreFailed(
        "the store's disk is full, and what was set aside is used for work that was accepted; "
        "nothing was changed; free some disk space, and try again"
    )
