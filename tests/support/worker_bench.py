"""A worker between a store and a backend of known numbers, for the tests of both its halves."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tinker.proto.response_conv import deserialize_forward_backward_output

from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import TrainBatch, TrainResult
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    OptimStep,
    Outcome,
    SampleCommand,
    encode,
)
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store.base import Queue
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.sqlite.store import SqliteStore
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.worker import Worker, WorkerPolicy

CONFIG = AdapterConfig(rank=4, alpha=8.0, seed=1)
STEP = OptimStep(AdamwParams(learning_rate=0.01))
TIMEOUT_S = 10
QUEUE_METHODS = {name for name in vars(Queue) if not name.startswith("_")}


def gradient_body(token: int) -> bytes:
    body = wire.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = body.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([token], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].dense = np.array([0], "<i8").tobytes()
    datum.loss_fn_inputs["target_tokens"].dtype = wire.DTYPE_INT64
    return body.SerializeToString()


class Counting(FakeBackend):
    """A backend that counts its calls, and can be made to fail or to wait."""

    def __init__(self, memory_tokens: int | None = None) -> None:
        super().__init__(memory_tokens=memory_tokens)
        self.gradients: list[str] = []
        self.steps: list[str] = []
        self.victim = ""
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        self.reached.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.victim in batch.adapter_ids:
            raise RuntimeError("the device is on fire")
        result = super().forward_backward(batch, *between)
        self.gradients += batch.adapter_ids
        return result

    def optim_steps(self, steps: Sequence[tuple[str, AdamwParams]]) -> Any:
        self.steps += [adapter_id for adapter_id, _ in steps]
        return super().optim_steps(steps)


class Line:
    """The worker's connection to a store. It counts calls, and breaks on request.

    ``breaks[method]`` lists the events call by call: "before" the store receives the call, "after"
    it did but the answer is lost, "full" if the store refuses, or "" for none.
    """

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.calls: list[str] = []
        self.breaks: dict[str, list[str]] = {}
        self.cut = asyncio.Event()
        self.reachable = asyncio.Event()
        self.reachable.set()

    async def _call(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(method)
        breaks = self.breaks.get(method)
        when = breaks.pop(0) if breaks else ""
        if when == "full":
            raise StoreFailed("OperationalError: database or disk is full")
        if when == "before":
            raise ConnectionResetError("lost on the way there")
        running = asyncio.ensure_future(call())
        cut = asyncio.ensure_future(self.cut.wait())
        try:
            await asyncio.wait((running, cut), return_when=asyncio.FIRST_COMPLETED)
            if self.cut.is_set() and not running.done():
                raise ConnectionResetError("cut")
            answer = await running
        finally:
            running.cancel()
            cut.cancel()
        if when == "after":
            raise ConnectionResetError("lost on the way back")
        return answer

    async def connect(self) -> "Line":
        self.calls.append("connect")
        await self.reachable.wait()
        self.cut.clear()
        return self

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method not in QUEUE_METHODS:
            raise AttributeError(method)
        call = getattr(self.store, method)
        return lambda *given, **named: self._call(method, lambda: call(*given, **named))


class Bench:
    """A store, a line, a device and the worker between them. It submits jobs as the API would."""

    def __init__(self, store: SqliteStore, root: Path, policy: WorkerPolicy | None = None) -> None:
        self.store = store
        self.root = root
        self.policy = policy
        self.positions: dict[str, int] = {}
        self.start()

    def start(self, backend: "Counting | None" = None, name: str = "worker") -> None:
        """Start a worker without models in memory. The previous one must have ended."""
        self.line = Line(self.store)
        self.backend = backend or Counting()
        executor = JobExecutor(self.backend, FileStore(self.root / "files"))
        connect = self.line.connect
        self.worker = Worker(connect, executor, FAKE_INFO, name=name, policy=self.policy)
        self.task = asyncio.create_task(self.worker.run_until_stopped())

    async def kill(self) -> None:
        """End the worker as a crash does, without telling the store."""
        self.backend.gate.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def submit(self, kind: JobKind, payload: bytes, model: str, at: int | None = None) -> str:
        """Submit a job and return its id. ``at`` is a position other than the model's next."""
        position = self.positions.get(model, 0) if at is None else at
        self.positions[model] = max(self.positions.get(model, 0), position + 1)
        job = Job(model[0], kind, model, position, payload, model, position, FAKE_INFO.name)
        records = []
        if kind == JobKind.CREATE_MODEL:
            records = [ModelRecord(model, model[0], "s", FAKE_INFO.name, CONFIG, 0.0, 0.0)]
        return (await self.store.submit(job, *records)).request_id

    async def create(self, model: str) -> str:
        return await self.submit(
            JobKind.CREATE_MODEL, encode(CreateModel("tuneserve/fake", CONFIG)), model
        )

    async def gradient(self, model: str, token: int = 0, at: int | None = None) -> str:
        return await self.submit(JobKind.FORWARD_BACKWARD, gradient_body(token), model, at)

    async def step(self, model: str, at: int | None = None) -> str:
        return await self.submit(JobKind.OPTIM_STEP, encode(STEP), model, at)

    async def sample(self, tenant: str, seq: int, grammar: Grammar | None = None) -> str:
        command = SampleCommand(prompt=[1, 2], seed=seq, max_tokens=2, grammar=grammar)
        payload = encode(command)
        scope = f"{tenant}:sample"
        job = Job(tenant, JobKind.SAMPLE, scope, seq, payload, base_model=FAKE_INFO.name)
        return (await self.store.submit(job)).request_id

    async def outcome(self, request_id: str) -> Outcome:
        """The outcome of the request, which must end."""
        outcome = await self.store.wait(request_id, TIMEOUT_S)
        assert outcome is not None, f"{request_id} has no outcome"
        return outcome

    async def ok(self, request_id: str) -> bytes:
        outcome = await self.outcome(request_id)
        assert outcome.rejection is None, outcome.rejection
        return outcome.body

    def state(self, model: str) -> AdapterState:
        return self.backend.adapter_state(model, optimizer=True)


@asynccontextmanager
async def bench_at(root: Path, policy: WorkerPolicy | None = None) -> AsyncIterator[Bench]:
    store = await SqliteStore.open(root / "store.db")
    bench = Bench(store, root, policy)
    try:
        yield bench
    finally:
        await bench.kill()
        await store.close()


def run(
    root: Path,
    scenario: Callable[[Bench], Awaitable[None]],
    policy: WorkerPolicy | None = None,
) -> None:
    """Run the scenario on a fresh bench."""

    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), bench_at(root, policy) as bench:
            await scenario(bench)

    asyncio.run(main())


def state_bits(state: AdapterState) -> list[Any]:
    groups = (state.weights, state.first_moment, state.second_moment)
    return [state.step, *[(n, x.tobytes()) for group in groups for n, x in sorted(group.items())]]


def loss(body: bytes) -> float:
    return float(deserialize_forward_backward_output(body).metrics["loss:sum"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)
