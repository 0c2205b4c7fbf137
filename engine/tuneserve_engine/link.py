"""The worker's link to the store: a lease that outlives lost connections, and calls that do too."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.queue.base import Queue, Renewal, StoreFailed
from tuneserve_engine.repeats import Repeats

logger = logging.getLogger(__name__)
T = TypeVar("T")
Call = Callable[[Queue, int], Coroutine[Any, Any, T]]

RETRY_S = 1.0
_RECONNECT_S = 0.05


class LeaseLost(Exception):
    """The store no longer knows this worker; what is in its memory is void."""


class Link:
    """A lease under ``name``, kept by renewing it every ``renew_s``.

    ``connect`` gives a connected queue, and is called again whenever the connection is lost.
    ``renewed`` is told what the store answers to a renewal; ``figures`` are told to the store with
    every one.
    """

    def __init__(  # noqa: PLR0913
        self,
        connect: Callable[[], Awaitable[Queue]],
        name: str,
        info: BaseModelInfo,
        renewed: Callable[[Renewal], None],
        renew_s: float,
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._connect = connect
        self._name = name
        self._info = info
        self._renewed = renewed
        self._renew_s = renew_s
        self._figures = figures
        self._owner = uuid.uuid4().hex
        self._epoch: int | None = None
        self._queue: Queue | None = None
        self._connected = asyncio.Event()
        self._faults = Repeats(logger)

    @property
    def is_up(self) -> bool:
        return self._connected.is_set()

    @property
    def epoch(self) -> int:
        """Of the lease, 0 before there was one."""
        return self._epoch or 0

    async def keep(self, *traffic: Call[None]) -> None:
        """Connects, leases and runs ``traffic`` beside the renewing, again and again. Never
        returns. Raises ``Fenced`` or ``LeaseLost`` if another worker has taken over."""
        while True:
            try:
                await self._exchange(await self._connect(), traffic)
            except ConnectionError:
                self._faults.warn("lost", "lost the store; reconnecting")
                await asyncio.sleep(_RECONNECT_S)
            except StoreFailed as error:
                self._failed(error)
                await asyncio.sleep(RETRY_S)
            finally:
                self._queue = None
                self._connected.clear()

    async def _exchange(self, queue: Queue, traffic: tuple[Call[None], ...]) -> None:
        if self._epoch is not None:
            # Learns of a successor before leasing, which would take the name back from it.
            self._renewed(await queue.renew(self._epoch))
        lease = await queue.lease(self._name, self._owner, self._info)
        if self._epoch is not None and not lease.resumed:
            raise LeaseLost("another worker held the lease meanwhile; restart this one")
        self._epoch, self._queue = lease.epoch, queue
        self._connected.set()
        self._faults.forget()
        logger.info("ready: serving %s as epoch %d", self._info.name, lease.epoch)
        await _until_one_fails(
            self._renew(queue, lease.epoch), *(call(queue, lease.epoch) for call in traffic)
        )

    async def _renew(self, queue: Queue, epoch: int) -> None:
        while True:
            self._renewed(await queue.renew(epoch, dict(self._figures())))
            await asyncio.sleep(self._renew_s)

    async def ask(self, call: Call[T]) -> T:
        """What ``call`` gives, tried until the store has answered it."""
        while True:
            await self._connected.wait()
            assert self._queue is not None and self._epoch is not None
            try:
                return await call(self._queue, self._epoch)
            except ConnectionError:
                # ``keep`` notices too, but perhaps later than we are back here.
                await asyncio.sleep(_RECONNECT_S)
            except StoreFailed as error:
                self._failed(error)
                await asyncio.sleep(RETRY_S)

    def _failed(self, error: BaseException) -> None:
        self._faults.warn("failed", f"trying again, as the store refused: {error}")

    async def tell(self, call: Call[None]) -> None:
        """Calls once, if the store is there; what was not heard is lost."""
        if self._queue is not None and self._epoch is not None:
            try:
                await call(self._queue, self._epoch)
            except (ConnectionError, StoreFailed):
                pass


async def _until_one_fails(*calls: Coroutine[Any, Any, None]) -> None:
    """Runs calls that never return beside each other until one of them raises, and raises that;
    should several at once, rather what is no trouble with the store.

    Not a task group: before Python 3.13, one that is cancelled while it fails tells of the failure
    only. The worker would reconnect, and never end.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [end for end in ends if not isinstance(end, asyncio.CancelledError | None)]
    store = ConnectionError, StoreFailed
    raise next((each for each in failures if not isinstance(each, store)), failures[0])
