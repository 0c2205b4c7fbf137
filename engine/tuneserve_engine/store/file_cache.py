"""Local copies of files that are in a bucket. They may be lost, or deleted, at any time."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from tuneserve_engine.process.disk_room import check_room
from tuneserve_engine.process.permissions import open_shared
from tuneserve_engine.store.files import FileStore

KEPT_S = 3600.0
"""The time since its last use in which a copy is not removed: its reader may still open members."""
_VERSION = ".token"
_PIECE_BYTES = 8 * 2**20
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)

Read = Callable[[str, int, int], bytes]
"""Returns the bytes of a member, by its name, from a first position up to a last one."""


class _Copy(NamedTuple):
    used_s: float
    file_id: str
    size: int


class FileCache:
    """Copies of files in a directory, which any number of processes share.

    A copy is complete or absent. It is a version of its id: the one with the token. With
    ``spares_disk``, no copy is made that would leave less than ``min_free_bytes``. Without, old
    copies are removed for that, and the new one is made all the same: accepted work needs it.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        min_free_bytes: int = 0,
        spares_disk: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._spares_disk = spares_disk
        self._clock = clock
        self._files: FileStore | None = None

    def path(self, file_id: str) -> Path:
        """Return the place of the id's copy."""
        return self._root / file_id

    def prove_writable(self) -> None:
        """Check that copies can be made. Raises ``OSError``; a full disk passes."""
        self._opened().prove_writable()

    def staging(self) -> AbstractContextManager[Path]:
        """Yield a directory, as ``FileStore.staging`` does."""
        return self._opened().staging()

    def find(self, file_id: str, token: str, sizes: Mapping[str, int]) -> Path | None:
        """Return the directory of the id's copy and mark it as used.

        Removes a copy of another version, or one that is damaged, and returns None.
        """
        folder = self.path(file_id)
        try:
            is_whole = (folder / _VERSION).read_text() == token
            is_whole = is_whole and all(
                (folder / name).stat().st_size == size for name, size in sizes.items()
            )
            if is_whole:
                with suppress(PermissionError):
                    os.utime(folder)
                return folder
        except (FileNotFoundError, NotADirectoryError):
            pass
        self.delete(file_id)
        return None

    def add(self, file_id: str, token: str, sizes: Mapping[str, int], read: Read) -> Path | None:
        """Make the copy and return its directory. Raises ``OSError``, also of ``read``.

        Returns None if another process has already replaced or removed the copy.
        """
        files = self._opened()
        self._make_room(sum(sizes.values()))
        with files.staging() as staged:
            for name, size in sizes.items():
                with open_shared(staged / name, "xb") as file:
                    for start in range(0, size, _PIECE_BYTES):
                        file.write(read(name, start, min(start + _PIECE_BYTES, size)))
                    file.flush()
                    os.fsync(file.fileno())
            with open_shared(staged / _VERSION, "xb") as file:
                file.write(token.encode())
            try:
                files.publish(staged, file_id)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
        return self.find(file_id, token, sizes)

    def delete(self, file_id: str) -> None:
        """Remove the id's copy; a no-op if there is none."""
        if self.path(file_id).exists():
            self._opened().delete(file_id)

    def trim(self, present: Collection[str]) -> None:
        """Remove copies of ids that are not present, and leftovers of killed processes.

        Then makes room, as before a new copy.
        """
        if not self._root.is_dir():
            return
        files = self._opened()
        files.discard_partial()
        for file_id in files.ids() - set(present):
            files.delete(file_id)
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used copies until there is room for ``size`` more bytes.

        Copies used within ``KEPT_S`` stay, even if the copies take more than ``max_bytes`` then.
        Raises ``OSError`` if the disk has no room.
        """
        files = self._opened()
        copies = sorted(_copies(files))
        total = sum(each.size for each in copies)
        for each in copies:
            is_fine = total + size <= self._max_bytes and self._has_room(size)
            if is_fine or each.used_s > self._clock() - KEPT_S:
                break
            files.delete(each.file_id)
            total -= each.size
        if size and self._spares_disk:
            check_room(self._root, size, self._min_free_bytes)

    def _has_room(self, size: int) -> bool:
        return shutil.disk_usage(self._root).free - size >= self._min_free_bytes

    def _opened(self) -> FileStore:
        """Return the directory's files, after making the directory again if it was removed."""
        if self._files is None or not self._root.is_dir():
            self._files = FileStore(self._root, clock=self._clock)
        return self._files


def _copies(files: FileStore) -> Iterator[_Copy]:
    for file_id in files.ids():
        with suppress(FileNotFoundError):  # another process has just removed it
            used_s = files.path(file_id).stat().st_mtime
            yield _Copy(used_s, file_id, files.size(file_id))
