"""Request bodies on their way in, within the memory that they may take.

A body counts against one part of that memory while it arrives, and against another once it is
there, by what it becomes: decompressed, or parsed. Only a body that has arrived waits for the
second part, and none with a share of it waits, so that there is always one that goes on.
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
_PIECE_BYTES = 2**20
_LIKELY_RATIO = 8  # of a frame that does not say: so much is waited for, more only if it is free
_SLICE_BYTES = 32  # of four bytes zstd makes at most 128 KiB: a piece of these
_THREADS = 2  # that decompress
_NICE = 10
_LARGE_BYTES = 16 * 1024
_PARSED_BYTES_S = 256 * 2**20  # a quarter of what can be parsed
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
    on the same machine; without the interpreter's lock, so that no request waits for them."""

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

    raw: bytes
    memory: BodyMemory
    tenant: str

    async def parsed(self, body_type: type[B]) -> B:
        """As ``body.parse``."""
        return await self.read(partial(body.parse, body_type))

    async def keyed(self, key_type: type[K], body_type: type[B]) -> tuple[K, B | UserError]:
        """As ``body.parse_keyed``."""
        return await self.read(partial(body.parse_keyed, key_type=key_type, body_type=body_type))

    async def read(self, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of the body: in its turn, and in a thread, if it is large."""
        if len(self.raw) <= _LARGE_BYTES:
            return parse(self.raw)
        async with self.memory.turns.of(self.tenant):
            await asyncio.sleep(body.parsed_bytes(self.raw) / _PARSED_BYTES_S)
            return await finished(asyncio.to_thread(parse, self.raw))


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
        async with self._arrived(most) as raw:
            if len(raw) > FREE_BYTES:
                await self._hold(body.parsed_bytes(raw))
            return SentJson(raw, self.memory, self.tenant)

    async def message(self) -> bytes:
        """The body as it was before its ``Content-Encoding``. Raises the same, ``Malformed`` and
        ``UnknownEncoding``."""
        async with self._arrived() as raw:
            encoding = self.request.headers.get("content-encoding", "identity")
            if encoding == "zstd":
                return await self._decompressed(raw)
            if encoding != "identity":
                raise UnknownEncoding("the only Content-Encoding understood here is zstd")
            await self._hold(len(raw))
            return raw

    async def _hold(self, size: int) -> Share | None:
        if size <= FREE_BYTES:
            return None
        return await self.stack.enter_async_context(self.memory.held.taken(self.tenant, size))

    @asynccontextmanager
    async def _arrived(self, most: int | None = None) -> AsyncIterator[bytes]:
        """The body as sent; its share of what arrives lasts as long as the block."""
        limit = min(self.settings.max_body_bytes, most or self.settings.max_body_bytes)
        told = self.request.headers.get("content-length", "")
        expected = int(told) if told.isdecimal() else None
        pace = Pace(self.settings.body_timeout_s)
        found = bytearray()
        share: Share | None = None

        async with AsyncExitStack() as arriving:

            async def keep(piece: bytes) -> None:
                nonlocal share
                found.extend(piece)
                is_over = expected is not None and expected > limit and len(found) >= _START_BYTES
                if is_over or len(found) > limit:
                    raise Cut(
                        f"the request body is larger than {limit} bytes, the limit "
                        f"{'of this route' if most else 'of this server'}; send less at once",
                        bytes(found[:_START_BYTES]),
                    )
                if share is None and len(found) > FREE_TO_ARRIVE_BYTES:
                    with pace.stopped():
                        size = limit if expected is None else expected
                        taken = self.memory.arriving.taken(self.tenant, size)
                        share = await arriving.enter_async_context(taken)
                    share.yields = pace.give_way

            await body.receive(self.request, keep, pace)
            if share is not None:
                share.yields = None
            raw = bytes(found)
            found.clear()  # counted once, and it may wait
            yield raw

    async def _decompressed(self, raw: bytes) -> bytes:
        """Counted by the size that the frame declares, before there is any of it; without one, as
        it grows."""
        limit = self.settings.max_decompressed_bytes
        size = _declared(raw)
        if size is not None:
            if (refusal := _refusal(raw, size, limit)) is not None:
                raise Cut(refusal, _start(raw))
            if await self._hold(size) is None:
                return _one_shot(raw, size)
            return await self._in_thread(partial(_one_shot, raw, size))
        stream = _Stream(raw)
        share = await self._hold(stream.needs(min(_LIKELY_RATIO * len(raw), limit)))
        assert share is not None
        likely = share.size
        while not stream.is_over:
            share.resize(max(likely, stream.needs(min(len(stream.found) + _PIECE_BYTES, limit))))
            await self._in_thread(stream.go_on)
            if (refusal := _refusal(raw, len(stream.found), limit)) is not None:
                raise Cut(refusal, bytes(stream.found[:_START_BYTES]))
        message = bytes(stream.found)
        share.resize(len(message))
        return message

    async def _in_thread(self, call: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self.memory.threads, call)
        return await finished(running)


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


def _window(raw: bytes) -> int:
    return int(zstandard.get_frame_parameters(raw).window_size)


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
        return decoder.decompress(raw, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None


def _start(raw: bytes) -> bytes:
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_ONE_SHOT_WINDOW)
        return decoder.stream_reader(raw).read(_START_BYTES)
    except (zstandard.ZstdError, MemoryError):
        raise Malformed(_BROKEN) from None


class _Stream:
    """A frame that does not declare its size, decompressed a few megabytes at a time."""

    def __init__(self, raw: bytes) -> None:
        self.found = bytearray()
        self.is_over = False
        self._raw = memoryview(raw)
        self._at = 0
        self._window = min(_window(raw), _STREAM_WINDOW)
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_STREAM_WINDOW).decompressobj()

    def needs(self, size: int) -> int:
        """Memory for so many bytes: they are copied at the end, and a slice may become a piece."""
        return 2 * size + self._window + _PIECE_BYTES

    def go_on(self) -> None:
        """Raises ``Malformed``."""
        enough = len(self.found) + _PIECE_BYTES
        try:
            while len(self.found) < enough and not self._decoder.eof:
                if self._at >= len(self._raw):
                    raise Malformed(_BROKEN)
                piece = self._raw[self._at : self._at + _SLICE_BYTES]
                self.found += self._decoder.decompress(piece)
                self._at += len(piece)
        except (zstandard.ZstdError, MemoryError):
            raise Malformed(_BROKEN) from None
        self.is_over = self._decoder.eof
        if self.is_over and (self._decoder.unused_data or self._at < len(self._raw)):
            raise Malformed(_BROKEN)
