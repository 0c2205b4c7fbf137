"""Checkpoint files: a directory per file id, complete or absent. No other module writes them."""

import errno
import os
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tuneserve_engine.process import permissions
from tuneserve_engine.process.disk_room import check_room
from tuneserve_engine.process.failpoints import failpoint

_PARTIAL = ".partial-"
QUARANTINE = "quarantine"
ABANDONED_S = 3600.0  # no write of one checkpoint takes this long
FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)  # errors of ``rename`` when the target exists


class Fs(Protocol):
    """The operating system calls that writing needs; each may raise ``OSError``."""

    def mkdir(self, path: Path) -> None:
        """Make a new directory."""
        ...

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor, which the caller closes."""
        ...

    def open_directory(self, path: Path) -> int:
        """Return a descriptor that the caller syncs and closes."""
        ...

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write and return the number of bytes taken, which may be fewer than there are."""
        ...

    def fsync(self, descriptor: int) -> None: ...

    def close(self, descriptor: int) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove_tree(self, path: Path) -> None:
        """Remove as much as possible; raises nothing."""
        ...

    def names(self, path: Path) -> list[str]:
        """Return the names in the directory. Raises ``FileNotFoundError`` if it does not exist."""
        ...

    def modified_s(self, path: Path) -> float: ...


