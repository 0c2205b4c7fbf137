"""A TCP proxy between a client and the service that loses answers and repeats requests.

It parses HTTP/1.1 only as far as needed to find the end of a message.
"""

import asyncio
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import zstandard

from tuneserve_client.wire.proto import wire_pb2 as wire

DROPPED, REPEATED, DELAYED = 0.10, 0.10, 0.10
"""Fractions of all requests, polls included."""
DELAY_S, LATE_S = 0.1, 0.4


@dataclass(frozen=True)
class Message:
    """One HTTP request or response."""

    start: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.start.split(" ")[1]

    def encode(self, **headers: str) -> bytes:
        lines = [self.start, *(f"{k}: {v}" for k, v in (self.headers | headers).items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + self.body


class FaultProxy:
    """A proxy to ``port`` of this machine for the time of a ``with`` block.

    A request whose answer is lost has been delivered. A repeated one arrives twice, the second time
    perhaps long after its answer. The first chunk of a ``forward_backward`` arrives last.
    ``counts`` has the number of times for each fault. ``arrivals`` lists the ``(model, seq)`` of
    ``forward_backward`` requests in order of delivery. ``disagreements`` lists repeated requests
    whose two answers named different futures.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.arrivals: list[tuple[str, int]] = []
        self.disagreements: list[str] = []
        self._port = port
        self._finished: set[str] = set()
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, steps: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(steps, self._loop).result(timeout=30)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listener)

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, steps: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.disagreements.append(f"the proxy failed: {error!r}")

    # --- one connection -------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                answer, is_whole = await self._carry(request)
                writer.write(answer)
                await writer.drain()
                if not is_whole:
                    break
        except ConnectionError:
            pass  # the client hung up
        finally:
            writer.close()

    async def _carry(self, request: Message) -> tuple[bytes, bool]:
        """The client's answer, and whether it is whole. If not, the connection is cut after it."""
        self.counts[request.path] += 1
        if request.path.endswith("/finish"):
            self._finished.add(request.headers["x-api-key"])
        fate, kind = self._random.random(), self._random.randrange(2)
        dropped = fate < DROPPED
        repeated = DROPPED <= fate < DROPPED + REPEATED
        delayed = DROPPED + REPEATED <= fate < DROPPED + REPEATED + DELAYED
        if delayed or self._is_first_chunk(request):
            self.counts["delayed"] += 1
            await asyncio.sleep(self._random.uniform(0, DELAY_S))
        answer = await self._deliver(request)
        encoded = answer.encode()
        if dropped:
            self.counts["dropped"] += 1
            return encoded[: kind * len(encoded) // 2], False
        if repeated:
            self.counts["repeated"] += 1
            self._spawn(self._repeat(request, answer, kind * LATE_S))
        return encoded, True

    async def _repeat(self, request: Message, answer: Message, late_s: float) -> None:
        await asyncio.sleep(late_s)
        first, second = named(answer), named(await self._deliver(request))
        # This is too late for an answer: the client has said that it is finished.
        if first != second and request.headers["x-api-key"] not in self._finished:
            self.disagreements.append(f"{request.path}: {first}, then {second}")

    async def _deliver(self, request: Message, port: int | None = None) -> Message:
        """The service's answer, over a new connection."""
        if (key := _training_key(request)) is not None:
            self.arrivals.append(key)
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self._port)
        try:
            writer.write(request.encode(connection="close"))
            answer = await _read(reader)
            assert answer is not None, f"the service gave no answer to {request.start}"
        finally:
            writer.transport.abort()
        headers = {k: v for k, v in answer.headers.items() if k != "connection"}
        return Message(answer.start, headers, answer.body)

    def _is_first_chunk(self, request: Message) -> bool:
        """Whether a later chunk arrived before this one."""
        key = _training_key(request)
        return key is not None and any(
            model == key[0] and seq > key[1] for model, seq in self.arrivals
        )


def named(answer: Message) -> dict[str, Any]:
    """The ids in the answer to a submission or a creation. Empty for other answers."""
    if answer.headers.get("content-type") != "application/json":
        return {}
    body = json.loads(answer.body)
    ids = ("request_id", "session_id", "sampling_session_id", "sample_sequence_ids")
    return {key: body[key] for key in ids if key in body}


async def _read(reader: asyncio.StreamReader) -> Message | None:
    """The next message, or None at the end of the connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    start, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    assert "transfer-encoding" not in headers, f"{start}: chunked bodies are not read"
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Message(start, headers, body)


def _training_key(request: Message) -> tuple[str, int] | None:
    """The model and ``seq_id`` of a ``forward_backward``."""
    if not request.path.endswith("/forward_backward"):
        return None
    body = request.body
    if request.headers.get("content-encoding") == "zstd":
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    message = wire.ForwardBackwardRequest.FromString(body)
    return message.model_id, message.seq_id
