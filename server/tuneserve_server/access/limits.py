"""The limits outside the queue: free disk space, and the checkpoints of a tenant."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import TenantRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import CheckpointUsage, Store
from tuneserve_server.errors import DiskFull

_FRESH_S = 1.0


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's disk; the folder of a bucket's copies may be lost."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    return shutil.disk_usage(there).free


class DiskGuard:
    """A guard that refuses requests while one of the disks is nearly full.

    Accepted requests and the store's clean-up must still fit. Large files go to the first of the
    folders.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        min_free_bytes: int,
        *,
        free_bytes: Callable[[Path], int] = _free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = folders
        self._min_free_bytes = min_free_bytes
        self._free_bytes = free_bytes
        self._clock = clock
        self._looked_s = -float("inf")
        self._refusal: str | None = None
        self._left_bytes = 0  # free bytes of the fullest disk at the last look
        self._admitted_bytes = 0  # since the last look

    def check(self, needed_bytes: int = 0) -> None:
        """Raise ``DiskFull`` if there is too little space, also after ``needed_bytes`` of files."""
        refusal = self.refusal() or (self._refusal_of(needed_bytes) if needed_bytes else None)
        if refusal is not None:
            raise DiskFull(refusal)

    def admit(self, size: int) -> None:
        """Raise ``DiskFull`` unless the store may take ``size`` more bytes.

        The bytes count until the next look, so that requests within a second cannot fill the disk.
        """
        if (refusal := self.refusal()) is not None:
            raise DiskFull(refusal)
        self._admitted_bytes += size
        if self._left_bytes - self._admitted_bytes < self._min_free_bytes:
            self._look()
            self._admitted_bytes = size
            if self._left_bytes - size < self._min_free_bytes:
                raise DiskFull(self._words(self._left_bytes, f"; {size} more do not fit"))

    def refusal(self) -> str | None:
        """Return the refusal that requests get now, or None. Looks no more than once a second."""
        if self._clock() - self._looked_s >= _FRESH_S:
            self._look()
        return self._refusal

    def warning(self) -> str | None:
        """Return a warning if twice the reserved bytes are not free; None otherwise."""
        if self.refusal() is not None or self._left_bytes >= 2 * self._min_free_bytes:
            return None
        left_bytes = self._left_bytes - self._min_free_bytes
        return f"the server's disk has room for {left_bytes} more bytes; delete checkpoints"

    def _look(self) -> None:
        self._looked_s = self._clock()
        self._admitted_bytes = 0
        self._refusal = None
        self._left_bytes = min(map(self._free_bytes, self._folders))
        if self._left_bytes < self._min_free_bytes:
            self._refusal = self._words(self._left_bytes, "")

    def _refusal_of(self, needed_bytes: int) -> str | None:
        """Return the refusal of files of this size, or None.

        This always looks: files written within the last second may be as large.
        """
        free_bytes = self._free_bytes(self._folders[0])
        if free_bytes - needed_bytes >= self._min_free_bytes:
            return None
        return self._words(free_bytes, f"; {needed_bytes} more do not fit")

    def _words(self, free_bytes: int, more: str) -> str:
        return (
            f"the server's disk has {free_bytes} bytes left, of which {self._min_free_bytes} are "
            f"reserved for accepted requests (min_free_bytes){more}; nothing was changed; delete "
            "checkpoints, or ask the operator for space, and send the request again"
        )


async def check_room(
    store: Store, policy: StorePolicy, tenant: str, key: str, *, needed_bytes: int = 0
) -> None:
    """Raise ``UserError`` if the tenant has no room for the checkpoint ``key``.

    The tenant's other checkpoints count, by number and by bytes, and so do ``needed_bytes``.
    """
    kept, most = await store.checkpoint_usage(tenant, key), await most_kept(store, policy, tenant)
    refusal = refusals.keeps_too_much(kept, most, needed_bytes)
    if refusal is not None:
        raise UserError(refusal.message)


async def most_kept(store: Store, policy: StorePolicy, tenant: str) -> CheckpointUsage:
    """Return the number and the total bytes of checkpoints that the tenant may keep."""
    return refusals.most_kept(await store.get_record(TenantRecord, tenant), policy)
