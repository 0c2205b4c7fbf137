"""The worker: take → schedule → run → finish, with the device in a thread of its own.

Taking, running and finishing overlap: while a unit runs, new jobs arrive and earlier results are
stored. A lost connection to the store loses nothing: the worker comes back as the same owner, goes
on from its cursor, and offers unstored outcomes again.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.jobs import Job, Outcome
from tuneserve_engine.operations import Operations
from tuneserve_engine.queue.base import Queue, StoreFailed
from tuneserve_engine.scheduler import next_unit

logger = logging.getLogger(__name__)

_TAKE_JOBS = 256
_STORE_RETRY_S = 1.0
_FINISH_BYTES = 64 * 2**20
"""Body bytes that one ``finish`` carries, unless one outcome is larger."""


class LeaseLost(Exception):
    """The store no longer knows this worker; what is in its memory is void."""


class Worker:
    """Runs jobs until cancelled.

    ``connect`` gives a connected queue, and is called again whenever the connection is lost.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Queue]],
        operations: Operations,
        info: BaseModelInfo,
    ) -> None:
        self._connect = connect
        self._operations = operations
        self._info = info
        self._owner = uuid.uuid4().hex
        self._epoch: int | None = None
        self._cursor = 0
        self._pending: dict[str, Job] = {}
        self._outcomes: list[Outcome] = []
        self._last_served: dict[str, int] = {}
        self._units = 0
        self._jobs_arrived = asyncio.Event()
        self._outcomes_ready = asyncio.Event()

    async def run(self) -> None:
        """Never returns. Raises ``Fenced`` or ``LeaseLost`` if another worker has taken over."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="device") as device:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._run_units(device))
                    tasks.create_task(self._stay_connected())
            except BaseExceptionGroup as group:
                raise _cause(group) from None

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._exchange(await self._connect())
            except* ConnectionError:
                logger.warning("lost the store; reconnecting")
            except* StoreFailed as group:
                logger.error("the store failed, trying again: %s", _cause(group))
                await asyncio.sleep(_STORE_RETRY_S)

    async def _exchange(self, queue: Queue) -> None:
        """Takes jobs and stores outcomes until the connection breaks."""
        if self._epoch is not None:
            # Learns of a new worker before leasing, which would take the lease back from it.
            await queue.finish(self._epoch, ())
        lease = await queue.lease(self._owner, self._info)
        if self._epoch is not None and not lease.resumed:
            raise LeaseLost("another worker held the lease meanwhile; restart this one")
        self._epoch = lease.epoch
        logger.info("ready: serving %s as epoch %d", self._info.name, lease.epoch)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take(queue, lease.epoch))
            tasks.create_task(self._finish(queue, lease.epoch))

    async def _take(self, queue: Queue, epoch: int) -> None:
        while True:
            jobs = await queue.take(epoch, after=self._cursor, max_jobs=_TAKE_JOBS)
            for job in jobs:
                self._pending[job.request_id] = job
                self._cursor = job.release
            self._jobs_arrived.set()

    async def _finish(self, queue: Queue, epoch: int) -> None:
        while True:
            await self._outcomes_ready.wait()
            batch = _first_of(self._outcomes)
            await queue.finish(epoch, batch)
            del self._outcomes[: len(batch)]
            if not self._outcomes:  # not before: after a lost connection they are offered again
                self._outcomes_ready.clear()

    async def _run_units(self, device: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            unit = next_unit(list(self._pending.values()), self._last_served)
            if not unit:
                self._jobs_arrived.clear()
                await self._jobs_arrived.wait()
                continue
            started_s = time.monotonic()
            outcomes = await loop.run_in_executor(device, self._operations.execute, unit)
            self._account(unit, outcomes, time.monotonic() - started_s)

    def _account(self, unit: list[Job], outcomes: list[Outcome], seconds: float) -> None:
        self._units += 1
        for job in unit:
            del self._pending[job.request_id]
            self._last_served[job.tenant] = self._units
        self._outcomes.extend(outcomes)
        self._outcomes_ready.set()
        logger.info(
            "unit %d: %d %s of %d tenants, %d failed, %.3f s",
            self._units,
            len(unit),
            unit[0].kind,
            len({job.tenant for job in unit}),
            sum(outcome.rejection is not None for outcome in outcomes),
            seconds,
        )


def _first_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The oldest outcomes, as many as one ``finish`` carries; at least one."""
    size = 0
    for count, outcome in enumerate(outcomes):
        size += len(outcome.body)
        if count and size > _FINISH_BYTES:
            return list(outcomes[:count])
    return list(outcomes)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group of groups that is one itself."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
