"""The reading of request bodies within a limit of memory.

A body counts against one part of the memory while it arrives. Once it has arrived, it counts
against another part, by its decompressed or parsed size. Only a body that has arrived waits for the
second part, and a body with a share of the second part never waits, so one body can always proceed.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import zstandard
from fastapi import Request

from tuneserve_client.wire.body import Request as Body
from tuneserve_engine.core.errors import UserError
from tuneserve_server.errors import Malformed, UnknownEncoding
from tuneserve_server.http import body
from tuneserve_server.http.body import BodyDeadline, BodyTruncated
from tuneserve_server.http.shares import Limit, Share, Shares
from tuneserve_server.http.turns import Turns
from tuneserve_server.settings import ApiSettings

T = TypeVar("T")
B = TypeVar("B", bound=Body)
K = TypeVar("K", bound=Body)

FREE_BYTES = 4096
"""The size up to which a body, such as a poll's, is not counted and never waits."""

FREE_TO_ARRIVE_BYTES = 64 * 1024
"""The bytes of a connection that uvicorn may buffer in any case."""

MAX_RATIO = 1000
FREE_OF_RATIO_BYTES = 8 * 2**20
"""The decompressed size up to which ``MAX_RATIO`` does not apply.

Clients send 5 MB at once, which may repeat the same few tokens; a larger body is real data, which
compresses to a tenth.
"""

_ONE_SHOT_WINDOW = 2**26
_STREAM_WINDOW = 2**23  # the largest that RFC 9659 lets clients use
_PIECE_BYTES = 2**18
_COUNTED_BYTES = 2**20
_THREADS = 2  # for decompression; each thread also takes a window for a frame without a size
_NICE = 10
_LARGE_BYTES = 16 * 1024
_PARSED_BYTES_S = 128 * 2**20  # an eighth of the parsing speed
_START_BYTES = 4096  # kept of a body that is too large: enough to read the request's key


@dataclass(frozen=True)
class BodyMemory:
    """The memory and threads for request bodies: while they arrive, and once they have arrived."""

    arriving: Shares
    held: Shares
    turns: Turns
    """The turns of large JSON bodies, so that other requests run between two of them.

    Parsing holds up other requests for some milliseconds a megabyte.
    """
    lookups: Turns
    """The turns of requests that are joined with recordings: one request joins at a time.

    The recordings may be far larger than the request, and their memory is taken only once.
    """
    threads: Executor
    """The threads that decompress bodies that are not small.

    Where threads have priorities, these have a low one, in favour of a worker on the same machine.
    They hold the interpreter's lock only briefly, because other threads wait for it.
    """

    def stop(self) -> None:
        self.threads.shutdown(wait=False)

    @property
    def used(self) -> int:
        """The bytes that bodies take now."""
        return self.arriving.held + self.held.held

    @classmethod
    def from_settings(cls, settings: ApiSettings) -> "BodyMemory":
        def part(what: str, share: float) -> Shares:
            total = Limit(int(settings.body_memory_bytes * share), "body_memory_bytes")
            own = Limit(int(settings.tenant_body_memory_bytes * share), "tenant_body_memory_bytes")
            return Shares(what, total=total, of_tenant=own)

        arriving, held = part("arriving bodies", 1 / 4), part("parsed bodies", 3 / 4)
        threads = ThreadPoolExecutor(_THREADS, "bodies", initializer=_yield_processor)
        return cls(arriving, held, Turns(), Turns(), threads)


