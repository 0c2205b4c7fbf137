"""A service in virtual time: many workers in one process, without a device.

Real parts: the store's transactions (SQLite in memory) and the workers with their scheduler,
packing, leases, recovery points and replay. Simulated parts: time, deaths of workers, and the
device, which computes nothing and takes as long as its rates say. Files are in memory.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import greenlet
import numpy as np

from tests.faults.simulation import Inline
from tests.support.fake_backend import FakeBackend
from tests.support.memory_store import MemoryStore
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    MicroBatchOutput,
    SampledSequence,
    SampleProgress,
    SampleResult,
    SamplingRequest,
    TrainBatch,
    TrainResult,
    nothing,
)
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.worker.device_loop import DeviceLoop
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.lease import LeaseLost
from tuneserve_engine.worker.models.recovery_points import PointPolicy
from tuneserve_engine.worker.scheduling.cost_model import CostModel
from tuneserve_engine.worker.scheduling.scheduler import Scheduler
from tuneserve_engine.worker.worker import Worker, WorkerPolicy

START_S = 1_000_000.0
INFO = BaseModelInfo("sim", "none", 50_000, 8192, 32, "sim", parameters=10**9)
SHAPES = StaticShapes(8192, chunk=2048, requested_tokens=8192, rank_buckets=(8, 32))
DECODE_SLOTS = 64
SAVED = AdapterState(AdapterConfig(8, 16.0, 0), {})
STEPS = 4
"""Tokens that each decode slot decodes before the worker looks again."""


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device: how fast it is."""

    name: str
    train_tokens_s: float
    decode_step_s: float  # of all decode slots
    pass_s: float = 0.004  # of each pass, beside its tokens
    step_s: float = 0.003  # of an optimizer step
    load_s: float = 0.05  # of an adapter that is restored
    read_s: float = 0.045  # of a snapshot's file, beside the device
    snapshot_s: float = 0.005  # of a snapshot that has been read


class VirtualDevice(Executor):
    """A worker's device. It runs one call at a time, each on a stack of its own (a greenlet).

    A call leaves its stack, by ``leave``, whenever it waits; other tasks run meanwhile.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running: greenlet.greenlet | None = None
        self.busy_s = 0.0
        self.is_dead = False

    def submit(self, call: Any, /, *given: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._waiting.append((partial(call, *given, **named), future))
        if self._running is None:
            self._start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_dead = True
        self._waiting.clear()

    def _start(self) -> None:
        call, future = self._waiting.popleft()

        def run(_: None) -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._running = greenlet.greenlet(run)
        self._switch(None)

    def _switch(self, given: Any, error: BaseException | None = None) -> None:
        """Continue the call until it waits again: for a time, or for a coroutine."""
        if self.is_dead:
            return
        assert self._running is not None
        asked = self._running.throw(error) if error else self._running.switch(given)
        if self._running.dead:
            self._running = None
            if self._waiting:
                self._start()
        elif isinstance(asked, float):
            self.busy_s += asked
            asyncio.get_running_loop().call_later(asked, self._switch, None)
        else:
            asyncio.ensure_future(asked).add_done_callback(self._answer)

    def _answer(self, task: "asyncio.Future[Any]") -> None:
        if not task.cancelled():
            error = task.exception()
            self._switch(None if error else task.result(), error)


class VirtualReader(Executor):
    """A thread that runs one call at a time; each ends ``seconds`` after it began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free_s = 0.0

    def submit(self, call: Any, /, *given: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + self._seconds
        loop.call_at(self._free_s, self._run, future, partial(call, *given, **named))
        return future

    @staticmethod
    def _run(future: "Future[Any]", call: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(call())


def leave(asked: Any) -> Any:
    """Leave the device's stack: for so many seconds, or until a coroutine has its result."""
    parent = greenlet.getcurrent().parent
    assert parent is not None
    return parent.switch(asked)


def _call_loop(self: DeviceLoop, loop: Any, call: Any) -> Any:
    """Replace the worker's own, which waits for the event loop on another thread."""
    return leave(call)


class TimedBackend(FakeBackend):
    """A backend that computes nothing and takes the time of its kind of device."""

    def __init__(self, kind: DeviceKind) -> None:
        super().__init__(INFO)
        self._static_shapes = SHAPES
        self._kind = kind
        self._states: dict[str, AdapterState] = {}
        self._drawn: dict[str, int] = {}  # tokens of each running sample

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        self._states[adapter_id] = AdapterState(config, {})

    def delete_adapter(self, adapter_id: str) -> None:
        del self._states[adapter_id]

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        leave(self._kind.load_s)
        self._states[adapter_id] = state

    def adapter_state(
        self, adapter_id: str, *, optimizer: bool, accumulator: bool = False
    ) -> AdapterState:
        return self._states[adapter_id]

    def load_snapshot(self, snapshot_id: str, state: AdapterState) -> None:
        leave(self._kind.snapshot_s)
        self._snapshots[snapshot_id] = state

    def forward_backward(
        self, batch: TrainBatch, between: Callable[[], None] = nothing, /
    ) -> TrainResult:
        leave(self._kind.pass_s)
        outputs = []
        for index, micro_batch in enumerate(batch.micro_batches):
            if index:
                between()
            leave(micro_batch.blocks * SHAPES.block / self._kind.train_tokens_s)
            shape = micro_batch.targets.shape
            zeros = np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
            outputs.append(MicroBatchOutput(*zeros))
        return TrainResult(tuple(outputs), (True,) * len(batch.adapter_ids))

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamwParams]]
    ) -> list[Mapping[str, float] | Exception]:
        leave(self._kind.step_s * len(steps))
        return [{"grad_norm": 1.0} for _ in steps]

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        self._drawn = {name: self._drawn.get(name, 0) for name in asked}
        before, ended = dict(self._drawn), {}
        while self._drawn:
            slots = list(self._drawn)[:DECODE_SLOTS]
            leave(STEPS * self._kind.decode_step_s)
            for name in slots:
                self._drawn[name] += STEPS
                if self._drawn[name] >= asked[name].max_tokens:
                    ended[name] = _result(asked[name])
                    del self._drawn[name]
            if should_yield():
                break
        drawn = {name: self._drawn.get(name, asked[name].max_tokens) for name in asked}
        work = {name: float(drawn[name] - before[name]) for name in asked}
        return SampleProgress(ended, dict.fromkeys(self._drawn, 1), work)


