"""The worker: take → schedule → run → finish, with the device on a thread of its own.

Taking, running and finishing overlap: while a batch of jobs runs, new jobs arrive and are decoded,
and earlier results are encoded and stored. A lost connection to the store loses nothing: the worker
reconnects as the same owner, continues from its cursor and offers unstored outcomes again. A
worker's death loses nothing either: the worker that takes over its models restores them
(``models.manager``).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Queue, Renewal
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.telemetry import logs
from tuneserve_engine.worker.accounting.usage_ledger import UsageLedger
from tuneserve_engine.worker.batch_log import BatchLog, BatchTimes
from tuneserve_engine.worker.device_loop import DeviceLoop
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.preparation import SamplePreparer
from tuneserve_engine.worker.execution.read_ahead import SnapshotReader
from tuneserve_engine.worker.lease import StoreSession
from tuneserve_engine.worker.models.manager import ModelManager
from tuneserve_engine.worker.models.recovery_points import PointPolicy
from tuneserve_engine.worker.observers import JobObserver
from tuneserve_engine.worker.pending import PendingJobs
from tuneserve_engine.worker.scheduling.scheduler import Scheduler
from tuneserve_engine.worker.services import WorkerServices
from tuneserve_engine.worker.token_publisher import TokenPublisher
from tuneserve_engine.worker.unstored import UnstoredOutcomes

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TAKE_JOBS = 256
_REPORT_S = 1.0
"""Seconds for which a sampling slice with the same requests as the last report is not reported."""
STOP_S = 25.0
_RESIGN_S = 2.0


def _one_thread() -> Executor:
    return ThreadPoolExecutor(max_workers=1)


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class WorkerPolicy:
    """The policy of a worker: its intervals, executors and hooks.

    ``device``, ``decoder``, ``host``, ``disk`` and ``reader`` make executors that run one call at a
    time each, so that encoding one client's result does not wait for decoding another client's long
    request, nor reading a snapshot for writing a recovery point.
    ``renewed`` is called after every renewal of the lease; each renewal reports ``metrics`` to the
    store. ``peak_flops`` is the device's peak in FLOP/s, 0 if unknown. ``observers`` hear of every
    job's events. A worker of ``speed`` 0 takes no models, others in proportion to their speeds.
    """

    points: PointPolicy = field(default_factory=PointPolicy)
    renew_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    device: Callable[[], Executor] = _one_thread
    decoder: Callable[[], Executor] = _one_thread
    host: Callable[[], Executor] = _one_thread
    disk: Callable[[], Executor] = _one_thread
    reader: Callable[[], Executor] = _one_thread
    renewed: Callable[[], None] = _nothing
    metrics: Callable[[], Mapping[str, float]] = dict
    peak_flops: float = 0.0
    observers: Sequence[JobObserver] = ()
    speed: float = 1.0


class Worker:
    """A worker that runs jobs until ``stop``.

    ``connect`` returns a connected queue, and is called again whenever the connection is lost.
    """

    def __init__(  # noqa: PLR0913
        self,
        connect: Callable[[], Awaitable[Queue]],
        executor: JobExecutor,
        info: BaseModelInfo,
        *,
        name: str,
        scheduler: Scheduler | None = None,
        policy: WorkerPolicy | None = None,
    ) -> None:
        policy = policy or WorkerPolicy()
        self.clock = policy.clock
        self.pending = PendingJobs()
        self.session = StoreSession(
            *(connect, name, info, self._renewed, policy.renew_s, self._metrics),
            speed=policy.speed,
        )
        self._ledger = UsageLedger(policy.clock)
        self._observers = policy.observers
        self._unstored = UnstoredOutcomes(self._ledger, policy.observers)
        self._device = policy.device()
        self._decoder = policy.decoder()
        self._host = policy.host()
        self._disk = policy.disk()
        self._reader = policy.reader()
        self._scheduler = scheduler or Scheduler()
        self._tasks = asyncio.TaskGroup()
        """The tasks beside everything else; an exception that one raises ends the worker."""
        self._publisher = TokenPublisher(self.session, self._tasks.create_task)
        services = WorkerServices(
            pending=self.pending,
            unstored=self._unstored,
            session=self.session,
            ledger=self._ledger,
            observers=policy.observers,
            clock=policy.clock,
            spawn=self._tasks.create_task,
            on_device=self.on_device,
            on_disk=self._on_disk,
            without_takes=self._without_takes,
            report_running=self._report_running,
            abandon=self._abandon,
            cancel_running=self._cancel_running,
            publish=self._publisher.publish,
        )
        self._device_loop = DeviceLoop(
            executor, self._scheduler, services, device=self._device, decoder=self._decoder
        )
        self._models = ModelManager(executor, policy.points, services)
        self._snapshots = SnapshotReader(
            executor.snapshots, self.pending, self._tasks.create_task, self._on_reader
        )
        self._samples = SamplePreparer(
            executor.pending_preparation, self._snapshots.route, self._tasks.create_task
        )
        self._on_renewed = policy.renewed
        self._backend_metrics = policy.metrics
        self._peak_flops = policy.peak_flops
        self._reported: tuple[list[str], float] = ([], 0.0)  # running requests, and when
        self._cursor = 0
        self._taking = asyncio.Lock()
        self._pause = asyncio.Event()
        self._pausing = 0
        self._stopping = asyncio.Event()
        self._has_resigned = False
        self._batches_total = 0
        self._batch_log = BatchLog()

    def stop(self) -> None:
        """Make ``run`` return after the running batch, with everything saved."""
        self._stopping.set()
        self._device_loop.stop()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run_until_stopped(self) -> None:
        """Run jobs until ``stop``, then return.

        A batch that is still running ``STOP_S`` after ``stop`` is abandoned. Raises ``Fenced`` or
        ``LeaseLost`` if another worker has taken over.
        """
        self._snapshots.start()
        try:
            async with self._tasks as tasks:
                device_loop = tasks.create_task(self._device_loop.run_batches())
                tasks.create_task(self._deliver())
                tasks.create_task(
                    self.session.run_session(self._take_jobs, self._unstored.store_forever)
                )
                tasks.create_task(self._models.points.save_forever())
                tasks.create_task(self._stop_after(device_loop))
        except BaseExceptionGroup as group:
            _, failures = group.split((_Stopped, Fenced) if self._has_resigned else _Stopped)
            if failures is not None:
                raise _cause(failures) from None
        finally:
            self._snapshots.stop()
            self._device_loop.abandon()
            self._device.shutdown(wait=False, cancel_futures=True)
            self._decoder.shutdown(wait=False, cancel_futures=True)
            self._host.shutdown(wait=False, cancel_futures=True)
            self._disk.shutdown(wait=False, cancel_futures=True)
            self._reader.shutdown(wait=False, cancel_futures=True)

    async def _stop_after(self, device_loop: "asyncio.Task[None]") -> None:
        await self._stopping.wait()
        try:
            async with asyncio.timeout(STOP_S):
                await device_loop
                if self.session.is_up:
                    await self._models.points.save_all()
                    await self._unstored.wait(None, None)
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
        await self.session.call(lambda queue, epoch: queue.resign(epoch))

    # --- the store's side -----------------------------------------------------------------------

    def _metrics(self) -> dict[str, float]:
        return {
            **self._backend_metrics(),
            "units_total": self._batches_total,
            "device_seconds_total": self._device_loop.device_s,
            "device_seconds_overhead_total": self._ledger.overhead_s,
            "host_seconds_total": self._device_loop.host_s,
            "sequences_unfinished": self._device_loop.sequences + self._snapshots.sequences,
            "model_flops_total": self._ledger.flops,
            "points_unreadable_total": self._models.points_unreadable,
            "device_peak_flops": self._peak_flops,
        }

    def _renewed(self, renewal: Renewal) -> None:
        self._on_renewed()
        self._scheduler.set_weights(renewal.weights)
        self._models.hand_over(renewal.leaving)
        self._cancel(renewal.cancelled)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        """Forget these requests, which have ended.

        Waiting jobs are not run and running samples are given up. Jobs on the device run to their
        end, but nothing waits for their outcomes: the store takes only the cost from them.
        """
        self.pending.drop_requests(request_ids)
        self._samples.drop_requests(request_ids)
        self._snapshots.drop_requests(request_ids)
        self._device_loop.cancel(request_ids)
        self._drop(request_ids)

    def _drop(self, request_ids: Sequence[str]) -> None:
        for observer in self._observers:
            observer.on_dropped(request_ids)
        self._unstored.drop(request_ids)

    async def _take_jobs(self, queue: Queue, epoch: int) -> None:
        while True:
            # Take unless paused: a pause ends the wait for jobs, and the next turn of the loop
            # waits until the lock is free again.
            async with self._taking:
                taking = asyncio.ensure_future(
                    queue.take_jobs(epoch, after=self._cursor, max_jobs=_TAKE_JOBS)
                )
                pause = asyncio.ensure_future(self._pause.wait())
                try:
                    await asyncio.wait((taking, pause), return_when=asyncio.FIRST_COMPLETED)
                    jobs = taking.result() if taking.done() else []
                finally:
                    taking.cancel()
                    pause.cancel()
                    await asyncio.gather(taking, pause, return_exceptions=True)

            self._ledger.on_arrived(jobs)
            for observer in self._observers:
                observer.on_arrived(jobs)
            for job in jobs:
                self._cursor = job.release
                if job.model_id is None:
                    self._samples.route(job)
                else:
                    self._models.route(job)
            self._device_loop.prefetch()
            failpoint("worker-took")

    async def _without_takes(self, call: Callable[[], Awaitable[None]]) -> None:
        self._pausing += 1
        self._pause.set()
        try:
            async with self._taking:
                await call()
        finally:
            self._pausing -= 1
            if self._pausing == 0:  # else a take could start before the next call and block it
                self._pause.clear()

    # --- the device's side ----------------------------------------------------------------------

    def _cancel_running(self, request_ids: Sequence[str]) -> None:
        """Report the cost of these cancelled samples; the store knows everything else already."""
        if request_ids:
            ended = [Outcome(each, rejection=refusals.cancelled()) for each in request_ids]
            self._unstored.offer(ended)

    def _abandon(self, request_ids: Sequence[str]) -> None:
        self._ledger.move_to_overhead(request_ids)
        self._drop(request_ids)
        if request_ids:  # clear the report, so that no request is blamed for a death from here on
            clear = self.session.notify(lambda queue, epoch: queue.note_running(epoch, []))
            self._tasks.create_task(clear)

    async def _report_running(self, batch: Sequence[Job]) -> None:
        """Report the running requests to the store, without waiting for its answer.

        A replayed job ended long ago, so it is reported as the request whose model is being
        restored.
        """
        ids = [
            self._models.restored_for(job)
            if job.request_id in self.pending.replays
            else job.request_id
            for job in batch
        ]
        now_s = self.clock()
        is_slice = batch[0].kind == JobKind.SAMPLE
        if is_slice and ids == self._reported[0] and now_s < self._reported[1] + _REPORT_S:
            return
        self._reported = ids, now_s
        report = self.session.notify(lambda queue, epoch: queue.note_running(epoch, ids))
        self._tasks.create_task(report)
        await asyncio.sleep(0)  # so that the report is sent before the batch starts

    # --- results --------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Make outcomes from the results of each batch in turn, while the device continues."""
        while True:
            batch = await self._device_loop.finished.get()
            started_s = self.clock()
            outcomes = batch.outcomes
            if outcomes is None:
                outcomes = await self._start(self._host, batch.result.outcomes)
            encoding_s = self.clock() - started_s

            self._batches_total += 1
            jobs = batch.result.jobs
            batch_id = f"{self.session.epoch}-{self._batches_total}"
            for observer in self._observers:
                observer.on_finished(jobs, batch_id)
            for job, outcome in zip(jobs, outcomes, strict=True):
                outcome = self._models.record_outcome(job, outcome)
                if outcome.rejection is not None:
                    _log_failure(job, outcome.rejection, batch_id)
                if job.request_id in self.pending.replays:
                    self.pending.finish_replay(job, outcome)
                else:
                    self._unstored.offer([outcome])

            failed = sum(outcome.rejection is not None for outcome in outcomes)
            times = BatchTimes(batch.seconds, batch.result.device_s, encoding_s)
            self._batch_log.record(batch_id, jobs, failed, times)
            self._device_loop.finished.task_done()

    # --- what the models need -------------------------------------------------------------------

    async def on_device(self, call: Callable[[], T]) -> T:
        return await self._device_loop.on_device(call)

    async def _on_disk(self, call: Callable[[], T]) -> T:
        return await self._start(self._disk, call)

    async def _on_reader(self, call: Callable[[], T]) -> T:
        return await self._start(self._reader, call)

    @staticmethod
    def _start(executor: Executor, call: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(executor, call)


def _log_failure(job: Job, rejection: Rejection, batch_id: str) -> None:
    """Log that a job failed, without the message, which may quote the tenant's request."""
    message = "%s of %s failed: %s error, request %s"
    extra = {**logs.job_fields(job), "batch_id": batch_id}
    name = job.model_id or job.scope
    logger.info(message, job.kind, name, rejection.category, job.request_id, extra=extra)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in nested groups that is not a group itself."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first


class _Stopped(Exception):
    """The signal that ends the other tasks of a worker that has stopped."""
