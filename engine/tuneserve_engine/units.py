"""Units of jobs on the device: what the scheduler chooses, and what comes of it.

Samples run in slices of time. They, and units of other tenants, come in between the micro-batches
of a training unit too, and between theirs others again: the units on the device are a stack.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from tuneserve_engine.ahead import Ahead
from tuneserve_engine.backend.base import DeviceFailed
from tuneserve_engine.backlog import Backlog
from tuneserve_engine.jobs import Job, JobKind, Outcome, Part
from tuneserve_engine.kill_points import kill_point
from tuneserve_engine.operations import Operations
from tuneserve_engine.outcomes import Executed
from tuneserve_engine.runnable import Running, UnderWay
from tuneserve_engine.scheduler import UNIT_S, Scheduler

T = TypeVar("T")

_AHEAD_JOBS = 64
"""Jobs that are looked at before their turn: what two units take."""
_UNDELIVERED = 2
"""Units whose results may wait to be encoded; each holds its numbers in memory."""
_SAMPLING_S = 0.25
"""Samples go on for so long before the scheduler is asked again; ``UNIT_S`` if anything waits, or
anybody listens."""
_ENDED_S = 0.5
"""How soon the device's thread notices that the event loop will not answer any more."""


class Unit(NamedTuple):
    """One that has run; ``seconds`` include what the device's thread did beside it."""

    executed: Executed
    outcomes: list[Outcome] | None  # None: they are still to be made
    seconds: float


class Host(Protocol):
    """What the units need of the worker around them."""

    backlog: Backlog

    def clock(self) -> float: ...

    async def note(self, unit: Sequence[Job]) -> None:
        """Tells the store what runs now."""
        ...

    def began(self, jobs: Sequence[Job], others: int) -> None:
        """These have left the backlog, for a unit with so many ``others`` beside each."""
        ...

    def ran(self, executed: Executed) -> None:
        """This had the device."""
        ...

    def gave_up(self, request_ids: Sequence[str]) -> None:
        """These have begun, and will not be ended here."""
        ...

    def left_off(self, request_ids: Sequence[str]) -> None:
        """These had begun when they were cancelled, and go no further."""
        ...

    def drew(self, parts: Mapping[str, Sequence[Part]]) -> None:
        """Tells those who listen to samples, sooner or later."""
        ...


