"""Request bodies on their way in, within the memory that they may take.

A body counts against one part of that memory while it arrives, and against another once it is
there, by what it becomes: decompressed, or parsed. Only a body that has arrived waits for the
second part, and none with a share of it waits, so that there is always one that goes on.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import zstandard
from fastapi import Request

from tuneserve_client.body import Request as Body
from tuneserve_engine.errors import UserError
from tuneserve_server import body
from tuneserve_server.body import Cut, Pace
from tuneserve_server.errors import Malformed, UnknownEncoding
from tuneserve_server.settings import ApiSettings
from tuneserve_server.shares import Limit, Share, Shares
from tuneserve_server.turns import Turns

T = TypeVar("T")
B = TypeVar("B", bound=Body)
K = TypeVar("K", bound=Body)

FREE_BYTES = 4096
"""Smaller bodies, as those of polls, count nothing and never wait."""

FREE_TO_ARRIVE_BYTES = 64 * 1024
"""What the server library holds of a connection anyhow."""

MAX_RATIO = 1000
FREE_OF_RATIO_BYTES = 8 * 2**20
"""Clients send 5 MB at once, which may be the same few tokens again and again; more than that is
real data, of which compression leaves a tenth."""

_ONE_SHOT_WINDOW = 2**26
_STREAM_WINDOW = 2**23  # the largest that RFC 9659 lets clients use
_PIECE_BYTES = 2**18
_COUNTED_BYTES = 2**20
_THREADS = 2  # that decompress; a frame that does not tell its size takes a window in each, too
_NICE = 10
_LARGE_BYTES = 16 * 1024
_PARSED_BYTES_S = 128 * 2**20  # an eighth of what can be parsed
_START_BYTES = 4096  # of a body that is too large: enough to read its key


@dataclass(frozen=True)
class BodyMemory:
    """What bodies may take of this process: while they arrive, and once they are there."""

    arriving: Shares
    held: Shares
    turns: Turns
    """Of large JSON bodies: parsing holds up other requests, some milliseconds a megabyte, which
    must come between."""
    lookups: Turns
    """Of requests that are joined with recordings, which may be far larger than the requests: what
    that takes is taken once."""
    threads: Executor
    """Decompress what is not small. Where threads have priorities they have a low one, for a worker
    on the same machine. They hold the interpreter's lock for moments only: whoever needs it would
    wait for them."""

    def stop(self) -> None:
        self.threads.shutdown(wait=False)

    @property
    def used(self) -> int:
        """Bytes that bodies take now."""
        return self.arriving.held + self.held.held

    @classmethod
    def of(cls, settings: ApiSettings) -> "BodyMemory":
        def part(what: str, share: float) -> Shares:
            total = Limit(int(settings.body_memory_bytes * share), "body_memory_bytes")
            own = Limit(int(settings.tenant_body_memory_bytes * share), "tenant_body_memory_bytes")
            return Shares(what, total=total, of_tenant=own)

        arriving, held = part("bodies that arrive", 1 / 4), part("bodies that are read", 3 / 4)
        threads = ThreadPoolExecutor(_THREADS, "bodies", initializer=_yield_processor)
        return cls(arriving, held, Turns(), Turns(), threads)


@dataclass(frozen=True)
class SentJson:
    """A JSON body that is here, and the memory for what becomes of it is taken."""

    pieces: list[bytes]
    """As they arrived: it is one body only when it is its turn, for that takes a while too."""
    memory: BodyMemory
    tenant: str
    parsed_bytes: int

    async def parsed(self, body_type: type[B]) -> B:
        """As ``body.parse``."""
        return await self.read(partial(body.parse, body_type))

    async def keyed(self, key_type: type[K], body_type: type[B]) -> tuple[K, B | UserError]:
        """As ``body.parse_keyed``."""
        return await self.read(partial(body.parse_keyed, key_type=key_type, body_type=body_type))

    async def read(self, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of the body: in its turn, and in a thread, if it is large."""
        if _size(self.pieces) <= _LARGE_BYTES:
            return parse(b"".join(self.pieces))
        async with self.memory.turns.of(self.tenant):
            await asyncio.sleep(self.parsed_bytes / _PARSED_BYTES_S)
            return await finished(asyncio.to_thread(lambda: parse(self._joined())))

    def _joined(self) -> bytes:
        """The body, of which there is no second copy then."""
        raw = b"".join(self.pieces)
        self.pieces[:] = [raw]
        return raw


