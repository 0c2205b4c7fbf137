"""The worker's half of the store over a Unix socket.

The API process runs ``serve``, and workers use ``RemoteQueue``.

A frame is its length in four bytes, big-endian, and that many bytes of MessagePack. A call is
``[id, method, [argument, …]]``; its answer is ``[id, True, result]`` or
``[id, False, [error, message]]``. Calls are answered as they finish, so a waiting ``take`` delays
no other call; ``[id, "cancel", []]`` ends a call without an answer. The socket file is the access
control: only its owner can connect.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, Outcome
from tuneserve_engine.process import unix_socket
from tuneserve_engine.store.base import Lease, LogEntry, Queue, RecoveryPoint, Renewal
from tuneserve_engine.store.errors import Fenced, StoreFailed, StoreUnusable

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 2**20
READ_AHEAD_BYTES = 2**20
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (Fenced, StoreFailed, StoreUnusable, ConnectionError, ValueError)
}


def _frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message of {len(body)} bytes does not fit the worker's socket, which allows "
            f"{MAX_FRAME_BYTES}; finish or take fewer jobs at once"
        )
    return len(body).to_bytes(4, "big") + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame's body.

    Raises ``EOFError`` at the end, and ``ValueError`` for a frame that is too large.
    """
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
    return await reader.readexactly(size)


# --- the API's side -----------------------------------------------------------------------------


class _Method:
    """A method of ``Queue``, with the types of its arguments and of its answer."""

    def __init__(self, name: str) -> None:
        hints = get_type_hints(getattr(Queue, name))
        self.result_type = hints.pop("return")
        self.arguments = tuple(hints)
        self.argument_types = tuple[tuple(hints.values())]  # type: ignore[misc]


_METHODS = {name: _Method(name) for name in Queue.__dict__ if not name.startswith("_")}


@asynccontextmanager
async def serve(queue: Queue, socket_path: Path | str) -> AsyncIterator[None]:
    """Answer the calls of ``RemoteQueue``s at ``socket_path`` while the context is open.

    Replaces the socket of a process that is gone; raises ``FileExistsError`` for a socket in use.
    """
    path = Path(socket_path)
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_Connection(queue, reader, writer).serve_calls())
        connections.add(task)
        task.add_done_callback(connections.discard)
        # Closed here too: a task that is cancelled before it starts would leave it open.
        task.add_done_callback(lambda _: writer.close())

    listener = unix_socket.listen(path)
    server = await asyncio.start_unix_server(connected, sock=listener, limit=READ_AHEAD_BYTES)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


