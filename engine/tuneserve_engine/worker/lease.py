"""The worker's session with the store: a lease, and calls that survive lost connections."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.store.base import Queue, Renewal
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.telemetry.log_throttle import ThrottledLog

logger = logging.getLogger(__name__)
T = TypeVar("T")
Call = Callable[[Queue, int], Coroutine[Any, Any, T]]

RETRY_S = 1.0
_RECONNECT_S = 0.05


class LeaseLost(Exception):
    """The loss of the lease: the store no longer knows this worker, whose state is void."""


class StoreSession:
    """A lease under ``name``, kept by renewing it every ``renew_s``.

    ``connect`` returns a connected queue, and is called again whenever the connection is lost.
    ``renewed`` is called with the store's answer to each renewal; each renewal reports ``metrics``
    to the store. ``speed`` is how fast this worker trains, relative to others; 0: it only samples.
    """

    def __init__(  # noqa: PLR0913
        self,
        connect: Callable[[], Awaitable[Queue]],
        name: str,
        info: BaseModelInfo,
        renewed: Callable[[Renewal], None],
        renew_s: float,
        metrics: Callable[[], Mapping[str, float]] = dict,
        *,
        speed: float = 1.0,
    ) -> None:
        self._connect = connect
        self._name = name
        self._info = info
        self._renewed = renewed
        self._renew_s = renew_s
        self._metrics = metrics
        self._speed = speed
        self._owner = uuid.uuid4().hex
        self.epoch = 0
        """The epoch of the lease; 0 before the first lease."""
        self._queue: Queue | None = None
        self._connected = asyncio.Event()
        self._faults = ThrottledLog(logger)

    @property
    def is_up(self) -> bool:
        return self._connected.is_set()

    async def run_session(self, *traffic: Call[None]) -> None:
        """Connect, take the lease and run ``traffic`` beside the renewals; repeat when it fails.

        Never returns. Raises ``Fenced`` or ``LeaseLost`` if another worker has taken over.
        """
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
        if self.epoch:
            # Learn of a successor before leasing: leasing would take the name back from it.
            self._renewed(await queue.renew(self.epoch))
        lease = await queue.lease(self._name, self._owner, self._info, self._speed)
        if self.epoch and not lease.resumed:
            raise LeaseLost("another worker held the lease meanwhile; restart this one")
        self.epoch, self._queue = lease.epoch, queue
        self._connected.set()
        self._faults.forget()
        what = "" if self._speed else "samples of "
        logger.info("ready: serving %s%s as epoch %d", what, self._info.name, lease.epoch)
        await _until_one_fails(
            self._renew(queue, lease.epoch), *(call(queue, lease.epoch) for call in traffic)
        )

    async def _renew(self, queue: Queue, epoch: int) -> None:
        while True:
            self._renewed(await queue.renew(epoch, dict(self._metrics())))
            await asyncio.sleep(self._renew_s)

    async def call(self, call: Call[T]) -> T:
        """Return the result of ``call``, retried until the store has answered it."""
        while True:
            await self._connected.wait()
            assert self._queue is not None
            try:
                return await call(self._queue, self.epoch)
            except ConnectionError:
                # ``run_session`` notices the loss too, but perhaps later than this loop.
                await asyncio.sleep(_RECONNECT_S)
            except StoreFailed as error:
                self._failed(error)
                await asyncio.sleep(RETRY_S)

    def _failed(self, error: BaseException) -> None:
        self._faults.warn("failed", f"trying again, as the store refused: {error}")

    async def notify(self, call: Call[None]) -> None:
        """Call once if the store is connected; a call that fails is lost."""
        if self._queue is not None:
            try:
                await call(self._queue, self.epoch)
            except (ConnectionError, StoreFailed):
                pass


async def _until_one_fails(*calls: Coroutine[Any, Any, None]) -> None:
    """Run calls that never return until one of them raises, and raise that error.

    If several raise at once, an error that does not come from the store goes first. A task group
    does not do: before Python 3.13, a group that is cancelled while it fails reports the failure
    only, so the worker would reconnect and never end.
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
