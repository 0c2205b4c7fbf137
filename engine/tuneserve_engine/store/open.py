"""Functions that open the store that the settings name."""

import asyncio
import errno
import logging
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.process import permissions
from tuneserve_engine.process.permissions import make_folder
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Queue, Soundness, Store
from tuneserve_engine.store.errors import StoreDamaged, StoreFailed, StoreUnusable
from tuneserve_engine.store.files import QUARANTINE, is_file_id
from tuneserve_engine.store.files_mount import (
    check_marked,
    check_shared,
    check_unused,
    new_files,
    open_files,
)
from tuneserve_engine.store.ownership import Adopted, Ownership
from tuneserve_engine.store.remote import RemoteQueue
from tuneserve_engine.store.sqlite.store import SqliteStore

logger = logging.getLogger(__name__)

Durability = Literal["always", "asserted"]
"""The reason to trust that accepted requests are on disk: ``always`` was verified, ``asserted`` is
the operator's word."""

_RETRY_S = 1.0


def settle_permissions(settings: CommonSettings) -> None:
    """Set the permissions of files that this process writes, and narrow those of existing folders.

    Earlier releases may have left the service's own folders open to others. Narrows the folders in
    the data directory, and those of checkpoints and recovery points, wherever they are.
    """
    permissions.share_with_group(settings.group_access)
    names = ["compiled", "pages"]
    if not settings.group_access:
        names += ["files", "decompositions"]
    permissions.narrow(settings.data_dir / name for name in names)
    if not settings.group_access:
        permissions.narrow(_file_folders(settings.files_dir))


def _file_folders(root: Path) -> Iterator[Path]:
    """Yield the directories of all file ids, including those in quarantine."""
    for folder in (root, *(root / QUARANTINE).glob("*")):
        with suppress(OSError):  # none yet, or unreadable: ``open_files`` reports that
            yield from [folder / name for name in os.listdir(folder) if is_file_id(name)]


class OpenStore(Store, Protocol):
    """A store that outlives its processes and must be closed."""

    @property
    def durability(self) -> Durability: ...

    @property
    def soundness(self) -> Soundness:
        """The known condition of the store's file. Redis checks its own files when loading them."""
        ...

    async def close(self) -> None: ...


async def open_store(settings: CommonSettings, stopped: asyncio.Event | None = None) -> OpenStore:
    """Open the store: SQLite, for one process of a deployment, or Redis, for all of them.

    While Redis does not answer at its address (it may be starting), tries again until ``stopped``.
    Raises ``StoreUnusable``, also if the store belongs to another directory of files, and
    ``ConnectionError`` once stopped.
    """
    while True:
        try:
            return await _open_with_files(settings)
        except StoreDamaged as error:  # its record of the directory is unreadable: no retry helps
            raise StoreUnusable(str(error)) from error
        except (ConnectionError, StoreFailed) as error:
            logger.warning("no store at %s yet, trying again: %s", settings.store_shown, error)
            if stopped is not None and stopped.is_set():
                raise ConnectionError(str(error)) from error
            await asyncio.sleep(_RETRY_S)


async def check_store(settings: CommonSettings) -> None:
    """Check that a running Redis can be the store. Raises ``StoreUnusable`` if it cannot.

    A process calls this first if it would otherwise find out only after minutes of loading. A Redis
    that does not answer passes, because it may be starting. With SQLite, nothing is checked.
    """
    if settings.store_kind == "redis":
        try:
            store = await _open_with_files(settings)
        except (ConnectionError, StoreFailed):
            return  # it may be starting
        await store.close()


async def _open_with_files(settings: CommonSettings) -> OpenStore:
    store = await _open(settings)
    try:
        files = await asyncio.to_thread(open_files, settings)
        with _answered(settings):
            await check_shared(files, store, settings.store_shown)
    except BaseException:
        await store.close()
        raise
    return store


