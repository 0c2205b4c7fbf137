"""The device loop: it runs the batches of jobs that the scheduler chooses.

Samples run in time slices. They, and batches of other tenants, also run between the micro-batches
of a training batch, and further batches run between theirs: the batches on the device are a stack.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tuneserve_engine.backend.base import DeviceFailed
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.worker.execution.decode_ahead import PayloadPrefetcher
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.outcomes import BatchResult
from tuneserve_engine.worker.scheduling.cost_model import sequences_of
from tuneserve_engine.worker.scheduling.runnable import Running, RunningSample
from tuneserve_engine.worker.scheduling.scheduler import BATCH_S, Scheduler
from tuneserve_engine.worker.services import WorkerServices

T = TypeVar("T")

_PREFETCHED_JOBS = 64
"""The number of jobs prepared before their turn: as many as two batches take."""
_UNDELIVERED = 2
"""The number of batches whose results may wait to be encoded; each holds its arrays in memory."""
_SAMPLING_S = 0.25
"""The length of a sampling slice in seconds, after which the scheduler chooses again. It is
``BATCH_S`` if other work waits or a client streams a sample."""
_ENDED_S = 0.5
"""The seconds within which the device's thread notices that the event loop has ended."""


class FinishedBatch(NamedTuple):
    """A batch that has run; ``seconds`` includes the host work of the device's thread."""

    result: BatchResult
    outcomes: list[Outcome] | None  # None: not made yet
    seconds: float


