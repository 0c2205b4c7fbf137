"""The worker: take → schedule → run → finish, with the device on a thread of its own.

Taking, running and finishing overlap: while a unit (a batch of jobs) runs, new jobs arrive and are
decoded, and earlier results are encoded and stored. A lost connection to the store loses nothing:
the worker reconnects as the same owner, continues from its cursor and offers unstored outcomes
again. A worker's death loses nothing either: the worker that takes over its models restores them
(``models.manager``).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, JobKind, Outcome, Rejection
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Queue, Renewal
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.telemetry import logs
from tuneserve_engine.worker.accounting.traces import NoTraces, Traces
from tuneserve_engine.worker.accounting.usage_ledger import UsageLedger
from tuneserve_engine.worker.batch_log import Took, UnitLog
from tuneserve_engine.worker.device_loop import DeviceLoop, FinishedBatch
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.outcomes import BatchResult
from tuneserve_engine.worker.lease import StoreSession
from tuneserve_engine.worker.models.manager import ModelManager, PointPolicy
from tuneserve_engine.worker.pending import PendingJobs
from tuneserve_engine.worker.scheduling.scheduler import Scheduler
from tuneserve_engine.worker.token_publisher import TokenPublisher

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TAKE_JOBS = 256
_NOTE_S = 1.0
"""Seconds for which a sampling slice with the same requests as the last report is not reported."""
_FINISH_BYTES = 64 * 2**20
"""The most body bytes that one ``finish`` carries, unless a single outcome is larger."""
STOP_S = 25.0
_RESIGN_S = 2.0


def _one_thread() -> Executor:
    return ThreadPoolExecutor(max_workers=1)


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class WorkerPolicy:
    """The policy of a worker: its intervals, executors and hooks.

    ``device``, ``decoder``, ``host`` and ``disk`` make executors that run one call at a time each,
    so that encoding one client's result does not wait for decoding another client's long request.
    ``renewed`` is called after every renewal of the lease; each renewal reports ``figures`` to the
    store. ``peak_flops`` is the device's peak in FLOP/s, 0 if unknown. ``traces`` records each
    request.
    """

    points: PointPolicy = field(default_factory=PointPolicy)
    renew_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    device: Callable[[], Executor] = _one_thread
    decoder: Callable[[], Executor] = _one_thread
    host: Callable[[], Executor] = _one_thread
    disk: Callable[[], Executor] = _one_thread
    renewed: Callable[[], None] = _nothing
    figures: Callable[[], Mapping[str, float]] = dict
    peak_flops: float = 0.0
    traces: Traces = field(default_factory=NoTraces)


class Worker:
    """A worker that runs jobs until ``stop``.

    ``connect`` returns a connected queue, and is called again whenever the connection is lost.
    """

    def __init__(  # noqa: PLR0913
        self,
        connect: Callable[[], Awaitable[Queue]],
        operations: JobExecutor,
        info: BaseModelInfo,
        *,
        name: str,
        scheduler: Scheduler | None = None,
        policy: WorkerPolicy | None = None,
    ) -> None:
        policy = policy or WorkerPolicy()
        self.backlog = PendingJobs()
        self.clock = policy.clock
        self._ledger = UsageLedger(policy.clock)
        self._operations = operations
        self._device = policy.device()
        self._decoder = policy.decoder()
        self._host = policy.host()
        self._disk = policy.disk()
        self._scheduler = scheduler or Scheduler()
        self._units = DeviceLoop(
            operations,
            self._scheduler,
            self,
            device=self._device,
            decoder=self._decoder,
        )
        self._noted: tuple[list[str], float] = ([], 0.0)  # the last report to the store, and when
        self._residents = ModelManager(operations, policy.points, self)
        self._on_renewed = policy.renewed
        self._of_backend = policy.figures
        self._peak_flops = policy.peak_flops
        self._traces = policy.traces
        self.link = StoreSession(connect, name, info, self._renewed, policy.renew_s, self._figures)
        self._live = TokenPublisher(self.link, self.spawn)
        self._cursor = 0
        self._taking = asyncio.Lock()
        self._pause = asyncio.Event()
        self._pausing = 0
        self._unstored: dict[str, Job] = {}  # jobs that run, or whose outcome is not stored yet
        self._outcomes: list[Outcome] = []
        self._offered = asyncio.Event()
        self._stored = asyncio.Event()  # replaced after each use, which wakes its waiters
        self._stopping = asyncio.Event()
        self._has_resigned = False
        self._tasks: asyncio.TaskGroup | None = None
        self._units_total = 0
        self._unit_log = UnitLog()

    def stop(self) -> None:
        """Make ``run`` return after the running batch, with everything saved."""
        self._stopping.set()
        self._units.stop()

    async def run(self) -> None:
        """Run jobs until ``stop``, then return.

        A batch that is still running ``STOP_S`` after ``stop`` is abandoned. Raises ``Fenced`` or
        ``LeaseLost`` if another worker has taken over.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                units = self._tasks.create_task(self._units.run())
                self._tasks.create_task(self._deliver())
                self._tasks.create_task(self.link.keep(self._take, self._finish))
                self._tasks.create_task(self._residents.keep_points())
                self._tasks.create_task(self._stop_after(units))
        except BaseExceptionGroup as group:
            _, failures = group.split((_Stopped, Fenced) if self._has_resigned else _Stopped)
            if failures is not None:
                raise _cause(failures) from None
        finally:
            self._units.abandon()
            self._device.shutdown(wait=False, cancel_futures=True)
            self._decoder.shutdown(wait=False, cancel_futures=True)
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
                    # Without this the stop counts as a death, and the running batch as its cause.
                    await self._resign()
        raise _Stopped

    async def _resign(self) -> None:
        self._has_resigned = True
        await self.link.ask(lambda queue, epoch: queue.resign(epoch))

    # --- the store's side -----------------------------------------------------------------------

    def _figures(self) -> dict[str, float]:
        return {
            **self._of_backend(),
            "units_total": self._units_total,
            "device_seconds_total": self._units.device_s,
            "device_seconds_overhead_total": self._ledger.overhead_s,
            "host_seconds_total": self._units.host_s,
            "model_flops_total": self._ledger.flops,
            "points_unreadable_total": self._residents.points_unreadable,
            "device_peak_flops": self._peak_flops,
        }

    def _renewed(self, renewal: Renewal) -> None:
        self._on_renewed()
        self._scheduler.reweigh(renewal.weights)
        self._residents.give_up(renewal.leaving)
        self.cancelled(renewal.cancelled)

    def cancelled(self, request_ids: Sequence[str]) -> None:
        """Forget these requests, which have ended.

        Waiting jobs are not run and running samples are given up. Jobs on the device run to their
        end, but nothing waits for their outcomes: the store takes only the cost from them.
        """
        self.backlog.drop(request_ids)
        self._units.cancel(request_ids)
        self._traces.dropped(request_ids)
        for request_id in request_ids:
            self._unstored.pop(request_id, None)
        self._wake_stored()

    async def _take(self, queue: Queue, epoch: int) -> None:
        while True:
            async with self._taking:
                jobs = await self._unless_paused(
                    queue.take(epoch, after=self._cursor, max_jobs=_TAKE_JOBS)
                )
            self._ledger.arrived(jobs)
            self._traces.arrived(jobs)
            for job in jobs:
                self._cursor = job.release
                if job.model_id is None:
                    self.backlog.add([job])
                else:
                    self._residents.admit(job)
            self._units.look_ahead()
            failpoint("worker-took")

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
            if self._pausing == 0:  # else a take could start before the next call and block it
                self._pause.clear()

    async def _finish(self, queue: Queue, epoch: int) -> None:
        while True:
            await self._offered.wait()
            batch = _first_of(self._outcomes)
            failpoint("worker-before-finish")
            await queue.finish(epoch, batch)
            failpoint("worker-finished")
            del self._outcomes[: len(batch)]
            self._traces.written(batch)
            for outcome in batch:
                self._unstored.pop(outcome.request_id, None)
            self._wake_stored()
            if not self._outcomes:  # not earlier: after a lost connection the rest is offered again
                self._offered.clear()

    def _wake_stored(self) -> None:
        self._stored.set()
        self._stored = asyncio.Event()

    async def stored(self, model_id: str | None, position: int | None) -> None:
        """Wait until all begun requests of the model before ``position`` have durable results.

        A ``model_id`` of None means every model, a ``position`` of None every request.
        """
        while any(
            model_id in {None, job.model_id}
            and (position is None or job.position is None or job.position < position)
            for job in self._unstored.values()
        ):
            await self._stored.wait()

    def offer(self, outcomes: list[Outcome]) -> None:
        self._outcomes.extend(self._ledger.closed(outcomes))
        self._offered.set()

    # --- the device's side ----------------------------------------------------------------------

    def began(self, jobs: Sequence[Job], others: int) -> None:
        new = {job.request_id: job for job in jobs if not self.backlog.is_again(job)}
        self._unstored |= new
        self._ledger.began(new.values(), others)
        self._traces.began(new)

    def ran(self, executed: BatchResult) -> None:
        self._ledger.ran(executed)
        self._traces.ran(executed)

    def left_off(self, request_ids: Sequence[str]) -> None:
        """Report the cost of these cancelled samples; the store knows everything else already."""
        if request_ids:
            self.offer([Outcome(each, rejection=refusals.cancelled()) for each in request_ids])

    def gave_up(self, request_ids: Sequence[str]) -> None:
        self._ledger.given_up(request_ids)
        self._traces.dropped(request_ids)
        for request_id in request_ids:
            self._unstored.pop(request_id, None)
        if request_ids:  # clear the report, so that no request is blamed for a death from here on
            self.spawn(self.link.tell(lambda queue, epoch: queue.begin(epoch, [])))

    def drew(self, parts: Mapping[str, Sequence[EncodedTokenDelta]]) -> None:
        self._live.tell(parts)

    async def note(self, unit: Sequence[Job]) -> None:
        """Report the running requests to the store, without waiting for its answer.

        A replayed job ended long ago, so it is reported as the request whose model is being
        restored.
        """
        ids = [
            self._residents.waiting(job) if self.backlog.is_again(job) else job.request_id
            for job in unit
        ]
        now_s = self.clock()
        is_slice = unit[0].kind == JobKind.SAMPLE
        if is_slice and ids == self._noted[0] and now_s < self._noted[1] + _NOTE_S:
            return
        self._noted = ids, now_s
        self.spawn(self.link.tell(lambda queue, epoch: queue.begin(epoch, ids)))
        await asyncio.sleep(0)  # so that the report is sent before the batch starts

    # --- results --------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Make outcomes from the results of each batch in turn, while the device continues."""
        while True:
            unit = await self._units.executed.get()
            started_s = self.clock()
            outcomes = unit.outcomes
            if outcomes is None:
                outcomes = await self._start(self._host, unit.executed.outcomes)
            self._account(unit, outcomes, self.clock() - started_s)
            self._units.executed.task_done()

    def _account(self, unit: FinishedBatch, outcomes: list[Outcome], encoding_s: float) -> None:
        self._units_total += 1
        jobs = unit.executed.jobs
        batch_id = f"{self.link.epoch}-{self._units_total}"
        self._traces.ended(jobs, batch_id)
        for job, outcome in zip(jobs, outcomes, strict=True):
            outcome = self._residents.done(job, outcome)
            if outcome.rejection is not None:
                _tell_failure(job, outcome.rejection, batch_id)
            if self.backlog.is_again(job):
                self.backlog.done_again(job, outcome)
            else:
                self.offer([outcome])
        failed = sum(outcome.rejection is not None for outcome in outcomes)
        took = Took(unit.seconds, unit.executed.device_s, encoding_s)
        self._unit_log.note(batch_id, jobs, failed, took)

    # --- what the models need -------------------------------------------------------------------

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(task)

    async def on_device(self, call: Callable[[], T]) -> T:
        return await self._units.on_device(call)

    async def on_disk(self, call: Callable[[], T]) -> T:
        return await self._start(self._disk, call)

    @staticmethod
    def _start(executor: Executor, call: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(executor, call)


def _tell_failure(job: Job, rejection: Rejection, batch_id: str) -> None:
    """Log that a job failed, without the message, which may quote the tenant's request."""
    message = "%s of %s failed: %s error, request %s"
    extra = {**logs.of(job), "batch_id": batch_id}
    name = job.model_id or job.scope
    logger.info(message, job.kind, name, rejection.category, job.request_id, extra=extra)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in nested groups that is not a group itself."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first


class _Stopped(Exception):
    """The signal that ends the other tasks of a worker that has stopped."""


def _first_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the oldest outcomes that one ``finish`` can carry; at least one."""
    size = 0
    for count, outcome in enumerate(outcomes):
        size += len(outcome.body) + len(outcome.recording)
        if count and size > _FINISH_BYTES:
            return list(outcomes[:count])
    return list(outcomes)
