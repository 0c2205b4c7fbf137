"""The worker: take → schedule → run → finish, with the device in a thread of its own.

Taking, running and finishing overlap: while a unit runs, new jobs arrive and are decoded, and
earlier results are encoded and stored. A lost connection to the store loses nothing: the worker
comes back as the same owner, goes on from its cursor, and offers unstored outcomes again. Nor does
its death: whoever takes its models over brings them back (``residents``).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.ahead import Ahead
from tuneserve_engine.backlog import Backlog
from tuneserve_engine.jobs import Job, JobKind, Outcome
from tuneserve_engine.kill_points import kill_point
from tuneserve_engine.link import Link, cause
from tuneserve_engine.operations import Executed, Operations
from tuneserve_engine.queue.base import Fenced, Queue, Renewal
from tuneserve_engine.residents import PointPolicy, Residents
from tuneserve_engine.scheduler import Scheduler

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TAKE_JOBS = 256
_AHEAD_JOBS = 64
"""Jobs that are looked at before their turn: what two units take."""
_UNDELIVERED = 2
"""Units whose results may wait to be encoded; each holds its numbers in memory."""
_FINISH_BYTES = 64 * 2**20
"""Body bytes that one ``finish`` carries, unless one outcome is larger."""
STOP_S = 25.0
_RESIGN_S = 2.0


def _one_thread() -> Executor:
    return ThreadPoolExecutor(max_workers=1)


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class WorkerPolicy:
    """How a worker goes about it. ``device``, ``host`` and ``disk`` run one call at a time each;
    ``renewed`` is called after every renewal of the lease, which tells the store ``figures``."""

    points: PointPolicy = field(default_factory=PointPolicy)
    renew_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    device: Callable[[], Executor] = _one_thread
    host: Callable[[], Executor] = _one_thread
    disk: Callable[[], Executor] = _one_thread
    renewed: Callable[[], None] = _nothing
    figures: Callable[[], Mapping[str, float]] = dict


class Worker:
    """Runs jobs until ``stop``.

    ``connect`` gives a connected queue, and is called again whenever the connection is lost.
    """

    def __init__(  # noqa: PLR0913
        self,
        connect: Callable[[], Awaitable[Queue]],
        operations: Operations,
        info: BaseModelInfo,
        *,
        name: str,
        scheduler: Scheduler | None = None,
        policy: WorkerPolicy | None = None,
    ) -> None:
        policy = policy or WorkerPolicy()
        self.backlog = Backlog()
        self.clock = policy.clock
        self._operations = operations
        self._scheduler = scheduler or Scheduler()
        self._device = policy.device()
        self._host = policy.host()
        self._disk = policy.disk()
        self._decoded = Ahead(operations.decode, self._host)
        self._running: list[Job] = []  # the unit on the device
        self._executed: asyncio.Queue[_Unit] = asyncio.Queue(_UNDELIVERED)
        self._residents = Residents(operations, policy.points, self)
        self._on_renewed = policy.renewed
        self._of_backend = policy.figures
        self.link = Link(connect, name, info, self._renewed, policy.renew_s, self._figures)
        self._cursor = 0
        self._taking = asyncio.Lock()
        self._pause = asyncio.Event()
        self._pausing = 0
        self._unstored: dict[str, Job] = {}  # running, or with an outcome on its way
        self._outcomes: list[Outcome] = []
        self._offered = asyncio.Event()
        self._stored = asyncio.Event()  # replaced after each use: holders of the old one wake
        self._stopping = asyncio.Event()
        self._has_resigned = False
        self._tasks: asyncio.TaskGroup | None = None
        self._units = 0
        self._device_s = self._host_s = 0.0

    def stop(self) -> None:
        """Makes ``run`` return: after the running unit, with everything saved."""
        self._stopping.set()
        self.backlog.arrived.set()

    async def run(self) -> None:
        """Returns soon after ``stop``: a unit that is still running after ``STOP_S`` is abandoned.
        Raises ``Fenced`` or ``LeaseLost`` if another worker has taken over."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                units = self._tasks.create_task(self._run_units())
                self._tasks.create_task(self._deliver())
                self._tasks.create_task(self.link.keep(self._take, self._finish))
                self._tasks.create_task(self._residents.keep_points())
                self._tasks.create_task(self._stop_after(units))
        except BaseExceptionGroup as group:
            _, failures = group.split((_Stopped, Fenced) if self._has_resigned else _Stopped)
            if failures is not None:
                raise cause(failures) from None
        finally:
            self._device.shutdown(wait=False, cancel_futures=True)
            self._host.shutdown(wait=False, cancel_futures=True)
            self._disk.shutdown(wait=False, cancel_futures=True)

    async def _stop_after(self, units: "asyncio.Task[None]") -> None:
        await self._stopping.wait()
        try:
            async with asyncio.timeout(STOP_S):
                await units
                if self.link.is_up:
                    await self._residents.save_all()
                    await self.stored(None, None)
                    await self._resign()
        except TimeoutError:
            logger.warning("not everything was saved within %g s; the log has it", STOP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_RESIGN_S):
                    # Else this would count as a death, for which the running unit is suspect.
                    await self._resign()
        raise _Stopped

    async def _resign(self) -> None:
        self._has_resigned = True
        await self.link.ask(lambda queue, epoch: queue.resign(epoch))

    # --- the store's side -----------------------------------------------------------------------

    def _figures(self) -> dict[str, float]:
        return {
            **self._of_backend(),
            "units_total": self._units,
            "device_seconds_total": self._device_s,
            "host_seconds_total": self._host_s,
        }

    def _renewed(self, renewal: Renewal) -> None:
        self._on_renewed()
        self._residents.give_up(renewal.leaving)
        self.cancelled(renewal.cancelled)

    def cancelled(self, request_ids: Sequence[str]) -> None:
        """Forgets these requests, which have ended: what waits is not run, and nobody waits for the
        outcome of what runs, which the store ignores."""
        self.backlog.drop(request_ids)
        for request_id in request_ids:
            self._unstored.pop(request_id, None)
        self._wake_stored()

    async def _take(self, queue: Queue, epoch: int) -> None:
        while True:
            async with self._taking:
                jobs = await self._unless_paused(
                    queue.take(epoch, after=self._cursor, max_jobs=_TAKE_JOBS)
                )
            for job in jobs:
                self._cursor = job.release
                if job.model_id is None:
                    self.backlog.add([job])
                else:
                    self._residents.admit(job)
            self._look_ahead()
            kill_point("worker-took")

    async def _unless_paused(self, take: Awaitable[list[Job]]) -> list[Job]:
        taking, pause = asyncio.ensure_future(take), asyncio.ensure_future(self._pause.wait())
        try:
            await asyncio.wait((taking, pause), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else []
        finally:
            for task in (taking, pause):
                task.cancel()
            await asyncio.gather(taking, pause, return_exceptions=True)

    async def without_takes(self, call: Callable[[], Awaitable[None]]) -> None:
        self._pausing += 1
        self._pause.set()
        try:
            async with self._taking:
                await call()
        finally:
            self._pausing -= 1
            if self._pausing == 0:  # else a take could get before another, and wait for news
                self._pause.clear()

    async def _finish(self, queue: Queue, epoch: int) -> None:
        while True:
            await self._offered.wait()
            batch = _first_of(self._outcomes)
            kill_point("worker-before-finish")
            await queue.finish(epoch, batch)
            kill_point("worker-finished")
            del self._outcomes[: len(batch)]
            for outcome in batch:
                self._unstored.pop(outcome.request_id, None)
            self._wake_stored()
            if not self._outcomes:  # not before: after a lost connection they are offered again
                self._offered.clear()

    def _wake_stored(self) -> None:
        self._stored.set()
        self._stored = asyncio.Event()

    async def stored(self, model_id: str | None, position: int | None) -> None:
        """Returns when the model's requests before ``position`` (None: all; of all models) that
        have run have durable results."""
        while any(
            model_id in {None, job.model_id}
            and (position is None or job.position is None or job.position < position)
            for job in self._unstored.values()
        ):
            await self._stored.wait()

    def offer(self, outcomes: list[Outcome]) -> None:
        self._outcomes.extend(outcomes)
        self._offered.set()

    # --- the device's side ----------------------------------------------------------------------

    async def _run_units(self) -> None:
        idle_since_s = self.clock()  # of the device, although there is work
        while not self._stopping.is_set():
            # Not chosen before the unit ahead of it has ended: what comes meanwhile may take part.
            unit = self._scheduler.next_unit(self.backlog.in_order())
            if not unit:
                self.backlog.arrived.clear()
                if not self._stopping.is_set():
                    await self.backlog.arrived.wait()
                idle_since_s = self.clock()
                continue
            self.backlog.remove(unit)
            self._unstored |= {
                job.request_id: job for job in unit if not self.backlog.is_again(job)
            }
            await self._note(unit)
            kill_point("worker-before-unit")
            started_s = self.clock()
            self._host_s += started_s - idle_since_s
            executed, outcomes = await self._execute(unit)
            kill_point("worker-after-unit")
            idle_since_s = self.clock()
            seconds = idle_since_s - started_s
            self._scheduler.charge(unit, seconds)
            await self._executed.put(_Unit(unit, executed, outcomes, seconds))
        await self._executed.join()

    async def _execute(self, unit: list[Job]) -> tuple[Executed, list[Outcome] | None]:
        """The outcomes too, if nothing waits for the device: then another thread need not wake. Not
        those of a save, which waits for the disk: something may come meanwhile."""
        decoded = self._decoded.take(unit)

        def call() -> tuple[Executed, list[Outcome] | None]:
            executed = self._operations.execute(unit, decoded)
            is_idle = self.backlog.is_empty and unit[0].kind != JobKind.SAVE_WEIGHTS
            return executed, executed.outcomes() if is_idle else None

        running = self._start(self._device, call)
        self._running = unit
        self._look_ahead()
        try:
            return await running
        finally:
            self._running = []

    def _look_ahead(self) -> None:
        """Gets ready what runs next, while the device is busy: else it would wait for that."""
        if not self._running:
            return
        jobs = self._scheduler.upcoming(self.backlog.in_order(), self._running, _AHEAD_JOBS)
        self._operations.look_ahead(
            list(dict.fromkeys(job.model_id for job in jobs if job.model_id))
        )
        self._decoded.expect([job for job in jobs if job.kind == JobKind.FORWARD_BACKWARD])

    async def _note(self, unit: Sequence[Job]) -> None:
        """Tells the store what runs now, without waiting for it to have heard. What runs again has
        ended long ago: for it stands the request that it is needed for."""
        ids = [
            self._residents.waiting(job) if self.backlog.is_again(job) else job.request_id
            for job in unit
        ]
        self.spawn(self.link.tell(lambda queue, epoch: queue.begin(epoch, ids)))
        await asyncio.sleep(0)  # it is on its way when the unit starts

    # --- results --------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Makes outcomes of what units gave, unit by unit, while the device goes on."""
        while True:
            unit = await self._executed.get()
            started_s = self.clock()
            outcomes = unit.outcomes
            if outcomes is None:
                outcomes = await self._start(self._host, unit.executed.outcomes)
            self._account(unit, outcomes, self.clock() - started_s)
            self._executed.task_done()

    def _account(self, unit: "_Unit", outcomes: list[Outcome], encoding_s: float) -> None:
        self._units += 1
        self._device_s += unit.executed.device_s
        self._host_s += max(unit.seconds - unit.executed.device_s, 0.0)
        for job, outcome in zip(unit.jobs, outcomes, strict=True):
            outcome = self._residents.done(job, outcome)
            if self.backlog.is_again(job):
                self.backlog.done_again(job, outcome)
            else:
                self.offer([outcome])
        logger.info(
            "unit %d: %d %s of %d tenants, %d failed, %.3f s; %.3f s of it on the device, then "
            "%.3f s for the results",
            self._units,
            len(unit.jobs),
            unit.jobs[0].kind,
            len({job.tenant for job in unit.jobs}),
            sum(outcome.rejection is not None for outcome in outcomes),
            unit.seconds,
            unit.executed.device_s,
            encoding_s,
        )

    # --- what the models need -------------------------------------------------------------------

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(task)

    async def on_device(self, call: Callable[[], T]) -> T:
        return await self._start(self._device, call)

    async def on_disk(self, call: Callable[[], T]) -> T:
        return await self._start(self._disk, call)

    @staticmethod
    def _start(executor: Executor, call: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(executor, call)


class _Unit(NamedTuple):
    """One that has run; ``seconds`` include what the device thread did beside it."""

    jobs: list[Job]
    executed: Executed
    outcomes: list[Outcome] | None  # None: they are still to be made
    seconds: float


class _Stopped(Exception):
    """Ends the other tasks of a worker that has stopped."""


def _first_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The oldest outcomes, as many as one ``finish`` carries; at least one."""
    size = 0
    for count, outcome in enumerate(outcomes):
        size += len(outcome.body)
        if count and size > _FINISH_BYTES:
            return list(outcomes[:count])
    return list(outcomes)