class Units:
    """Runs on the event loop, and on ``device``, a thread."""

    def __init__(
        self,
        operations: Operations,
        scheduler: Scheduler,
        host: Host,
        *,
        device: Executor,
        decoder: Executor,
    ) -> None:
        self.executed: asyncio.Queue[Unit] = asyncio.Queue(_UNDELIVERED)
        self.device_s = self.host_s = 0.0
        """In which the device ran, and in which it waited although there was work."""
        self._operations = operations
        self._scheduler = scheduler
        self._host = host
        self._backlog = host.backlog
        self._clock = host.clock
        self._device = device
        self._decoded = Ahead(operations.decode, decoder)
        self._turns: list[_Turn] = []  # on the device, each in between of the one ahead of it
        self._calls: deque[_Call] = deque()  # for the device, beside the units
        self._sampling: dict[str, UnderWay] = {}
        self._on_device: Sequence[Job] = ()  # samples of the slice that runs
        self._cancelled: set[str] = set()  # those of them that will not go on
        self._stopping = asyncio.Event()
        self._ended = threading.Event()

    def stop(self) -> None:
        """Makes ``run`` return after the running unit. Samples under way are given up: whoever
        begins them again draws the same tokens."""
        self._stopping.set()
        self._backlog.arrived.set()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Samples of these that are under way go no further than the slice that runs."""
        on_device = {each.request_id for each in self._on_device} & set(request_ids)
        self._cancelled |= on_device
        waiting = self._sampling.keys() & set(request_ids) - on_device
        for request_id in request_ids:
            self._sampling.pop(request_id, None)
        self._host.left_off(sorted(waiting))

    async def on_device(self, call: Callable[[], T]) -> T:
        """What the call gives on the device's thread: between two units, or two micro-batches."""
        asked = _Call(call, Future())
        self._calls.append(asked)
        asyncio.get_running_loop().run_in_executor(self._device, self._run_call)
        result: T = await asyncio.wrap_future(asked.result)
        return result

    def abandon(self) -> None:
        """The event loop ends: the device's thread is not to wait for it."""
        self._ended.set()

    async def run(self) -> None:
        """Returns after ``stop``, when all results have been taken."""
        idle_since_s = self._clock()
        while not self._stopping.is_set():
            # Not chosen before the unit ahead of it has ended: what comes meanwhile may take part.
            under_way = list(self._sampling.values())
            unit = self._scheduler.next_unit(self._backlog.in_order(), under_way)
            if not unit:
                self._backlog.arrived.clear()
                if not self._stopping.is_set():
                    await self._backlog.arrived.wait()
                idle_since_s = self._clock()
                continue
            await self._begin(unit)
            kill_point("worker-before-unit")
            turn = _Turn(unit, self._clock)
            self.host_s += turn.started_s - idle_since_s
            executed, outcomes = await self._execute(turn)
            kill_point("worker-after-unit")
            idle_since_s = self._clock()
            await self._ended_turn(turn, executed, outcomes)
        self._host.gave_up(list(self._sampling))
        await self.executed.join()

    def look_ahead(self) -> None:
        """Gets ready what runs next, while the device is busy: else it would wait for that."""
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
        self, turn: "_Turn", executed: Executed, outcomes: list[Outcome] | None
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
                name: UnderWay(job, executed.left[name]) for name, job in jobs.items()
            }
            self._host.drew(executed.parts)
        if executed.jobs:  # else there is nothing to deliver, and nothing to wait for
            await self.executed.put(Unit(executed, outcomes, seconds))

    async def _execute(self, turn: "_Turn") -> tuple[Executed, list[Outcome] | None]:
        """The outcomes too, if nothing waits for the device: then another thread need not wake. Not
        those of a save, which waits for the disk: something may come meanwhile."""
        unit, decoded = turn.unit, self._decoded.take(turn.unit)
        loop = asyncio.get_running_loop()

        def call() -> tuple[Executed, list[Outcome] | None]:
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
        """Runs the oldest call that waits, if it did not come in between of a unit."""
        if self._calls:
            self._calls.popleft().run()

    def _run_on_device(
        self, loop: asyncio.AbstractEventLoop, turn: "_Turn", decoded: Mapping[str, Any]
    ) -> Executed:
        is_over, between = partial(self._is_over, turn), partial(self._between, loop, turn)
        return self._operations.execute(turn.unit, decoded, is_over, between)

    def _is_over(self, turn: "_Turn") -> bool:
        is_awaited = (
            turn.comes_between
            or not self._backlog.is_empty
            or self._operations.have_listeners
            or self._stopping.is_set()
        )
        return turn.seconds >= (UNIT_S if is_awaited else _SAMPLING_S)

    def _between(self, loop: asyncio.AbstractEventLoop, turn: "_Turn") -> None:
        """Others have the device, as long as it is their turn."""
        if self._ended.is_set():
            return
        turn.pause()
        for _ in range(len(self._calls)):  # not those that come meanwhile
            self._run_call()
        try:
            while self._sampling or not self._backlog.is_empty:
                if not self._run_one_between(loop):
                    break
        except DeviceFailed:
            raise
        except Exception as error:  # which is not the fault of the unit that runs
            raise DeviceFailed(f"what ran between micro-batches failed: {error}") from error
        if turn.is_interrupted:
            self._ask(loop, self._host.note(turn.unit))
        turn.resume()

    def _run_one_between(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether there was a unit to run before the last one on the device goes on."""
        begun = self._ask(loop, self._begin_between())
        if begun is None:
            return False
        turn, decoded = begun
        executed = self._run_on_device(loop, turn, decoded)
        self._ask(loop, self._end_between(turn, executed))
        return True

    async def _begin_between(self) -> "tuple[_Turn, Mapping[str, Any]] | None":
        if self._stopping.is_set():
            return None
        running = [Running(turn.unit, turn.seconds, turn.interrupted_s) for turn in self._turns]
        pending, under_way = self._backlog.in_order(), list(self._sampling.values())
        unit = self._scheduler.between(running, pending, under_way)
        if not unit:
            return None
        await self._begin(unit)
        self._turns[-1].is_interrupted = True
        turn = _Turn(unit, self._clock, comes_between=True)
        decoded = self._decoded.take(unit)
        self._turns.append(turn)
        return turn, decoded

    async def _end_between(self, turn: "_Turn", executed: Executed) -> None:
        self._turns.remove(turn)
        await self._ended_turn(turn, executed, None)
        self.look_ahead()

    def _ask(self, loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
        """What the event loop answers."""
        answer = asyncio.run_coroutine_threadsafe(call, loop)
        while True:
            try:
                return answer.result(_ENDED_S)
            except TimeoutError:
                if self._ended.is_set() or answer.done():
                    raise


class _Turn:
    """A unit's time on the device, without that of others which came in between."""

    def __init__(
        self, unit: list[Job], clock: Callable[[], float], *, comes_between: bool = False
    ) -> None:
        self.unit = unit
        self.comes_between = comes_between
        self.is_interrupted = False  # since it went on last
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
        """For which others had the device since it began."""
        return self._clock() - self.started_s - self.seconds


class _Call(NamedTuple):
    """Something beside the units that is to run on the device's thread."""

    call: Callable[[], Any]
    result: "Future[Any]"

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.call())
        except BaseException as error:
            self.result.set_exception(error)
