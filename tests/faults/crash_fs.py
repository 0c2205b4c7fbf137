"""A disk that remembers its promises, to find the states that a power loss may leave.

``CrashFs`` is an ``Fs`` in memory. Written data are visible at once, as in a page cache, but only
``fsync`` makes promises: for a file about its bytes, for a directory about its entries.
``survivors`` returns every disk that a power loss may leave at this moment, with any part of the
unsynced changes, in any order. POSIX promises that a rename is one change, and little else. This
disk does the same:

- an entry may be on disk without the bytes of its file, or the other way round;
- an unsynced write may be there, missing, half there, or zeros of the right length;
- of two directory changes the second may be on disk and the first not;
- bytes whose ``fsync`` failed are not written by a later one that succeeds.
"""

import copy
import errno
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Tree = dict[str, "bytes | Tree"]
"""The contents of a directory."""
_ROOT = 0


@dataclass(frozen=True)
class _Entries:
    """One change of a directory: new targets of some names, or None where a name is removed."""

    directory: int
    targets: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class _Bytes:
    """One write to a file."""

    file: int
    at: int
    data: bytes
    lost: bool = False  # its sync failed: no later one brings it to the disk


_Effect = _Entries | _Bytes


@dataclass
class _Disk:
    """Inodes by number: directories' entries and files' bytes."""

    directories: dict[int, dict[str, int]]
    files: dict[int, bytes]

    def apply(self, effect: _Effect) -> None:
        if isinstance(effect, _Bytes):
            self.files[effect.file] = _after([effect], self.files[effect.file])
        else:
            entries = self.directories[effect.directory]
            self.directories[effect.directory] = dict(_entries_after([effect], entries))

    def tree(self, inode: int = _ROOT) -> Tree:
        return {
            name: self.tree(child) if child in self.directories else self.files[child]
            for name, child in self.directories[inode].items()
        }


def _after(effects: Iterable[_Effect | None], content: bytes) -> bytes:
    """A file's bytes after these changes."""
    for effect in effects:
        if isinstance(effect, _Bytes):
            content = content.ljust(effect.at, b"\0")
            content = content[: effect.at] + effect.data + content[effect.at + len(effect.data) :]
    return content


def _entries_after(
    effects: Iterable[_Effect | None], entries: dict[str, int]
) -> tuple[tuple[str, int], ...]:
    """A directory's entries after these changes, by name."""
    found: dict[str, int | None] = dict(entries)
    for effect in effects:
        if isinstance(effect, _Entries):
            found.update(effect.targets)
    return tuple((name, inode) for name, inode in sorted(found.items()) if inode is not None)