class _Connection:
    """A worker's connection: it runs each call in a task, so that no call waits for another."""

    def __init__(
        self, queue: Queue, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._queue = queue
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def serve_calls(self) -> None:
        try:
            while True:
                frame = await _read_frame(self._reader)
                call_id, method, arguments = msgspec.msgpack.decode(
                    frame, type=tuple[int, str, msgspec.Raw]
                )
                if method == "cancel":
                    if call := self._calls.get(call_id):
                        call.cancel()
                    continue
                task = asyncio.create_task(self._answer(call_id, method, arguments))
                self._calls[call_id] = task
                # ``pop`` gets the task as its default.
                task.add_done_callback(partial(self._calls.pop, call_id))
        except (EOFError, OSError):
            pass  # the worker is gone; its unfinished jobs stay in the log
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("closing a worker's connection that sent an unreadable frame: %s", error)
        finally:
            self._writer.close()  # closed first: the server may stop and cancel this task
            calls = list(self._calls.values())
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _answer(self, call_id: int, method: str, arguments: msgspec.Raw) -> None:
        try:
            if method not in _METHODS:
                raise ValueError(f"unknown method {method}; run the worker's release here too")
            known = _METHODS[method]
            values = msgspec.msgpack.decode(arguments, type=known.argument_types)
            named = dict(zip(known.arguments, values, strict=True))
            frame = _frame([call_id, True, await getattr(self._queue, method)(**named)])
        except Exception as error:
            if not isinstance(
                error, (Fenced, StoreFailed, StoreUnusable, ConnectionError)
            ):  # these are part of the protocol
                logger.exception("the worker's call %s failed", method)
            frame = _frame([call_id, False, [_error_name(error), str(error)]])
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError:
            pass  # ``run`` handles the end of the connection


def _error_name(error: Exception) -> str:
    """Return the name under which the other side knows this error, or the error's own name."""
    known = (name for name, error_type in _ERRORS.items() if isinstance(error, error_type))
    return next(known, type(error).__name__)


# --- the worker's side --------------------------------------------------------------------------


class RemoteQueue:
    """The ``Queue`` served at ``socket_path``.

    When the connection is lost, every call raises ``ConnectionError`` until ``connect`` succeeds
    again. The worker then has to lease again.
    """

    def __init__(self, socket_path: Path | str) -> None:
        self._path = Path(socket_path)
        unix_socket.check_path(self._path)
        self._ids = count()
        self._pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Connect, and try again while no process serves the socket.

        Raises ``ConnectionError`` after ``timeout_s``.
        """
        await self.close()
        give_up_s = time.monotonic() + timeout_s
        delay_s = 0.02
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(
                    self._path, limit=READ_AHEAD_BYTES
                )
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() + delay_s > give_up_s:
                    raise ConnectionError(
                        f"nobody serves {self._path} ({error}; tried for {timeout_s:g} s); start "
                        "the API process on the same data directory"
                    ) from error
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 1.0)
        self._writer = writer
        self._listening = asyncio.create_task(self._listen(reader, writer))

    async def close(self) -> None:
        """End the connection; pending calls raise ``ConnectionError``."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._listening = None
        if self._writer is not None:  # the listening task was cancelled before it started
            self._writer.close()
            self._writer = None

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand answers to their callers until the connection ends."""
        reason = "it was closed here"
        try:
            while True:
                frame = await _read_frame(reader)
                call_id, ok, answer = msgspec.msgpack.decode(
                    frame, type=tuple[int, bool, msgspec.Raw]
                )
                future = self._pending.pop(call_id, None)
                if future is not None and not future.done():
                    if ok:
                        future.set_result(answer)
                    else:
                        future.set_exception(_error(answer))
        except EOFError:
            reason = "the API process closed it"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = str(error)
        finally:
            self._writer = None
            writer.close()
            pending, self._pending = self._pending, {}
            for future in pending.values():
                if not future.done():
                    future.set_exception(self._lost(reason))

    def _lost(self, reason: str) -> ConnectionError:
        return ConnectionError(f"no connection to the store at {self._path}: {reason}; reconnect")

    async def _call(self, method: str, *arguments: Any) -> Any:
        writer = self._writer
        if writer is None:
            raise self._lost("not connected")
        call_id = next(self._ids)
        frame = _frame([call_id, method, arguments])
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            writer.write(frame)
            answer = await future
        except asyncio.CancelledError:
            if not writer.is_closing():
                writer.write(_frame([call_id, "cancel", []]))
            raise
        finally:
            self._pending.pop(call_id, None)
        return msgspec.msgpack.decode(answer, type=_METHODS[method].result_type)

    async def lease(self, name: str, owner: str, info: BaseModelInfo, speed: float = 1.0) -> Lease:
        return cast(Lease, await self._call("lease", name, owner, info, speed))

    async def renew(self, epoch: int, metrics: dict[str, float] | None = None) -> Renewal:
        return cast(Renewal, await self._call("renew", epoch, metrics))

    async def take_jobs(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        return cast(list[Job], await self._call("take_jobs", epoch, after, max_jobs))

    async def note_running(self, epoch: int, request_ids: Sequence[str]) -> None:
        await self._call("note_running", epoch, request_ids)

    async def publish_tokens(self, parts: dict[str, list[EncodedTokenDelta]]) -> None:
        await self._call("publish_tokens", parts)

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        await self._call("finish", epoch, outcomes)

    async def recovery_points(self, epoch: int, model_id: str) -> list[RecoveryPoint]:
        return cast(list[RecoveryPoint], await self._call("recovery_points", epoch, model_id))

    async def read_log(self, epoch: int, model_id: str, *, start: int) -> list[LogEntry]:
        return cast(list[LogEntry], await self._call("read_log", epoch, model_id, start))

    async def save_point(self, epoch: int, point: RecoveryPoint) -> None:
        await self._call("save_point", epoch, point)

    async def unassign(self, epoch: int, model_id: str) -> None:
        await self._call("unassign", epoch, model_id)

    async def resign(self, epoch: int) -> None:
        await self._call("resign", epoch)

    async def killed(self, name: str) -> None:
        await self._call("killed", name)


def _error(answer: msgspec.Raw) -> Exception:
    name, message = msgspec.msgpack.decode(answer, type=tuple[str, str])
    if name in _ERRORS:
        return _ERRORS[name](message)
    return StoreFailed(f"{name}: {message}")