@dataclass(frozen=True)
class SentJson:
    """A JSON body that has arrived, with the memory for its parsed form taken."""

    pieces: list[bytes]
    """The body as it arrived; the pieces are joined only in its turn, because that is slow too."""
    memory: BodyMemory
    tenant: str
    parsed_bytes: int

    async def parsed(self, body_type: type[B]) -> B:
        """Parse the body as ``body.parse`` does."""
        return await self.read(partial(body.parse, body_type))

    async def keyed(self, key_type: type[K], body_type: type[B]) -> tuple[K, B | UserError]:
        """Parse the body as ``body.parse_keyed`` does."""
        return await self.read(partial(body.parse_keyed, key_type=key_type, body_type=body_type))

    async def read(self, parse: Callable[[bytes], T]) -> T:
        """Return ``parse`` of the body; a large body is parsed in its turn and in a thread."""
        if sum(map(len, self.pieces)) <= _LARGE_BYTES:
            return parse(b"".join(self.pieces))
        async with self.memory.turns.wait_for_turn(self.tenant):
            await asyncio.sleep(self.parsed_bytes / _PARSED_BYTES_S)
            return await finished(asyncio.to_thread(lambda: parse(self._joined())))

    def _joined(self) -> bytes:
        """Return the joined body, and drop its pieces to keep only one copy."""
        raw = b"".join(self.pieces)
        self.pieces[:] = [raw]
        return raw


@dataclass(frozen=True)
class Incoming:
    """The body of one request; its memory is released when ``stack`` closes."""

    request: Request
    settings: ApiSettings
    memory: BodyMemory
    tenant: str
    stack: AsyncExitStack

    async def json(self, most: int | None = None) -> SentJson:
        """Return the JSON body of up to ``most`` bytes, with the memory for its parsed form.

        Raises ``BodyTruncated``, ``TooManyRequests``, ``BodyTooSlow``.
        """
        async with self._arrived(most) as pieces:
            size, parsed_bytes = sum(map(len, pieces)), 0
            if size > _LARGE_BYTES:
                parsed_bytes = await finished(asyncio.to_thread(body.parsed_bytes, pieces))
            elif size > FREE_BYTES:
                parsed_bytes = body.parsed_bytes(pieces)
            if parsed_bytes > FREE_BYTES:
                await self._hold(parsed_bytes)
            return SentJson(pieces, self.memory, self.tenant, parsed_bytes)

    async def message(self) -> bytes:
        """Return the body, decoded from its ``Content-Encoding``.

        Raises the errors of ``json``, and ``Malformed`` and ``UnknownEncoding``.
        """
        async with self._arrived() as pieces:
            encoding = self.request.headers.get("content-encoding", "identity")
            if encoding not in {"zstd", "identity"}:
                raise UnknownEncoding(
                    "the only Content-Encoding of this server is zstd; compress the body with "
                    "zstd, or send it uncompressed"
                )
            size = sum(map(len, pieces))
            if encoding == "identity" and size > FREE_BYTES:
                await self._hold(size)
            join = partial(b"".join, pieces)
            raw = join() if size <= _LARGE_BYTES else await self._in_thread(join)
            pieces.clear()  # only ``raw`` is counted, and it may wait below
            return raw if encoding == "identity" else await self._decompressed(raw)

    async def _hold(self, size: int) -> None:
        await self.stack.enter_async_context(self.memory.held.taken(self.tenant, size))

    @asynccontextmanager
    async def _arrived(self, most: int | None = None) -> AsyncIterator[list[bytes]]:
        """Yield the body as sent, in pieces; its share for arrival lasts as long as the block."""
        limit = min(self.settings.max_body_bytes, most or self.settings.max_body_bytes)
        told = self.request.headers.get("content-length", "")
        expected = int(told) if told.isdecimal() else None
        pace = BodyDeadline(self.settings.body_timeout_s)
        pieces: list[bytes] = []
        last = bytearray()
        arrived = 0
        share: Share | None = None

        async with AsyncExitStack() as arriving:

            async def keep(piece: bytes) -> None:
                nonlocal share, arrived
                last.extend(piece)
                arrived += len(piece)
                if len(last) >= _PIECE_BYTES:  # few pieces, however small they arrive
                    pieces.append(bytes(last))
                    last.clear()
                is_over = expected is not None and expected > limit and arrived >= _START_BYTES
                if is_over or arrived > limit:
                    raise BodyTruncated(
                        f"the request body is larger than {limit} bytes, the limit "
                        f"{'of this route' if most else 'of this server'}; send less at once",
                        bytes(pieces[0] if pieces else last)[:_START_BYTES],
                    )
                if share is None and arrived > FREE_TO_ARRIVE_BYTES:
                    with pace.stopped():
                        size = limit if expected is None else expected
                        taken = self.memory.arriving.taken(self.tenant, size)
                        share = await arriving.enter_async_context(taken)
                    share.yields = pace.give_way

            await pace.receive(self.request, keep)
            if share is not None:
                share.yields = None
            pieces.append(bytes(last))
            yield pieces

    async def _decompressed(self, raw: bytes) -> bytes:
        """Return the decompressed body; its size is counted before any of it exists.

        A frame that does not declare its size is decompressed twice, first only to learn the size.
        """
        limit = self.settings.max_decompressed_bytes
        size = _declared(raw)
        if size is None:
            size = await self._in_thread(partial(_counted, raw, limit))
        if (refusal := _refusal(raw, size, limit)) is not None:
            raise BodyTruncated(refusal, await self._in_thread(partial(_start, raw)))
        if size > FREE_BYTES:
            await self._hold(size)
        elif len(raw) <= _LARGE_BYTES:
            return _one_shot(raw, size)
        return await self._in_thread(partial(_one_shot, raw, size))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self.memory.threads, call)
        return await finished(running)


