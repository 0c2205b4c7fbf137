"""Uploads of adapters in PEFT's layout: received on disk, checked, and kept as checkpoint files."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastapi import Request

from tuneserve_engine.adapters.checkpoint_format import MEMBER
from tuneserve_engine.adapters.peft_config import MAX_CONFIG_BYTES, PeftConfig, read_config
from tuneserve_engine.adapters.peft_import import PeftAdapter, PeftWeights
from tuneserve_engine.core.adapter import AdapterConfig, BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.process.permissions import open_new
from tuneserve_engine.store.files import ABANDONED_S, FULL, new_file_id
from tuneserve_engine.store.files_base import Files
from tuneserve_server.access.limits import DiskGuard
from tuneserve_server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    DiskFull,
    StoreUnavailable,
    TooManyRequests,
    UnknownEncoding,
)
from tuneserve_server.http import body
from tuneserve_server.http.long_polls import LongPolls
from tuneserve_server.settings import ApiSettings
from tuneserve_server.transfer import tar
from tuneserve_server.transfer.files_away import told_away

_OF_TENANT = 2
_WRITING = 2  # each takes a CPU core
_THREADS = _WRITING + 6  # the other six receive: a piece is written in milliseconds
_PIECE_BYTES = 4 * 2**20  # written at once, in a thread: the event loop waits for no disk
LONGEST_S = ABANDONED_S - 600  # after ABANDONED_S, a folder is taken for a dead process's
_SIGN_OF_LIFE_S = ABANDONED_S / 6

T = TypeVar("T")
_STOPPING = "the server is stopping; nothing was changed; send the request again"


@dataclass(frozen=True)
class Upload:
    """An adapter on disk, as the client sent it."""

    config: PeftConfig
    weights: PeftWeights


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter that is stored as a checkpoint's file."""

    file_id: str
    size: int
    config: AdapterConfig