@dataclass(frozen=True)
class Incoming:
    """The body of one request. What it takes is given back when ``stack`` is left."""

    request: Request
    settings: ApiSettings
    memory: BodyMemory
    tenant: str
    stack: AsyncExitStack

    async def json(self, most: int | None = None) -> SentJson:
        """The body as sent, of at most so many bytes, with room for what it is parsed to. Raises
        ``Cut``, ``Crowded``, ``BodyTooSlow``."""
        async with self._arrived(most) as pieces:
            parsed_bytes = 0
            if _size(pieces) > _LARGE_BYTES:
                parsed_bytes = await finished(asyncio.to_thread(body.parsed_bytes, pieces))
            elif _size(pieces) > FREE_BYTES:
                parsed_bytes = body.parsed_bytes(pieces)
            await self._hold(parsed_bytes)
            return SentJson(pieces, self.memory, self.tenant, parsed_bytes)

    async def message(self) -> bytes:
        """The body as it was before its ``Content-Encoding``. Raises the same, ``Malformed`` and
        ``UnknownEncoding``."""
        async with self._arrived() as pieces:
            encoding = self.request.headers.get("content-encoding", "identity")
            if encoding not in {"zstd", "identity"}:
                raise UnknownEncoding("the only Content-Encoding understood here is zstd")
            if encoding == "identity":
                await self._hold(_size(pieces))
            is_small = _size(pieces) <= _LARGE_BYTES
            join = partial(b"".join, pieces)
            raw = join() if is_small else await self._in_thread(join)
            pieces.clear()  # counted once, and it may wait
            return raw if encoding == "identity" else await self._decompressed(raw)

    async def _hold(self, size: int) -> None:
        if size > FREE_BYTES:
            await self.stack.enter_async_context(self.memory.held.taken(self.tenant, size))

    @asynccontextmanager
    async def _arrived(self, most: int | None = None) -> AsyncIterator[list[bytes]]:
        """The body as sent, in pieces; its share of what arrives lasts as long as the block."""
        limit = min(self.settings.max_body_bytes, most or self.settings.max_body_bytes)
        told = self.request.headers.get("content-length", "")
        expected = int(told) if told.isdecimal() else None
        pace = Pace(self.settings.body_timeout_s)
        pieces: list[bytes] = []
        last = bytearray()
        arrived = 0
        share: Share | None = None

        async with AsyncExitStack() as arriving:

            async def keep(piece: bytes) -> None:
                nonlocal share, arrived
                last.extend(piece)
                arrived += len(piece)
                if len(last) >= _PIECE_BYTES:  # there are few, however small they come
                    pieces.append(bytes(last))
                    last.clear()
                is_over = expected is not None and expected > limit and arrived >= _START_BYTES
                if is_over or arrived > limit:
                    raise Cut(
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

            await body.receive(self.request, keep, pace)
            if share is not None:
                share.yields = None
            pieces.append(bytes(last))
            yield pieces

    async def _decompressed(self, raw: bytes) -> bytes:
        """Counted by its size, before there is any of it. A frame that does not declare its size is
        decompressed twice, the first time only to learn that."""
        limit = self.settings.max_decompressed_bytes
        size = _declared(raw)
        if size is None:
            size = await self._in_thread(partial(_counted, raw, limit))
        if (refusal := _refusal(raw, size, limit)) is not None:
            raise Cut(refusal, await self._in_thread(partial(_start, raw)))
        await self._hold(size)
        if size <= FREE_BYTES and len(raw) <= _LARGE_BYTES:
            return _one_shot(raw, size)
        return await self._in_thread(partial(_one_shot, raw, size))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self.memory.threads, call)
        return await finished(running)


def _size(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


def _yield_processor() -> None:
    if sys.platform == "linux":  # elsewhere this is the priority of the process
        with suppress(OSError):  # forbidden where it runs: then they are as all others
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)


async def finished(work: Awaitable[T]) -> T:
    """What ``work`` gives, which a thread does. A cancelled caller still waits for its end: the
    thread has its memory until then."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


# --- zstd ----------------------------------------------------------------------------------------

_BROKEN = "the request body is not one complete zstd frame"


def _declared(raw: bytes) -> int | None:
    """Bytes that the frame will have, if it tells. Raises ``Malformed``."""
    try:
        size = zstandard.frame_content_size(raw)
    except zstandard.ZstdError:
        raise Malformed(_BROKEN) from None
    return None if size < 0 else size


def _counted(raw: bytes, limit: int) -> int:
    """Bytes that a frame which does not tell will have, or more than it may. Keeps none of them.
    Raises ``Malformed``."""
    decoder = zstandard.ZstdDecompressor(max_window_size=_STREAM_WINDOW)
    piece, size = bytearray(_COUNTED_BYTES), 0
    try:
        with decoder.stream_reader(raw) as reader:
            count = len(piece)
            while size <= limit and count == len(piece):  # a frame ends with less
                count = reader.readinto(piece)
                size += count
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None
    return size


def _refusal(raw: bytes, size: int, limit: int) -> str | None:
    """Why that much of a body is not taken."""
    if size > limit:
        return (
            f"the request body is larger than {limit} bytes after decompression, the limit of this "
            "server; send less at once"
        )
    if size > max(FREE_OF_RATIO_BYTES, MAX_RATIO * len(raw)):
        return (
            f"the request body has {len(raw)} bytes and {size} after decompression, or more; above "
            f"{FREE_OF_RATIO_BYTES} bytes this server takes up to {MAX_RATIO} for each byte sent; "
            "send less at once"
        )
    return None


def _one_shot(raw: bytes, size: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ONE_SHOT_WINDOW)
    try:
        found = decoder.decompress(raw, max_output_size=max(size, 1), allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None
    if len(found) != size:  # the first of several frames
        raise Malformed(_BROKEN)
    return found


def _start(raw: bytes) -> bytes:
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_ONE_SHOT_WINDOW)
        return decoder.stream_reader(raw).read(_START_BYTES)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None