class LocalFs:
    """The file system of this machine."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(permissions.FOLDER)
        permissions.shared(path, permissions.FOLDER)

    def create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, permissions.FILE)
        permissions.shared(descriptor, permissions.FILE)
        return descriptor

    def open_directory(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def modified_s(self, path: Path) -> float:
        return path.stat().st_mtime


LOCAL_FS = LocalFs()


def new_file_id() -> str:
    """Return a fresh name for a set of files; it is never made from client input."""
    return uuid.uuid4().hex


class FileStore:
    """The ``Files`` in a directory, ``root``: a subdirectory for each id.

    A directory appears under its id only when every member is on disk: members are written under a
    temporary name and fsynced, then the directory is renamed and its parent fsynced. Any number of
    processes may share one root: each write has a temporary name of its own.
    """

    place = "directory of files"
    option = "--files-dir"
    remedy = "free some disk and save again"

    def __init__(
        self,
        root: Path,
        fs: Fs = LOCAL_FS,
        *,
        min_free_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._fs = fs
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._make_durable_directory(root)

    @property
    def shown(self) -> str:
        return str(self._root)

    def write(
        self, file_id: str, members: Mapping[str, bytes], *, spares_disk: bool = False
    ) -> int:
        """Store the members and return their size in bytes.

        Writing an existing id again changes nothing, because its content is the same. Raises
        ``OSError`` if the disk refuses: the id is then absent, or complete but perhaps not durable,
        and can be written again. With ``spares_disk``, also raises ``OSError`` if the write would
        leave less than ``min_free_bytes``.
        """
        final = self.path(file_id)
        if not self._exists(final):
            if spares_disk:
                size = sum(len(data) for data in members.values())
                check_room(self._root, size, self._min_free_bytes)
            self._publish(self._partial(file_id), final, members)
        # Also if another write made the directory: it may have been killed before this sync.
        self._sync_directory(self._root)
        return sum(len(data) for data in members.values())

    def is_short_of_room(self) -> bool:
        """Return whether less than ``min_free_bytes`` is left."""
        return shutil.disk_usage(self._root).free < self._min_free_bytes

    def _publish(self, partial: Path, final: Path, members: Mapping[str, bytes]) -> None:
        """Make ``final`` appear with all members on disk; the rename itself is not yet synced."""
        try:
            self._fs.mkdir(partial)
            for name, data in members.items():
                _write_synced(self._fs, partial / name, data)
            self._sync_directory(partial)
            failpoint("file-before-rename")
            self._fs.rename(partial, final)
            failpoint("file-after-rename")
        except OSError as error:
            self._fs.remove_tree(partial)
            if error.errno not in _TAKEN or not self._exists(final):
                raise  # otherwise another write of the same content came first

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a directory for members that are written piece by piece; see ``Files``."""
        partial = self._partial("staging")
        self._fs.mkdir(partial)
        try:
            yield partial
        finally:
            self._fs.remove_tree(partial)

    def publish(self, staged: Path, file_id: str) -> int:
        """Make the staged files appear under a new id, complete and durable; return their size."""
        size = sum((staged / name).stat().st_size for name in self._fs.names(staged))
        self._sync_directory(staged)
        self._fs.rename(staged, self.path(file_id))
        self._sync_directory(self._root)
        return size

    def discard_partial(self) -> None:
        """Remove the leftovers of writes and deletes that were killed more than an hour ago."""
        for name in self._fs.names(self._root):
            if name.startswith(_PARTIAL) and self._is_older(name, ABANDONED_S):
                self._fs.remove_tree(self._root / name)

    def path(self, file_id: str) -> Path:
        """Return the path of the id's directory.

        Raises ``ValueError`` for a text that is not in the format of ``new_file_id``.
        """
        if not is_file_id(file_id):
            raise ValueError(f"{file_id!r} is no file id; expected 32 hexadecimal digits")
        return self._root / file_id

    def members(self, file_id: str) -> list[str]:
        """Return the names of the files stored under this id; empty if there are none."""
        try:
            return sorted(self._fs.names(self.path(file_id)))
        except FileNotFoundError:
            return []

    def size(self, file_id: str) -> int:
        """Return the bytes of the id's members; 0 if the id is absent."""
        with suppress(FileNotFoundError):
            return sum(each.stat().st_size for each in self.path(file_id).iterdir())
        return 0

    def ids(self, older_than_s: float = 0.0, now_s: float | None = None) -> set[str]:
        """Return the complete file ids that are at least ``older_than_s`` old.

        The age is as of ``now_s``, or by this machine's clock.
        """
        found = {name for name in self._fs.names(self._root) if is_file_id(name)}
        if older_than_s > 0:
            return {name for name in found if self._is_older(name, older_than_s, now_s)}
        return found

    def ids_until(self, note: str) -> set[str]:
        """Return the complete file ids that were written before the note was left, by the clock of
        the file system."""
        left_s = self._fs.modified_s(self._root / note)
        found = set()
        for file_id in self.ids():
            with suppress(FileNotFoundError):
                if self._fs.modified_s(self._root / file_id) <= left_s:
                    found.add(file_id)
        return found

    def delete(self, file_id: str) -> None:
        """Remove the id's files, all at once; a no-op if there are none."""
        condemned = self._partial(file_id)
        with suppress(FileNotFoundError):
            # Members are removed one by one, so the id's name has to be gone for good first.
            self._fs.rename(self.path(file_id), condemned)
            self._sync_directory(self._root)
            self._fs.remove_tree(condemned)

    def prove_writable(self) -> None:
        """Check that this process can write here. Raises ``OSError`` if it cannot.

        A full disk passes: making room needs the running service.
        """
        proof = self._partial("proof")
        try:
            self._fs.mkdir(proof)
        except OSError as error:
            if error.errno not in FULL:
                raise
        self._fs.remove_tree(proof)

    # --- what processes tell each other about the directory --------------------------------------

    def leave_note(self, name: str) -> None:
        """Make an empty directory of that name; a no-op if it exists."""
        with suppress(FileExistsError):
            self._fs.mkdir(self._root / name)
        self._sync_directory(self._root)

    def remove_note(self, name: str) -> None:
        self._fs.remove_tree(self._root / name)

    def now_s(self) -> float:
        """Return the time by the clock of the file system, which may be another machine's."""
        proof = self._partial("now")
        self._fs.mkdir(proof)
        try:
            return self._fs.modified_s(proof)
        finally:
            self._fs.remove_tree(proof)

    def notes(self, prefix: str, now_s: float | None = None) -> dict[str, float]:
        """Return the notes that begin with the prefix, without the prefix, and their ages.

        Ages are in seconds, as of ``now_s`` or by the clock of this machine.
        """
        if now_s is None:
            now_s = self._clock()
        found = {}
        for name in self._fs.names(self._root):
            if name.startswith(prefix):
                with suppress(FileNotFoundError):  # another process has just removed it
                    age_s = now_s - self._fs.modified_s(self._root / name)
                    found[name.removeprefix(prefix)] = age_s
        return found

    # --- quarantine -------------------------------------------------------------------------------

    def set_aside(self, file_id: str, group: str) -> None:
        """Move the id's files, unchanged, to ``quarantine/<group>/``; a no-op if there are none."""
        folder = self._root / QUARANTINE / group
        self._make_durable_directory(folder)
        with suppress(FileNotFoundError):
            self._fs.rename(self.path(file_id), folder / file_id)
            self._sync_directory(folder)
            self._sync_directory(self._root)

    def bring_back(self, file_id: str, group: str) -> None:
        """Move the id's files back out of quarantine.

        A no-op if the group has none, or if the id exists again.
        """
        folder = self._root / QUARANTINE / group
        try:
            self._fs.rename(folder / file_id, self.path(file_id))
        except OSError as error:
            if error.errno != errno.ENOENT and error.errno not in _TAKEN:
                raise
        else:
            self._sync_directory(self._root)
            self._sync_directory(folder)

    def set_aside_groups(self) -> dict[str, list[str]]:
        """Return the file ids in quarantine, by group."""
        folder = self._root / QUARANTINE
        groups = self._fs.names(folder) if self._exists(folder) else []
        return {each: self._ids_in(folder / each) for each in groups}

    def _ids_in(self, folder: Path) -> list[str]:
        try:
            return sorted(filter(is_file_id, self._fs.names(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete_group(self, group: str) -> None:
        """Delete for good the files that were set aside in this group."""
        condemned = self._partial(group)
        with suppress(FileNotFoundError):
            self._fs.rename(self._root / QUARANTINE / group, condemned)
            self._sync_directory(self._root / QUARANTINE)
            self._fs.remove_tree(condemned)

    def _partial(self, file_id: str) -> Path:
        """Return a name that no other write or delete uses, not even one of the same id."""
        return self._root / f"{_PARTIAL}{file_id}-{secrets.token_hex(8)}"

    def _exists(self, path: Path) -> bool:
        try:
            self._fs.names(path)
        except FileNotFoundError:
            return False
        return True

    def _is_older(self, name: str, age_s: float, now_s: float | None = None) -> bool:
        try:
            now_s = self._clock() if now_s is None else now_s
            return self._fs.modified_s(self._root / name) <= now_s - age_s
        except FileNotFoundError:
            return False  # another process has just removed it

    def _make_durable_directory(self, path: Path) -> None:
        """Make the directory and its missing parents, and sync the entry of each."""
        if not self._exists(path):
            if not self._exists(path.parent):
                self._make_durable_directory(path.parent)
            with suppress(FileExistsError):  # another process was faster
                self._fs.mkdir(path)
        self._sync_directory(path.parent)

    def _sync_directory(self, path: Path) -> None:
        descriptor = self._fs.open_directory(path)
        try:
            self._fs.fsync(descriptor)
        finally:
            self._fs.close(descriptor)


def is_file_id(name: str) -> bool:
    """Return whether the name is in the format of ``new_file_id``."""
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _write_synced(fs: Fs, path: Path, data: bytes) -> None:
    descriptor = fs.create(path)
    try:
        rest = memoryview(data)
        while rest:
            taken = fs.write(descriptor, rest)
            if taken == 0:
                raise OSError(errno.ENOSPC, f"the disk takes no more bytes of {path.name}")
            rest = rest[taken:]
        fs.fsync(descriptor)
    finally:
        fs.close(descriptor)
