"""Checkpoints as tar archives in PEFT's layout, made piece by piece while they are sent.

An export's files are sent as they are; other checkpoints are converted. Nothing is written to the
disk, and no model is created.
"""

import asyncio
import logging
import tarfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tuneserve_engine.adapters import export_files, peft_export
from tuneserve_engine.adapters.checkpoint_format import MEMBER
from tuneserve_engine.adapters.tensor_file import Damaged
from tuneserve_engine.core.errors import FileDamaged
from tuneserve_engine.store.files_base import Files
from tuneserve_server.errors import (
    CheckpointDamaged,
    StoreUnavailable,
    TooManyRequests,
    UnknownResource,
)
from tuneserve_server.transfer.files_away import told_away

logger = logging.getLogger(__name__)

NAME = "checkpoint.tar"
COMPLETE = "checkpoint_complete"
"""The name of an empty file, the last in the archive: an archive with it is complete."""
CONVERTED = (export_files.CONFIG, export_files.WEIGHTS)
"""The files in PEFT's layout that a checkpoint in our format is converted to."""
CONTENT_TYPE = "application/x-tar"
OF_TENANT = 4
MOST = 64
"""The most downloads at once (``OF_TENANT``: of one tenant); each holds one or two pieces."""

_THREADS = 2
_PIECE_S = 60.0  # for a piece of 1 MiB: slower clients would block others
_RETRY_S = 5
_GONE = "the file is gone: its checkpoint was deleted or has expired"

T = TypeVar("T")


@dataclass(frozen=True)
class _ArchiveFile:
    """One file of an archive; ``pieces`` can be read once."""

    name: str
    size: int
    pieces: Iterator[bytes]


@dataclass(frozen=True)
class Archive:
    """An archive as it is sent to a client; ``pieces`` can be read once."""

    size: int
    pieces: Iterator[bytes]


class Archives:
    """The archives that this process sends."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._of_tenant: Counter[str] = Counter()
        # A separate pool: other work in threads takes milliseconds, and must not wait for
        # gigabytes.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="archives")
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End every read at its next piece. Requests that still run end in errors."""
        self._stopping.set()
        self._threads.shutdown(wait=False)

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Count a download during the block. Raises ``TooManyRequests`` if there are too many."""
        own, all_of_them = self._of_tenant[tenant], self._of_tenant.total()
        if own >= OF_TENANT or all_of_them >= MOST:
            limit = f"{own} of yours (limit {OF_TENANT}) and {all_of_them} in all (limit {MOST})"
            raise TooManyRequests(
                f"too many downloads are running: {limit}; try again when one has ended",
                _RETRY_S,
            )
        self._of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    async def opened(self, file_id: str, name: str) -> Archive:
        """Return the archive of the checkpoint ``name``, after checking all of its bytes.

        Raises ``UnknownResource`` and ``CheckpointDamaged``.
        """
        return await self._in_thread(lambda: self._opened(file_id, name))

    async def converted(self, file_id: str, member: str) -> Archive:
        """Return one file of a checkpoint in our format, in PEFT's layout and without a tar around
        it, after checking all of the checkpoint's bytes.

        Raises ``UnknownResource`` and ``CheckpointDamaged``.
        """
        return await self._in_thread(lambda: self._converted(file_id, member))

    async def located(self, file_id: str) -> tuple[Path, list[str]]:
        """Return a local directory with the file's members, and their names.

        It takes as long as a copy from the bucket, if the files are in one. There are no names if
        the file is gone. Raises ``StoreUnavailable`` if the bucket does not answer.
        """
        return await self._in_thread(lambda: self._located(file_id))

    async def members(self, file_id: str) -> list[str]:
        """Return the names of the file's members. Raises ``StoreUnavailable``."""
        with told_away():
            return await self._in_thread(lambda: self._files.members(file_id))

    async def sent(self, archive: Archive) -> AsyncIterator[bytes]:
        """Yield the archive's pieces; each is made when the one before is on its way."""
        while (piece := await self._in_thread(lambda: next(archive.pieces, None))) is not None:
            yield piece

    def _located(self, file_id: str) -> tuple[Path, list[str]]:
        with told_away():
            return self._files.path(file_id), self._files.members(file_id)

    def _opened(self, file_id: str, name: str) -> Archive:
        folder, members = self._located(file_id)
        if MEMBER in members:
            files = self._converted_files(folder, name)
        else:
            files = self._stored_files(folder, name, members)
        if not files:
            raise UnknownResource(_GONE)
        return _archive([*files, _ArchiveFile(COMPLETE, 0, iter(()))])

    def _converted(self, file_id: str, member: str) -> Archive:
        folder, members = self._located(file_id)
        if MEMBER not in members:
            raise UnknownResource(_GONE)
        for each in self._converted_files(folder, "of this link"):
            if each.name == member:
                return Archive(each.size, each.pieces)
        raise UnknownResource(_GONE)

    def _converted_files(self, folder: Path, name: str) -> list[_ArchiveFile]:
        try:
            found = peft_export.converted(folder, name, self._check_running)
        except FileNotFoundError:
            raise UnknownResource(_GONE) from None
        except FileDamaged as error:
            raise CheckpointDamaged(str(error)) from error
        return [
            _ArchiveFile(export_files.CONFIG, len(found.config), iter([found.config])),
            _ArchiveFile(export_files.WEIGHTS, found.weights_size, found.weights()),
        ]

    def _stored_files(self, folder: Path, name: str, members: list[str]) -> list[_ArchiveFile]:
        member = ""
        try:
            for member in reversed(members):  # weights first: they hold the config's checksum
                self._check_running()
                export_files.check_member(folder, member)
            return [_stored_file(folder / member) for member in members]
        except FileNotFoundError:
            raise UnknownResource(_GONE) from None
        except Damaged as error:
            raise CheckpointDamaged(
                f"the checkpoint {name} is damaged, in its file {folder.name}/{member}: {error}; "
                "export the model or its checkpoint again, or ask the operator to restore that "
                "file from a backup"
            ) from error

    async def _in_thread(self, call: Callable[[], T]) -> T:
        self._check_running()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise StoreUnavailable("the server is stopping; send the request again")


class ArchiveResponse(StreamingResponse):
    """A response that ends if its client takes longer than a minute for a piece."""

    media_type = CONTENT_TYPE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(_PIECE_S):
                await send(message)

        try:
            await super().__call__(scope, receive, in_time)
        except TimeoutError:
            logger.info("a download was cut: its client took more than %d s for a piece", _PIECE_S)


def _archive(files: list[_ArchiveFile]) -> Archive:
    """Return a tar archive of the files, in their order."""
    blocks = 2 + sum(1 + -(-each.size // tarfile.BLOCKSIZE) for each in files)

    def pieces() -> Iterator[bytes]:
        for each in files:
            info = tarfile.TarInfo(each.name)
            info.size = each.size
            yield info.tobuf(tarfile.GNU_FORMAT)  # takes any size
            yield from each.pieces
            if padding := -each.size % tarfile.BLOCKSIZE:
                yield bytes(padding)
        yield bytes(2 * tarfile.BLOCKSIZE)

    return Archive(blocks * tarfile.BLOCKSIZE, pieces())


def _stored_file(path: Path) -> _ArchiveFile:
    return _ArchiveFile(path.name, path.stat().st_size, _content(path))


def _content(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(peft_export.PIECE_BYTES):
            yield piece
