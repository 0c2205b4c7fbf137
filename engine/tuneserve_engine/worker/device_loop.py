"""The device loop: it runs the units (batches of jobs) that the scheduler chooses.

Samples run in time slices. They, and batches of other tenants, also run between the micro-batches
of a training batch, and further batches run between theirs: the batches on the device are a stack.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from tuneserve_engine.backend.base import DeviceFailed
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, JobKind, Outcome
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.worker.execution.decode_ahead import PayloadPrefetcher
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.execution.outcomes import BatchResult
from tuneserve_engine.worker.pending import PendingJobs
from tuneserve_engine.worker.scheduling.runnable import Running, RunningSample
from tuneserve_engine.worker.scheduling.scheduler import UNIT_S, Scheduler

T = TypeVar("T")

_AHEAD_JOBS = 64
"""The number of jobs prepared before their turn: as many as two batches take."""
_UNDELIVERED = 2
"""The number of batches whose results may wait to be encoded; each holds its arrays in memory."""
_SAMPLING_S = 0.25
"""The length of a sampling slice in seconds, after which the scheduler chooses again. It is
``UNIT_S`` if other work waits or a client streams a sample."""
_ENDED_S = 0.5
"""The seconds within which the device's thread notices that the event loop has ended."""


class FinishedBatch(NamedTuple):
    """A batch that has run; ``seconds`` includes the host work of the device's thread."""

    executed: BatchResult
    outcomes: list[Outcome] | None  # None: not made yet
    seconds: float


class DeviceLoopHost(Protocol):
    """The worker, as the device loop sees it."""

    backlog: PendingJobs

    def clock(self) -> float: ...

    async def note(self, unit: Sequence[Job]) -> None:
        """Report to the store what runs now."""
        ...

    def began(self, jobs: Sequence[Job], others: int) -> None:
        """Note that these jobs left the backlog for a batch, with ``others`` jobs beside each."""
        ...

    def ran(self, executed: BatchResult) -> None:
        """Account for a batch that had the device."""
        ...

    def gave_up(self, request_ids: Sequence[str]) -> None:
        """Note that these requests have begun, and that this worker does not end them."""
        ...

    def left_off(self, request_ids: Sequence[str]) -> None:
        """Note that these requests had begun when they were cancelled, and go no further."""
        ...

    def drew(self, parts: Mapping[str, Sequence[EncodedTokenDelta]]) -> None:
        """Publish drawn tokens to the clients that stream them, without waiting for that."""
        ...