@contextmanager
def _answered(settings: CommonSettings) -> Iterator[None]:
    """Raise ``ConnectionError`` if the bucket of files does not answer."""
    try:
        yield
    except OSError as error:
        if settings.files_url and error.errno == errno.EIO:
            raise ConnectionError(str(error)) from error
        raise


async def adopt_files(settings: CommonSettings) -> Adopted:
    """Make the store the owner of the directory of files. Creates the store if it does not exist.

    Raises ``StoreUnusable``, also while another store's service uses the directory;
    ``ConnectionError`` or ``StoreFailed`` if the store does not answer; and ``OSError``.
    """
    files = open_files(settings)
    store = await _open(settings, before_new=lambda: None)
    try:
        return await Ownership(files, store).adopt()
    finally:
        await store.close()


async def _open(
    settings: CommonSettings, before_new: Callable[[], None] | None = None
) -> OpenStore:
    """Open the store; create a new one only if ``before_new`` returns.

    By default, ``before_new`` raises if another store has files there.
    """
    if before_new is None:
        before_new = partial(_check_unused, settings)
    if settings.store_kind == "sqlite":
        make_folder(settings.data_dir)
        if not settings.store_file.exists():
            before_new()
        return await SqliteStore.open(
            settings.store_file,
            policy=_within_disk(settings.store_policy, settings.data_dir),
            reserve_bytes=settings.store_reserve_bytes,
            check_s=settings.store_check_s,
        )
    # Imported here: an installation that keeps its store in SQLite needs no Redis client.
    from tuneserve_engine.store.redis.store import RedisStore

    return await RedisStore.open(
        settings.store,
        policy=settings.store_policy,
        durability_asserted=settings.store_durability_asserted,
        before_new=before_new,
    )


def _check_unused(settings: CommonSettings) -> None:
    files = open_files(settings)
    with _answered(settings):
        check_unused(files, settings.store_shown)


def _within_disk(policy: StorePolicy, folder: Path) -> StorePolicy:
    """Return the policy with ``server_bytes`` limited to a quarter of the free disk space.

    The limit is at least a sixteenth of the disk, even if the disk is full now: there may be room
    later, without a restart.
    """
    disk = shutil.disk_usage(folder)
    limit = max(disk.free // 4, disk.total // 16)
    if limit >= policy.server_bytes:
        return policy
    logger.warning(
        "waiting requests may take %d bytes instead of %d: a quarter of the free disk space of "
        "%s, or a sixteenth of the disk",
        limit,
        policy.server_bytes,
        folder,
    )
    return replace(policy, server_bytes=limit)


@asynccontextmanager
async def open_queue(settings: CommonSettings) -> AsyncIterator[Callable[[], Awaitable[Queue]]]:
    """Yield a function that connects a worker's queue; call it again when the connection was lost.

    The function waits for the store for ever: as long as the worker lives, so do its models.
    """
    if settings.store_kind == "sqlite":
        try:
            remote = RemoteQueue(settings.store_socket)
        except ValueError as error:  # a data directory with too long a name
            raise StoreUnusable(str(error)) from None
        files = new_files(settings)

        async def connect() -> Queue:
            await remote.connect(timeout_s=math.inf)
            # Only once connected: the API process leaves the mark.
            while True:
                try:
                    with _answered(settings):
                        await asyncio.to_thread(check_marked, files)
                    break
                except ConnectionError as error:
                    logger.warning("trying again: %s", error)
                    await asyncio.sleep(_RETRY_S)
            return remote

        logger.info("waiting for the API process at %s", settings.store_socket)
        try:
            yield connect
        finally:
            await remote.close()
    else:
        store = await open_store(settings)

        connected_s = -math.inf

        async def same() -> Queue:
            """Return the store, which reconnects by itself, at most once per ``_RETRY_S``.

            An immediate retry while Redis is away would only fail again.
            """
            nonlocal connected_s
            await asyncio.sleep(connected_s + _RETRY_S - time.monotonic())
            connected_s = time.monotonic()
            return store

        try:
            yield same
        finally:
            await store.close()