class PeftUploads:
    """The imports that this process runs."""

    def __init__(
        self, files: Files, disk: DiskGuard, polls: LongPolls, settings: ApiSettings
    ) -> None:
        self._files = files
        self._disk = disk
        self._polls = polls
        self._limit_bytes = settings.max_import_bytes
        self._timeout_s = settings.body_timeout_s
        self._of_tenant: Counter[str] = Counter()
        self._writing = asyncio.Semaphore(_WRITING)
        self._being_written = 0
        # A separate pool: other work in threads takes milliseconds, and must not wait for
        # gigabytes.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="imports")
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End every write at its next piece. Requests that still run end in errors."""
        self._stopping.set()
        self._threads.shutdown(wait=False)

    @asynccontextmanager
    async def received(self, request: Request, tenant: str) -> AsyncIterator[Upload]:
        """Receive the request's body and yield its adapter for as long as the block lasts.

        Raises ``UserError`` and ``Malformed`` for a faulty adapter, and the errors of receiving a
        body (``TooManyRequests``, ``BodyTooLarge``, ``BodyTooSlow``, ``DiskFull`` and others).
        """
        async with self._staged(request, tenant, "upload.tar", self._limit_bytes) as folder:
            living = asyncio.create_task(_live(folder))  # the upload may wait long
            try:
                yield await self._in_thread(lambda: _opened(folder / "upload.tar"))
            finally:
                living.cancel()

    async def store_part(self, request: Request, tenant: str, member: str) -> tuple[str, int]:
        """Receive the request's body as one file of an adapter, and store it unread.

        Returns the id and the size of the file, which no record names yet. Raises the errors of
        receiving a body.
        """
        limit = MAX_CONFIG_BYTES if member == tar.CONFIG else self._limit_bytes
        async with self._staged(request, tenant, member, limit) as folder:
            with _told():
                return await self._in_thread(lambda: self._publish(folder, member))

    @asynccontextmanager
    async def opened_parts(
        self, tenant: str, config_id: str, weights_id: str
    ) -> AsyncIterator[Upload]:
        """Yield the adapter of two stored parts.

        Raises ``UserError`` for a faulty configuration, ``TooManyRequests`` and
        ``StoreUnavailable``.
        """
        with self._counted(tenant):
            yield await self._in_thread(lambda: self._joined(config_id, weights_id))

    @asynccontextmanager
    async def _staged(
        self, request: Request, tenant: str, name: str, limit_bytes: int
    ) -> AsyncIterator[Path]:
        """Receive the request's body as a file, and yield its folder; the folder is deleted."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise UnknownEncoding("the adapter must be sent as it is, without a Content-Encoding")
        with self._counted(tenant), ExitStack() as folders:
            with _told():
                folder = folders.enter_context(self._files.staging())
            try:
                with _told():
                    await self._receive(request, folder / name, limit_bytes)
                yield folder
            finally:
                if self._stopping.is_set():
                    folders.close()
                else:  # deleting gigabytes takes a while
                    await self._in_thread(folders.close)

    async def checked(self, upload: Upload, info: BaseModelInfo, *, seed: int) -> PeftAdapter:
        """Return the adapter, checked against this base model. Raises ``UserError``."""
        return await self._in_thread(lambda: upload.weights.adapter(upload.config, info, seed))

    async def store_adapter(self, adapter: PeftAdapter) -> StoredAdapter:
        """Write the adapter as a checkpoint's file.

        Raises ``UserError``, and ``DiskFull`` before writing if the disk has no room for it beside
        the files that are being written.
        """
        async with self._writing:
            self._disk.check(self._being_written + adapter.size)
            self._being_written += adapter.size
            try:
                with _told():
                    return await self._in_thread(lambda: self._keep(adapter))
            finally:
                self._being_written -= adapter.size

    def _keep(self, adapter: PeftAdapter) -> StoredAdapter:
        file_id = new_file_id()
        with self._files.staging() as staged:
            adapter.write(staged / MEMBER, self._check_running)
            os.utime(staged)  # the age counts from now: a record names the file next
            with told_away():
                size = self._files.publish(staged, file_id)
            return StoredAdapter(file_id, size, adapter.config)

    def _publish(self, folder: Path, member: str) -> tuple[str, int]:
        with (folder / member).open("rb+") as file:
            os.fsync(file.fileno())
        os.utime(folder)
        file_id = new_file_id()
        with told_away():
            return file_id, self._files.publish(folder, file_id)

    def _joined(self, config_id: str, weights_id: str) -> Upload:
        with told_away():
            folders = [self._files.path(each) for each in (config_id, weights_id)]
        config, weights = (
            folder / name for folder, name in zip(folders, (tar.CONFIG, tar.WEIGHTS), strict=True)
        )
        try:
            return Upload(
                read_config(config.read_bytes()), PeftWeights(weights, 0, weights.stat().st_size)
            )
        except FileNotFoundError:
            raise UserError(
                "a file of this upload has just been replaced or has expired; finish it again, or "
                "start another upload"
            ) from None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        self._check_running()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise StoreUnavailable(_STOPPING)

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        if self._of_tenant[tenant] >= _OF_TENANT:
            raise TooManyRequests(
                f"{_OF_TENANT} adapters of yours are being imported, which is the limit; send this "
                "one again when one of them has ended",
                5,
            )
        self._of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    async def _receive(self, request: Request, archive: Path, limit_bytes: int) -> None:
        """Write the body to ``archive`` as it arrives.

        Raises ``BodyTooSlow``, ``BodyTooLarge``, ``DiskFull`` and ``StoreUnavailable``.
        """
        told = request.headers.get("content-length", "")
        expected = int(told) if told.isdecimal() else 0
        _check_size(expected, limit_bytes)
        self._disk.check(expected)
        size, waiting, pace = 0, bytearray(), body.BodyDeadline(self._timeout_s)
        with open_new(archive, "xb") as file:

            async def write() -> None:
                self._disk.check()
                data = bytes(waiting)
                waiting.clear()
                await self._in_thread(lambda: file.write(data))

            async def take(piece: bytes) -> None:
                nonlocal size
                size += len(piece)
                _check_size(size, limit_bytes)
                waiting.extend(piece)
                if len(waiting) >= _PIECE_BYTES:
                    with pace.stopped():  # the threads may be busy with gigabytes of others
                        await write()

            async def whole() -> bool:
                await _in_time(pace.receive(request, take))
                await write()
                return True

            is_whole = await self._polls.hold(whole(), 2 * LONGEST_S)
        if not is_whole:
            raise StoreUnavailable(_STOPPING)


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise BodyTooLarge(
            f"the adapter has {size} bytes or more; the limit is {limit_bytes} (max_import_bytes, "
            f"or {MAX_CONFIG_BYTES} for {tar.CONFIG}); save it in half precision, or ask the "
            "operator"
        )


async def _live(folder: Path) -> None:
    """Keep the folder's time fresh, which shows other processes that the folder is in use."""
    while True:
        with suppress(OSError):
            await asyncio.to_thread(os.utime, folder)
        await asyncio.sleep(_SIGN_OF_LIFE_S)


async def _in_time(receiving: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(LONGEST_S):
            await receiving
    except TimeoutError:
        raise BodyTooSlow(
            f"the adapter did not arrive within {LONGEST_S:g} s; send it over a faster connection, "
            "or in half precision"
        ) from None


def _opened(archive: Path) -> Upload:
    found = tar.members(archive)
    config, weights = found[tar.CONFIG], found[tar.WEIGHTS]
    if config.size > MAX_CONFIG_BYTES:
        raise UserError(
            f"{tar.CONFIG} has {config.size} bytes; the limit is {MAX_CONFIG_BYTES}; send the file "
            "that save_pretrained writes"
        )
    with archive.open("rb") as file:
        file.seek(config.start)
        read = read_config(file.read(config.size))
    return Upload(read, PeftWeights(archive, weights.start, weights.size))


@contextmanager
def _told() -> Iterator[None]:
    """Turn the ``OSError`` of a full disk into ``DiskFull``."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull(
            "the server's disk has no room for the adapter; nothing was changed; delete "
            "checkpoints, or ask the operator for space, and send it again"
        ) from error
