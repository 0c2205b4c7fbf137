"""Files of known ages, and a store whose named files the test chooses."""

import errno
import secrets
from collections.abc import Iterable
from pathlib import Path

from tests.support.memory_store import MemoryStore
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.files import FileStore, LocalFs
from tuneserve_engine.store.files_mount import check_shared
from tuneserve_engine.store.ownership import OWNER

NOW_S = 1_800_000_000.0
A, B, C = "a" * 32, "b" * 32, "c" * 32


class AgedFs(LocalFs):
    """The real file system with ages set by the test.

    Other files are old, except the marks by which processes see each other.
    """

    def __init__(self) -> None:
        self.modified: dict[str, float] = {}
        self.now_s = NOW_S
        self.stuck: set[str] = set()

    def modified_s(self, path: Path) -> float:
        young = path.name.startswith((OWNER, ".seen-", ".moved-"))
        return self.modified.get(path.name, NOW_S if young else NOW_S - 86_400)

    def rename(self, source: Path, target: Path) -> None:
        if source.name in self.stuck:
            raise OSError(errno.EIO, "Input/output error")
        super().rename(source, target)


class Names(MemoryStore):
    """A store whose named and released files are chosen by the test."""

    def __init__(self, *file_ids: str, released: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.file_ids = set(file_ids)
        self.released = set(released)
        self.own_secret = secrets.token_bytes(32)  # all other memory stores share one secret
        self.place = "memory"

    async def secret(self) -> bytes:
        return self.own_secret

    async def seat(self) -> str:
        return self.place

    async def files_in_use(self) -> set[str]:
        return self.file_ids

    async def released_files(self) -> set[str]:
        return self.released

    async def forget_released(self, file_ids: Iterable[str]) -> None:
        self.released -= set(file_ids)


async def files_of(
    store: Store, folder: Path, fs: AgedFs | None = None, *, min_free_bytes: int = 0
) -> FileStore:
    """The store's directory with files A, B and C."""
    await check_shared(FileStore(folder), store)
    fs = fs or AgedFs()
    files = FileStore(folder, fs, min_free_bytes=min_free_bytes, clock=lambda: fs.now_s)
    for file_id in (A, B, C):
        files.write(file_id, {"adapter.safetensors": file_id.encode()})
    return files