def _result(asked: SamplingRequest) -> SampleResult:
    tokens = np.zeros(asked.max_tokens, np.int32)
    return SampleResult((SampledSequence(tokens, tokens.astype(np.float32), "length"),))


class MemoryFiles:
    """The files of all workers, in memory."""

    def __init__(self) -> None:
        self.states: dict[str, AdapterState] = {}

    def write(self, file_id: str, members: Any, **_: Any) -> int:
        """Note a save for sampling, whose content no simulated device reads."""
        self.states[file_id] = SAVED
        return 1


class SimulatedExecutor(JobExecutor):
    """An executor of jobs whose files are in memory."""

    def __init__(self, kind: DeviceKind, files: MemoryFiles, clock: Callable[[], float]) -> None:
        super().__init__(TimedBackend(kind), files, clock=clock)
        self._memory = files
        self._read_s = kind.read_s

    def write_state(self, file_id: str, state: AdapterState) -> None:
        self._memory.states[file_id] = state

    def read_state(self, file_id: str, name: str = "") -> AdapterState:
        if greenlet.getcurrent().parent is not None:  # the device waits for it
            leave(self._read_s)
        return self._memory.states[file_id]


class _CountingStore(MemoryStore):
    """A store that notes when workers hand over models, and that a simulation can read."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.moved_s: list[float] = []

    async def unassign(self, epoch: int, model_id: str) -> None:
        self.moved_s.append(asyncio.get_running_loop().time())
        await super().unassign(epoch, model_id)

    async def read(self, query: str, *values: Any) -> list[Any]:
        return await self._call(lambda tx: tx.execute(query, *values).fetchall())


@dataclass
class VirtualService:
    """The store and the workers of a simulated service, one worker for each of ``kinds``."""

    kinds: Sequence[DeviceKind]
    seed: int = 0
    deaths_s: float = 0.0  # mean time between deaths of workers, of all of them together; 0: none
    away_s: float = 30.0  # mean time until a dead worker is there again
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    devices: dict[str, VirtualDevice] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)  # of earlier devices, by worker
    deaths: list[tuple[float, int]] = field(default_factory=list)
    """For each worker that died: when, and how many models it had."""
    recoveries: list[float] = field(default_factory=list)
    """For each request that a worker had when it died: the seconds until its result."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._files = MemoryFiles()
        self._workers: dict[str, asyncio.Task[None]] = {}
        DeviceLoop._call_loop = _call_loop

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        policy = StorePolicy(
            job_attempts=10**6, server_jobs=10**7, server_bytes=2**40, server_sessions=10**7
        )
        self.store = _CountingStore(clock=lambda: START_S + loop.time(), policy=policy)
        for number, kind in enumerate(self.kinds):
            self.tasks.append(asyncio.create_task(self._keep(f"{kind.name}-{number}", kind)))
        if self.deaths_s:
            self.tasks.append(asyncio.create_task(self._kill_some()))

    async def stop(self) -> None:
        for task in [*self.tasks, *self._workers.values()]:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def device_of(self, model_id: str) -> str:
        """Return the kind of device that has the model; "none" if none has."""
        rows = await self.store.read(
            "SELECT name FROM lanes JOIN workers ON epoch = worker WHERE model_id = ?", model_id
        )
        return rows[0][0].partition("-")[0] if rows else "none"

    @property
    def moved_s(self) -> list[float]:
        """The times when workers handed a model over."""
        return self.store.moved_s

    @property
    def moves(self) -> int:
        """The number of models that workers handed over."""
        return len(self.moved_s)

    def busy(self, name: str) -> float:
        """Return the seconds that the worker's device was busy."""
        return self.busy_s.get(name, 0.0) + self.devices[name].busy_s

    async def _connect(self) -> Any:
        return self.store

    async def _keep(self, name: str, kind: DeviceKind) -> None:
        """Run workers under the name, one after the other."""
        while True:
            device = VirtualDevice()
            self.devices[name] = device
            self._workers[name] = asyncio.create_task(
                self._new_worker(name, kind, device).run_until_stopped()
            )
            try:
                await self._workers[name]
            except (asyncio.CancelledError, Fenced, LeaseLost):
                if (mine := asyncio.current_task()) and mine.cancelling():
                    raise
            self.busy_s[name] = self.busy(name)
            device.busy_s = 0.0
            await asyncio.sleep(self._draw.expovariate(1 / self.away_s))

    def _new_worker(self, name: str, kind: DeviceKind, device: VirtualDevice) -> Worker:
        clock = asyncio.get_running_loop().time
        costs = CostModel(SHAPES, context=INFO.context_length, decode_slots=DECODE_SLOTS)
        policy = WorkerPolicy(
            points=PointPolicy(),
            clock=clock,
            device=lambda: device,
            decoder=Inline,
            host=Inline,
            disk=Inline,
            reader=lambda: VirtualReader(kind.read_s),
            speed=kind.train_tokens_s,
        )
        executor = SimulatedExecutor(kind, self._files, clock)
        scheduler = Scheduler(costs=costs)
        return Worker(self._connect, executor, INFO, name=name, scheduler=scheduler, policy=policy)

    async def _kill_some(self) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self.deaths_s))
            living = [each for each in self._workers if not self.devices[each].is_dead]
            if not living:
                continue
            name = self._draw.choice(living)
            self.devices[name].is_dead = True
            self._workers[name].cancel()
            ((models,),) = await self.store.read(
                "SELECT COUNT(*) FROM lanes JOIN workers ON epoch = worker WHERE name = ?", name
            )
            self.deaths.append((asyncio.get_running_loop().time(), models))
            rows = await self.store.read(
                "SELECT request_id FROM jobs JOIN workers ON epoch = worker "
                "WHERE state = 'ready' AND name = ?",
                name,
            )
            self.tasks += [asyncio.create_task(self._note_recovery(each)) for (each,) in rows]

    async def _note_recovery(self, request_id: str) -> None:
        loop = asyncio.get_running_loop()
        died_s = loop.time()
        if await self.store.wait(request_id, 3600.0) is not None:
            self.recoveries.append(loop.time() - died_s)
