"""File systems that fail: any ``Fs`` with a hook before each call."""

import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path

from tests.faults.crash_fs import CrashFs
from tuneserve_engine.store.files import Fs

Before = Callable[[int, str], None]
"""Called with the number of the call, from 0, and its name. It may raise."""


def nothing(number: int, name: str) -> None:
    """The hook of a working file system."""


def failing(calls: Collection[int], error: int) -> Before:
    """A hook that makes these calls raise ``error``."""

    def before(number: int, name: str) -> None:
        if number in calls:
            raise OSError(error, os.strerror(error))

    return before


def every(n: int, error: int = errno.EIO) -> Before:
    """A hook that makes every n-th call raise ``error``."""

    def before(number: int, name: str) -> None:
        if number % n == n - 1:
            raise OSError(error, os.strerror(error))

    return before


class HookedFs:
    """``inner``, with ``before`` called first and writes of up to ``chunk`` bytes."""

    def __init__(self, inner: Fs, before: Before = nothing, *, chunk: int = 2**30) -> None:
        self.inner = inner
        self.before = before
        self.chunk = chunk
        self.calls = 0

    def _call(self, name: str) -> None:
        self.calls += 1
        self.before(self.calls - 1, name)

    def mkdir(self, path: Path) -> None:
        self._call("mkdir")
        self.inner.mkdir(path)

    def create(self, path: Path) -> int:
        self._call("create")
        return self.inner.create(path)

    def open_directory(self, path: Path) -> int:
        self._call("open_directory")
        return self.inner.open_directory(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        try:
            self._call("write")
        except OSError:
            self.inner.write(descriptor, data[: len(data) // 2])  # the disk took a part
            raise
        return self.inner.write(descriptor, data[: self.chunk])

    def fsync(self, descriptor: int) -> None:
        try:
            self._call("fsync")
        except OSError:
            if isinstance(self.inner, CrashFs):
                self.inner.fail_fsync(descriptor)
            raise
        self.inner.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        self.inner.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        self.inner.rename(source, target)

    def remove_tree(self, path: Path) -> None:
        try:
            self._call("remove_tree")
        except OSError:
            return  # it removes as much as it can
        self.inner.remove_tree(path)

    def names(self, path: Path) -> list[str]:
        self._call("names")
        return self.inner.names(path)

    def modified_s(self, path: Path) -> float:
        self._call("modified_s")
        return self.inner.modified_s(path)