class CrashFs:
    """An ``Fs`` over a disk that starts with ``tree``, all of it synced.

    ``watch`` is called after each change, sync or failure, when ``survivors`` may have changed.
    """

    def __init__(self, tree: Tree | None = None) -> None:
        self._synced = _Disk({_ROOT: {}}, {})
        self._inodes = itertools.count(1)
        self._grow(_ROOT, tree or {})
        self._seen = copy.deepcopy(self._synced)  # the view of this machine's processes
        self._pending: list[_Effect] = []
        self._descriptors: dict[int, int] = {}
        self.watch: Callable[[], None] = lambda: None

    def _grow(self, directory: int, tree: Tree) -> None:
        for name, content in tree.items():
            inode = next(self._inodes)
            self._synced.directories[directory][name] = inode
            if isinstance(content, dict):
                self._synced.directories[inode] = {}
                self._grow(inode, content)
            else:
                self._synced.files[inode] = content

    # --- what a writer calls ----------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        inode = next(self._inodes)
        for disk in (self._synced, self._seen):
            disk.directories[inode] = {}
        self._add(path, inode)

    def create(self, path: Path) -> int:
        inode = next(self._inodes)
        for disk in (self._synced, self._seen):
            disk.files[inode] = b""
        self._add(path, inode)
        return self._open(inode)

    def _add(self, path: Path, inode: int) -> None:
        if self._find(path) is not None:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self._change(_Entries(self._directory(path.parent), ((path.name, inode),)))

    def open_directory(self, path: Path) -> int:
        return self._open(self._directory(path))

    def write(self, descriptor: int, data: memoryview) -> int:
        inode = self._descriptors[descriptor]
        self._change(_Bytes(inode, len(self._seen.files[inode]), bytes(data)))
        return len(data)

    def fsync(self, descriptor: int) -> None:
        inode = self._descriptors[descriptor]
        for effect in self._of(inode):
            if not (isinstance(effect, _Bytes) and effect.lost):
                self._pending.remove(effect)
                self._synced.apply(effect)
        self.watch()

    def fail_fsync(self, descriptor: int) -> None:
        """Act like a disk error in ``fsync``: the bytes may be there, and no retry helps."""
        for effect in self._of(self._descriptors[descriptor]):
            if isinstance(effect, _Bytes):
                at = self._pending.index(effect)
                self._pending[at] = _Bytes(effect.file, effect.at, effect.data, lost=True)
        self.watch()

    def _of(self, inode: int) -> list[_Effect]:
        return [
            effect
            for effect in self._pending
            if inode == (effect.file if isinstance(effect, _Bytes) else effect.directory)
        ]

    def close(self, descriptor: int) -> None:
        del self._descriptors[descriptor]

    def rename(self, source: Path, target: Path) -> None:
        inode = self._find(source)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))
        replaced = self._find(target)
        if replaced is not None and self._seen.directories.get(replaced) != {}:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        assert source.parent == target.parent, "only renames within a directory are modelled"
        directory = self._directory(source.parent)
        self._change(_Entries(directory, ((source.name, None), (target.name, inode))))

    def remove_tree(self, path: Path) -> None:
        inode = self._find(path)
        if inode is None:
            return
        for name in list(self._seen.directories.get(inode, {})):
            self.remove_tree(path / name)
        self._change(_Entries(self._directory(path.parent), ((path.name, None),)))

    def names(self, path: Path) -> list[str]:
        return list(self._seen.directories[self._directory(path)])

    def modified_s(self, path: Path) -> float:
        return 0.0

    # --- what a test asks -------------------------------------------------------------------------

    def tree(self) -> Tree:
        """The view of this machine's processes."""
        return self._seen.tree()

    def survivors(self) -> list[Tree]:
        """Every disk that a power loss at this moment may leave."""
        return [tree for tree in self._survivors(_ROOT) if isinstance(tree, dict)]

    def _survivors(self, inode: int) -> "list[bytes | Tree]":
        fates = itertools.product(*(_fates(effect) for effect in self._of(inode)))
        if inode in self._synced.files:
            return list({_after(fate, self._synced.files[inode]): 0 for fate in fates})
        found: list[bytes | Tree] = []
        entries = {_entries_after(fate, self._synced.directories[inode]): 0 for fate in fates}
        for each in entries:
            contents = itertools.product(*(self._survivors(child) for _, child in each))
            found += [
                {name: content for (name, _), content in zip(each, parts, strict=True)}
                for parts in contents
            ]
        return found

    def _open(self, inode: int) -> int:
        descriptor = max(self._descriptors, default=2) + 1
        self._descriptors[descriptor] = inode
        return descriptor

    def _find(self, path: Path) -> int | None:
        inode = _ROOT
        for name in path.parts[1:]:
            entries = self._seen.directories.get(inode, {})
            if name not in entries:
                return None
            inode = entries[name]
        return inode

    def _directory(self, path: Path) -> int:
        inode = self._find(path)
        if inode not in self._seen.directories:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return inode

    def _change(self, effect: _Effect) -> None:
        self._seen.apply(effect)
        self._pending.append(effect)
        self.watch()


def _fates(effect: _Effect) -> Iterator[_Effect | None]:
    """The possible fates of a change that was not synced."""
    yield effect
    yield None
    if isinstance(effect, _Bytes):
        half = effect.data[: len(effect.data) // 2]
        for data in (half, b"\0" * len(effect.data)):
            yield _Bytes(effect.file, effect.at, data)