class DeviceLoop:
    """The loop that runs batches, on the event loop and on ``device``, a thread."""

    def __init__(
        self,
        executor: JobExecutor,
        scheduler: Scheduler,
        services: WorkerServices,
        *,
        device: Executor,
        decoder: Executor,
    ) -> None:
        self.finished: asyncio.Queue[FinishedBatch] = asyncio.Queue(_UNDELIVERED)
        self.device_s = self.host_s = 0.0
        """The seconds in which the device ran, and in which it waited although there was work."""
        self._executor = executor
        self._scheduler = scheduler
        self._services = services
        self._pending = services.pending
        self._clock = services.clock
        self._device = device
        self._decoded = PayloadPrefetcher(executor.decode_payload, decoder)
        self._slices: list[_TimeSlice] = []  # the stack: each runs inside the one before it
        self._calls: deque[_Call] = deque()  # for the device's thread, outside the batches
        self._sampling: dict[str, RunningSample] = {}
        self._on_device: Sequence[Job] = ()  # samples of the running slice
        self._cancelled: set[str] = set()  # the samples among them that end with the slice
        self._stopping = asyncio.Event()
        self._ended = threading.Event()

    @property
    def sequences(self) -> int:
        """The number of sequences that samples, waiting or running, have still to end."""
        waiting = [each for each in self._pending.in_order() if each.kind == JobKind.SAMPLE]
        begun = [each for each in self._on_device if each.request_id not in self._sampling]
        running = sum(each.sequences for each in self._sampling.values())
        return running + sum(map(sequences_of, [*waiting, *begun]))

    def stop(self) -> None:
        """Make ``run`` return after the running batch.

        Running samples are given up: a worker that starts them again draws the same tokens.
        """
        self._stopping.set()
        self._pending.arrived.set()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Stop the running samples of these requests, at the latest after the running slice."""
        on_device = {each.request_id for each in self._on_device} & set(request_ids)
        self._cancelled |= on_device
        waiting = self._sampling.keys() & set(request_ids) - on_device
        for request_id in request_ids:
            self._sampling.pop(request_id, None)
        self._services.cancel_running(sorted(waiting))

    async def on_device(self, call: Callable[[], T]) -> T:
        """Return the result of the call.

        The call runs on the device's thread, between two batches or two micro-batches.
        """
        queued = _Call(call, Future())
        self._calls.append(queued)
        asyncio.get_running_loop().run_in_executor(self._device, self._run_call)
        result: T = await asyncio.wrap_future(queued.result)
        return result

    def abandon(self) -> None:
        """Release the device's thread from waiting for the event loop, which ends."""
        self._ended.set()

    async def run_batches(self) -> None:
        """Run batches until ``stop``; return when all results have been taken."""
        idle_since_s = self._clock()
        while not self._stopping.is_set():
            # Choose only after the previous batch has ended: jobs that arrive meanwhile may join.
            samples = list(self._sampling.values())
            batch = self._scheduler.next_batch(self._pending.in_order(), samples)
            if not batch:
                self._pending.arrived.clear()
                if not self._stopping.is_set():
                    await self._pending.arrived.wait()
                idle_since_s = self._clock()
                continue
            await self._start_batch(batch)
            failpoint("worker-before-unit")
            slice_ = _TimeSlice(batch, self._decoded.pop(batch), self._clock())
            self.host_s += slice_.started_s - idle_since_s
            self._slices = [slice_]
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._device, self.run_batch, loop, slice_)
            self.prefetch()
            try:
                result, outcomes = await running
            finally:
                self._slices = []
            failpoint("worker-after-unit")
            idle_since_s = self._clock()
            await self._finish_batch(slice_, result, outcomes)
        self._services.abandon(list(self._sampling))
        await self.finished.join()

    def prefetch(self) -> None:
        """Prepare the next jobs while the device is busy, so that it need not wait for them."""
        if not self._slices:
            return
        running = self._slices[-1].batch
        jobs = self._scheduler.upcoming(self._pending.in_order(), running, _PREFETCHED_JOBS)
        self._executor.prefetch(list(dict.fromkeys(job.model_id for job in jobs if job.model_id)))
        self._decoded.prefetch([job for job in jobs if job.kind == JobKind.FORWARD_BACKWARD])

    async def _start_batch(self, batch: Sequence[Job]) -> None:
        new = [job for job in batch if job.request_id not in self._sampling]
        self._pending.remove_jobs(new)
        begun = [job for job in new if job.request_id not in self._pending.replays]
        self._services.unstored.jobs.update((job.request_id, job) for job in begun)
        self._services.ledger.on_started(begun, len(batch) - 1)
        for observer in self._services.observers:
            observer.on_started(begun, len(batch) - 1)
        self._on_device = batch if batch[0].kind == JobKind.SAMPLE else ()
        await self._services.report_running(batch)

    async def _finish_batch(
        self, slice_: "_TimeSlice", result: BatchResult, outcomes: list[Outcome] | None
    ) -> None:
        seconds = self._clock() - slice_.started_s - slice_.interrupted_s
        self.device_s += result.device_s
        self.host_s += max(seconds - result.device_s, 0.0)
        self._scheduler.charge(slice_.batch, seconds, result.work)
        self._services.ledger.on_ran(result)
        for observer in self._services.observers:
            observer.on_ran(result)
        if slice_.batch[0].kind == JobKind.SAMPLE:
            unfinished = result.remaining.keys() - self._cancelled
            jobs = {job.request_id: job for job in slice_.batch if job.request_id in unfinished}
            self._services.cancel_running(sorted(result.remaining.keys() & self._cancelled))
            self._on_device, self._cancelled = (), set()
            self._sampling = {
                name: RunningSample(job, result.remaining[name]) for name, job in jobs.items()
            }
            self._services.publish(result.new_tokens)
        if result.jobs:  # a slice in which no sample ended has nothing to deliver or wait for
            await self.finished.put(FinishedBatch(result, outcomes, seconds))

    # --- on the device's thread -----------------------------------------------------------------

    def run_batch(
        self, loop: asyncio.AbstractEventLoop, slice_: "_TimeSlice"
    ) -> tuple[BatchResult, list[Outcome] | None]:
        """Run a batch, and make its outcomes as well if no job waits for the device.

        Outcomes made on the device's thread save waking another thread. A save's outcome is never
        made there: it waits for the disk, and a job may arrive meanwhile. Neither are those of an
        interrupting batch.
        """
        batch = slice_.batch
        should_yield = partial(self._should_yield, slice_)
        interrupt = partial(self._run_between, loop, slice_)
        result = self._executor.execute_batch(batch, slice_.decoded, should_yield, interrupt)
        is_idle = self._pending.is_empty and batch[0].kind != JobKind.SAVE_WEIGHTS
        makes_outcomes = is_idle and not slice_.is_interrupting and not result.remaining
        return result, result.outcomes() if makes_outcomes else None

    def _run_call(self) -> None:
        """Run the oldest waiting call, unless it already ran between micro-batches."""
        if self._calls:
            self._calls.popleft().run_call()

    def _should_yield(self, slice_: "_TimeSlice") -> bool:
        is_awaited = (
            slice_.is_interrupting
            or not self._pending.is_empty
            or self._executor.has_streams
            or self._stopping.is_set()
        )
        seconds = self._clock() - slice_.started_s - slice_.interrupted_s
        return seconds >= (BATCH_S if is_awaited else _SAMPLING_S)

    def _run_between(self, loop: asyncio.AbstractEventLoop, slice_: "_TimeSlice") -> None:
        """Give the device to waiting calls, and to other batches as long as it is their turn."""
        if self._ended.is_set():
            return
        slice_.ran_s = self._clock() - slice_.started_s - slice_.interrupted_s
        for _ in range(len(self._calls)):  # only the calls that wait now
            self._run_call()
        try:
            while self._sampling or not self._pending.is_empty:
                other = self._call_loop(loop, self._start_interrupting())
                if other is None:
                    break
                result, _ = self.run_batch(loop, other)
                self._call_loop(loop, self._finish_interrupting(other, result))
        except DeviceFailed:
            raise
        except Exception as error:  # not the fault of the batch that is interrupted
            raise DeviceFailed(f"what ran between micro-batches failed: {error}") from error
        if slice_.is_interrupted:
            self._call_loop(loop, self._services.report_running(slice_.batch))
        slice_.interrupted_s = self._clock() - slice_.started_s - slice_.ran_s
        slice_.is_interrupted = False

    async def _start_interrupting(self) -> "_TimeSlice | None":
        """Start a batch inside the last one on the device; None if there is none to run."""
        if self._stopping.is_set():
            return None
        now_s = self._clock()
        running = [
            Running(each.batch, each.ran_s, now_s - each.started_s - each.ran_s)
            for each in self._slices
        ]
        pending, samples = self._pending.in_order(), list(self._sampling.values())
        batch = self._scheduler.interrupting_batch(running, pending, samples)
        if not batch:
            return None
        await self._start_batch(batch)
        self._slices[-1].is_interrupted = True
        slice_ = _TimeSlice(batch, self._decoded.pop(batch), self._clock(), is_interrupting=True)
        self._slices.append(slice_)
        return slice_

    async def _finish_interrupting(self, slice_: "_TimeSlice", result: BatchResult) -> None:
        self._slices.remove(slice_)
        await self._finish_batch(slice_, result, None)
        self.prefetch()

    def _call_loop(self, loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the event loop and return its result.

        Raises ``TimeoutError`` if the loop has been abandoned.
        """
        answer = asyncio.run_coroutine_threadsafe(call, loop)
        while True:
            try:
                return answer.result(_ENDED_S)
            except TimeoutError:
                if self._ended.is_set() or answer.done():
                    raise


@dataclass(eq=False)
class _TimeSlice:
    """A batch's time on the device, without the time of batches and calls that ran inside it.

    ``decoded`` has the decoded payloads of some of its jobs, by request id.
    """

    batch: list[Job]
    decoded: Mapping[str, "Future[Any]"]
    started_s: float
    is_interrupting: bool = False
    is_interrupted: bool = False  # by a batch, since it last resumed
    ran_s: float = 0.0  # its seconds on the device when it last paused
    interrupted_s: float = 0.0  # the other seconds from its start until it last resumed


class _Call(NamedTuple):
    """A call outside the batches, to run on the device's thread."""

    call: Callable[[], Any]
    result: "Future[Any]"

    def run_call(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.call())
        except BaseException as error:
            self.result.set_exception(error)
