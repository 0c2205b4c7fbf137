"""Waiting calls, and the one connection on which Redis sends the messages that wake them."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.store.errors import ResultDropped, StoreFailed
from tuneserve_engine.store.pubsub import TokenBroker
from tuneserve_engine.store.redis import encoding as forms
from tuneserve_engine.store.redis.connection import Server
from tuneserve_engine.store.waiters import KeyedWaiters

logger = logging.getLogger(__name__)

RETRY_S = 0.1
_CHUNK = 100  # outcomes that are fetched at once
_PROGRESS = b"2 "  # prefix of a message with parts of running samples


class RedisNotifications:
    """The waiting calls of a process, woken by messages from Redis.

    Messages can be lost with the connection. After each reconnect, and after a long silence, all
    waiting calls look again.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: dict[str, set[asyncio.Future[Outcome | None]]] = {}
        self._ended: set[str] = set()  # requests that a call waits for, still to be fetched
        self._has_ended = asyncio.Event()
        self.completed = KeyedWaiters()
        self.streams = TokenBroker()
        self.placed = asyncio.Event()  # replaced after each use: the old event wakes its waiters
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self) -> None:
        """Start to listen, and wait until the subscription stands. Raises if it fails."""
        listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._listen(listening)),
            asyncio.create_task(self._fetch()),
        ]
        await listening

    async def stop(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in list(self._waiting.values()):
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        self.completed.close()
        self._wake_takes()

    def check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the store is closed")

    # --- waiting --------------------------------------------------------------------------------

    async def outcome(self, request_id: str, timeout_s: float) -> Outcome | None:
        """Return the outcome; see ``Store.wait``."""
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(request_id, set())
        waiting.add(future)
        try:
            (row,) = await self._server.run_script("outcomes", request_id)
            known = forms.read_outcome(request_id, row)
            if known is not None:
                return known
            if not self._closed:
                await asyncio.wait([future], timeout=timeout_s)
            return future.result() if future.done() else None
        finally:
            waiting.discard(future)
            if not waiting:
                del self._waiting[request_id]

    def _wake_takes(self) -> None:
        self.placed.set()
        self.placed = asyncio.Event()

    # --- hearing --------------------------------------------------------------------------------

    async def _listen(self, listening: asyncio.Future[None]) -> None:
        is_lost = False
        while True:
            try:
                async with self._server.listening() as messages:
                    if is_lost:
                        logger.warning("Redis is back")
                    is_lost = False
                    if not listening.done():
                        listening.set_result(None)
                    self._look_again()
                    async for message in messages:
                        self._hear(message)
            except (ConnectionError, StoreFailed) as error:
                if not listening.done():
                    listening.set_exception(error)
                    return
                if not is_lost:
                    logger.warning("lost Redis, trying again: %s", error)
                is_lost = True
            await asyncio.sleep(RETRY_S)

    def _look_again(self) -> None:
        self._fetch_soon(self._waiting)
        self.completed.wake_all()
        self._wake_takes()

    def _hear(self, message: bytes | None) -> None:
        if message is None:
            self._look_again()
            return
        if message.startswith(_PROGRESS):
            if self.streams.are_heard:  # every process gets the parts of every stream
                self.streams.publish(forms.read_parts(message.removeprefix(_PROGRESS)))
            return
        placed, *ended = message.decode().split(" ")
        if placed == "1":
            self._wake_takes()
        self.completed.wake(ended)  # the message names clients too
        self._fetch_soon(ended)

    def _fetch_soon(self, request_ids: Iterable[str]) -> None:
        self._ended.update(each for each in request_ids if each in self._waiting)
        if self._ended:
            self._has_ended.set()

    async def _fetch(self) -> None:
        """Fetch the outcomes that calls wait for, once for all waiting calls."""
        while True:
            await self._has_ended.wait()
            chunk = [each for each in self._ended if each in self._waiting][:_CHUNK]
            if not chunk:
                self._ended.clear()
                self._has_ended.clear()
                continue
            # Removed before the look: a request that ends during the look is added again.
            self._ended.difference_update(chunk)
            try:
                rows = await self._server.run_script("outcomes", *chunk)
            except (ConnectionError, StoreFailed):
                self._ended.update(chunk)
                await asyncio.sleep(RETRY_S)
                continue
            self._fetch_soon(chunk[len(rows) :])
            for request_id, row in zip(chunk, rows, strict=False):
                self._deliver(request_id, row)

    def _deliver(self, request_id: str, row: list[bytes]) -> None:
        outcome: Outcome | None = None
        with suppress(KeyError, ResultDropped):  # the caller learns it when asking again
            outcome = forms.read_outcome(request_id, row)
        if outcome is None:
            return
        for future in self._waiting.get(request_id, ()):
            if not future.done():
                future.set_result(outcome)