def _yield_processor() -> None:
    if sys.platform == "linux":  # elsewhere this sets the priority of the whole process
        with suppress(OSError):  # if this is forbidden, the threads keep their priority
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)


async def finished(work: Awaitable[T]) -> T:
    """Return the result of ``work``, which runs in a thread.

    A cancelled caller still waits for the thread's end, because the thread holds memory until then.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


# --- zstd ----------------------------------------------------------------------------------------

_BROKEN = "the request body is not one complete zstd frame; send a single frame"


def _declared(raw: bytes) -> int | None:
    """Return the decompressed size that the frame declares, or None. Raises ``Malformed``."""
    try:
        size = zstandard.frame_content_size(raw)
    except zstandard.ZstdError:
        raise Malformed(_BROKEN) from None
    return None if size < 0 else size


def _counted(raw: bytes, limit: int) -> int:
    """Return the decompressed size of a frame that declares none, or a size above ``limit``.

    None of the decompressed bytes are kept. Raises ``Malformed``.
    """
    decoder = zstandard.ZstdDecompressor(max_window_size=_STREAM_WINDOW)
    piece, size = bytearray(_COUNTED_BYTES), 0
    try:
        with decoder.stream_reader(raw) as reader:
            count = len(piece)
            while size <= limit and count == len(piece):  # the last read is shorter
                count = reader.readinto(piece)
                size += count
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None
    return size


def _refusal(raw: bytes, size: int, limit: int) -> str | None:
    """Return why a body of this decompressed size is refused, or None."""
    if size > limit:
        return (
            f"the request body is larger than {limit} bytes after decompression, the limit of this "
            "server; send less at once"
        )
    if size > max(FREE_OF_RATIO_BYTES, MAX_RATIO * len(raw)):
        return (
            f"the request body has {len(raw)} bytes and {size} or more after decompression; above "
            f"{FREE_OF_RATIO_BYTES} bytes the limit is {MAX_RATIO} times the size sent; send less "
            "at once"
        )
    return None


def _one_shot(raw: bytes, size: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ONE_SHOT_WINDOW)
    try:
        found = decoder.decompress(raw, max_output_size=max(size, 1), allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None
    if len(found) != size:  # it is only the first of several frames
        raise Malformed(_BROKEN)
    return found


def _start(raw: bytes) -> bytes:
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_ONE_SHOT_WINDOW)
        return decoder.stream_reader(raw).read(_START_BYTES)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None