class DeviceLoop:
    """The loop that runs batches, on the event loop and on ``device``, a thread."""

    def __init__(
        self,
        operations: JobExecutor,
        scheduler: Scheduler,
        host: DeviceLoopHost,
        *,
        device: Executor,
        decoder: Executor,
    ) -> None:
        self.executed: asyncio.Queue[FinishedBatch] = asyncio.Queue(_UNDELIVERED)
        self.device_s = self.host_s = 0.0
        """The seconds in which the device ran, and in which it waited although there was work."""
        self._operations = operations
        self._scheduler = scheduler
        self._host = host
        self._backlog = host.backlog
        self._clock = host.clock
        self._device = device
        self._decoded = PayloadPrefetcher(operations.decode, decoder)
        self._turns: list[_TimeSlice] = []  # the stack: each runs inside the one before it
        self._calls: deque[_Call] = deque()  # for the device's thread, outside the batches
        self._sampling: dict[str, RunningSample] = {}
        self._on_device: Sequence[Job] = ()  # samples of the running slice
        self._cancelled: set[str] = set()  # the samples among them that end with the slice
        self._stopping = asyncio.Event()
        self._ended = threading.Event()

    def stop(self) -> None:
        """Make ``run`` return after the running batch.

        Running samples are given up: a worker that starts them again draws the same tokens.
        """
        self._stopping.set()
        self._backlog.arrived.set()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Stop the running samples of these requests, at the latest after the running slice."""
        on_device = {each.request_id for each in self._on_device} & set(request_ids)
        self._cancelled |= on_device
        waiting = self._sampling.keys() & set(request_ids) - on_device
        for request_id in request_ids:
            self._sampling.pop(request_id, None)
        self._host.left_off(sorted(waiting))

    async def on_device(self, call: Callable[[], T]) -> T:
        """Return the result of the call.

        The call runs on the device's thread, between two batches or two micro-batches.
        """
        asked = _Call(call, Future())
        self._calls.append(asked)
        asyncio.get_running_loop().run_in_executor(self._device, self._run_call)
        result: T = await asyncio.wrap_future(asked.result)
        return result

    def abandon(self) -> None:
        """Release the device's thread from waiting for the event loop, which ends."""
        self._ended.set()

    async def run(self) -> None:
        """Run batches until ``stop``; return when all results have been taken."""
        idle_since_s = self._clock()
        while not self._stopping.is_set():
            # Choose only after the previous batch has ended: jobs that arrive meanwhile may join.
            under_way = list(self._sampling.values())
            unit = self._scheduler.next_unit(self._backlog.in_order(), under_way)
            if not unit:
                self._backlog.arrived.clear()
                if not self._stopping.is_set():
                    await self._backlog.arrived.wait()
                idle_since_s = self._clock()
                continue
            await self._begin(unit)
            failpoint("worker-before-unit")
            turn = _TimeSlice(unit, self._clock)
            self.host_s += turn.started_s - idle_since_s
            executed, outcomes = await self._execute(turn)
            failpoint("worker-after-unit")
            idle_since_s = self._clock()
            await self._ended_turn(turn, executed, outcomes)
        self._host.gave_up(list(self._sampling))
        await self.executed.join()

    def look_ahead(self) -> None:
        """Prepare the next jobs while the device is busy, so that it need not wait for them."""
        if not self._turns:
            return
        running = self._turns[-1].unit
        jobs = self._scheduler.upcoming(self._backlog.in_order(), running, _AHEAD_JOBS)
        self._operations.look_ahead(
            list(dict.fromkeys(job.model_id for job in jobs if job.model_id))
        )
        self._decoded.expect([job for job in jobs if job.kind == JobKind.FORWARD_BACKWARD])

    async def _begin(self, unit: Sequence[Job]) -> None:
        new = [job for job in unit if job.request_id not in self._sampling]
        self._backlog.remove(new)
        self._host.began(new, len(unit) - 1)
        self._on_device = unit if unit[0].kind == JobKind.SAMPLE else ()
        await self._host.note(unit)

    async def _ended_turn(
        self, turn: "_TimeSlice", executed: BatchResult, outcomes: list[Outcome] | None
    ) -> None:
        seconds = turn.seconds
        self.device_s += executed.device_s
        self.host_s += max(seconds - executed.device_s, 0.0)
        self._scheduler.charge(turn.unit, seconds, executed.work)
        self._host.ran(executed)
        if turn.unit[0].kind == JobKind.SAMPLE:
            left = executed.left.keys() - self._cancelled
            jobs = {job.request_id: job for job in turn.unit if job.request_id in left}
            self._host.left_off(sorted(executed.left.keys() & self._cancelled))
            self._on_device, self._cancelled = (), set()
            self._sampling = {
                name: RunningSample(job, executed.left[name]) for name, job in jobs.items()
            }
            self._host.drew(executed.parts)
        if executed.jobs:  # a slice in which no sample ended has nothing to deliver or wait for
            await self.executed.put(FinishedBatch(executed, outcomes, seconds))

    async def _execute(self, turn: "_TimeSlice") -> tuple[BatchResult, list[Outcome] | None]:
        """Run a batch, and make its outcomes as well if no job waits for the device.

        Outcomes made on the device's thread save waking another thread. A save's outcome is never
        made there: it waits for the disk, and a job may arrive meanwhile.
        """
        unit, decoded = turn.unit, self._decoded.take(turn.unit)
        loop = asyncio.get_running_loop()

        def call() -> tuple[BatchResult, list[Outcome] | None]:
            executed = self._run_on_device(loop, turn, decoded)
            is_idle = self._backlog.is_empty and unit[0].kind != JobKind.SAVE_WEIGHTS
            return executed, executed.outcomes() if is_idle and not executed.left else None

        self._turns = [turn]
        running = loop.run_in_executor(self._device, call)
        self.look_ahead()
        try:
            return await running
        finally:
            self._turns = []

    # --- on the device's thread -----------------------------------------------------------------

    def _run_call(self) -> None:
        """Run the oldest waiting call, unless it already ran between micro-batches."""
        if self._calls:
            self._calls.popleft().run()

    def _run_on_device(
        self, loop: asyncio.AbstractEventLoop, turn: "_TimeSlice", decoded: Mapping[str, Any]
    ) -> BatchResult:
        is_over, between = partial(self._is_over, turn), partial(self._between, loop, turn)
        return self._operations.execute(turn.unit, decoded, is_over, between)

    def _is_over(self, turn: "_TimeSlice") -> bool:
        is_awaited = (
            turn.comes_between
            or not self._backlog.is_empty
            or self._operations.have_listeners
            or self._stopping.is_set()
        )
        return turn.seconds >= (UNIT_S if is_awaited else _SAMPLING_S)

    def _between(self, loop: asyncio.AbstractEventLoop, turn: "_TimeSlice") -> None:
        """Give the device to waiting calls, and to other batches as long as it is their turn."""
        if self._ended.is_set():
            return
        turn.pause()
        for _ in range(len(self._calls)):  # only the calls that wait now
            self._run_call()
        try:
            while self._sampling or not self._backlog.is_empty:
                if not self._run_one_between(loop):
                    break
        except DeviceFailed:
            raise
        except Exception as error:  # not the fault of the batch that is interrupted
            raise DeviceFailed(f"what ran between micro-batches failed: {error}") from error
        if turn.is_interrupted:
            self._ask(loop, self._host.note(turn.unit))
        turn.resume()

    def _run_one_between(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Run a batch inside the last one on the device; return False if there is none to run."""
        begun = self._ask(loop, self._begin_between())
        if begun is None:
            return False
        turn, decoded = begun
        executed = self._run_on_device(loop, turn, decoded)
        self._ask(loop, self._end_between(turn, executed))
        return True

    async def _begin_between(self) -> "tuple[_TimeSlice, Mapping[str, Any]] | None":
        if self._stopping.is_set():
            return None
        running = [Running(turn.unit, turn.seconds, turn.interrupted_s) for turn in self._turns]
        pending, under_way = self._backlog.in_order(), list(self._sampling.values())
        unit = self._scheduler.between(running, pending, under_way)
        if not unit:
            return None
        await self._begin(unit)
        self._turns[-1].is_interrupted = True
        turn = _TimeSlice(unit, self._clock, comes_between=True)
        decoded = self._decoded.take(unit)
        self._turns.append(turn)
        return turn, decoded

    async def _end_between(self, turn: "_TimeSlice", executed: BatchResult) -> None:
        self._turns.remove(turn)
        await self._ended_turn(turn, executed, None)
        self.look_ahead()

    def _ask(self, loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
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


class _TimeSlice:
    """A batch's time on the device, without the time of batches that ran inside it."""

    def __init__(
        self, unit: list[Job], clock: Callable[[], float], *, comes_between: bool = False
    ) -> None:
        self.unit = unit
        self.comes_between = comes_between
        self.is_interrupted = False  # since it last resumed
        self.started_s = clock()
        self._paused_s: float | None = None
        self._interrupted_s = 0.0
        self._clock = clock

    def pause(self) -> None:
        self._paused_s = self._clock()

    def resume(self) -> None:
        assert self._paused_s is not None
        self._interrupted_s += self._clock() - self._paused_s
        self._paused_s, self.is_interrupted = None, False

    @property
    def seconds(self) -> float:
        now_s = self._clock() if self._paused_s is None else self._paused_s
        return now_s - self.started_s - self._interrupted_s

    @property
    def interrupted_s(self) -> float:
        """The seconds since the start in which other batches or calls had the device."""
        return self._clock() - self.started_s - self.seconds


class _Call(NamedTuple):
    """A call outside the batches, to run on the device's thread."""

    call: Callable[[], Any]
    result: "Future[Any]"

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.call())
        except BaseException as error:
            self.result.set_exception(error)
