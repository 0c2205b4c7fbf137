"""A whole service in one deterministic event loop: virtual time, and one schedule per seed.

Real parts: the store's transactions, the worker, its recovery, the fake backend's arithmetic, the
files. Simulated parts: time, the order of tasks, lost and repeated messages, crashes.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.workload import Client, Tenant, state_bits
from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import VirtualLoop
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store.base import Queue, Submitted
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.files import FileStore, LocalFs
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.models.recovery_points import PointPolicy
from tuneserve_engine.worker.worker import Worker, WorkerPolicy

QUEUE_METHODS = {name for name in vars(Queue) if not name.startswith("_")}
START_S = 1_000_000.0


class Inline(Executor):
    """Runs a call at once, in the caller's thread."""

    def submit(self, call: Any, /, *given: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(call(*given, **named))
        except BaseException as error:
            future.set_exception(error)
        return future


class Later(Executor):
    """Runs calls one after the other, each after a delay in which other tasks run."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, call: Any, /, *given: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                done = Inline().submit(call, *given, **named)
                if error := done.exception():
                    future.set_exception(error)
                else:
                    future.set_result(done.result())

        self._waiting.append(run)
        if len(self._waiting) == 1:
            self._later()
        return future

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(self._draw.random() ** 3 * 0.05, self._next)

    def _next(self) -> None:
        self._waiting[0]()
        self._waiting.popleft()
        if self._waiting:
            self._later()


class UnsyncedFs(LocalFs):
    """A file system without syncs: crashes here end tasks, not machines."""

    def fsync(self, descriptor: int) -> None:
        pass


@dataclass
class Faults:
    """The rates of faults. With all zero, the run is undisturbed."""

    lost: float = 0.0  # fraction of calls that never arrive
    unanswered: float = 0.0  # fraction of calls whose answer is lost
    crash_s: float = 0.0  # mean virtual time between deaths of workers
    outage_s: float = 0.0  # mean virtual time between restarts of the API process
    workers: int = 1


SOME = Faults(lost=0.03, unanswered=0.03, crash_s=3.0, outage_s=15.0, workers=2)


@dataclass
class World:
    """The service and the faults that it suffers."""

    seed: int
    folder: Path
    faults: Faults
    make_executor: Callable[[Path], JobExecutor]
    trace: list[str] = field(default_factory=list)
    crashes: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.reachable = asyncio.Event()
        self.reachable.set()

    async def pause(self) -> None:
        """Wait as long as networks and schedulers would."""
        await asyncio.sleep(self.draw.random() ** 3 * 0.2)

    async def call(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call over the network to the process that owns the store."""
        await self.pause()
        if not self.reachable.is_set() or self.draw.random() < self.faults.lost:
            raise ConnectionError(f"{name} did not arrive")
        answer = await call()
        self.trace.append(name)
        await self.pause()
        if self.draw.random() < self.faults.unanswered:
            raise ConnectionError(f"{name} was not answered")
        return answer

    async def play(self, tenants: list[Tenant]) -> dict[str, Any]:
        """Everything that clients received, and the final state of every model."""
        loop = asyncio.get_running_loop()
        # workers are often killed here without a request's fault
        policy = StorePolicy(job_attempts=10**6)
        store = MemoryStore(clock=lambda: START_S + loop.time(), policy=policy)
        self.store = store
        for tenant in tenants:
            await store.put_record(tenant.session_record())
        background = [
            asyncio.create_task(self._keep_worker(f"worker-{n}"))
            for n in range(self.faults.workers)
        ]
        background += [asyncio.create_task(self._sweep()), asyncio.create_task(self._outages())]
        clients = [
            Client(tenant, _Line(self), self.pause, random.Random(self.seed)) for tenant in tenants
        ]
        playing = asyncio.gather(*(client.run() for client in clients))
        done, _ = await asyncio.wait(
            [playing, *background], timeout=3600, return_when=asyncio.FIRST_COMPLETED
        )
        assert done, "clients still wait after an hour"
        for task in done:
            task.result()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._check(tenants, clients)
        results = {client.tenant.name: client.results for client in clients}
        root = self.folder / "files"
        states = {t.name: state_bits(root / t.final_file, FAKE_INFO.name) for t in tenants}
        await store.close()
        return {"results": results, "states": states}

    async def _check(self, tenants: list[Tenant], clients: list[Client]) -> None:
        for tenant, client in zip(tenants, clients, strict=True):
            model = await self.store.get_record(ModelRecord, tenant.model_id)
            assert model is not None and not model.diverged, f"{tenant.model_id} is {model}"
            assert len(client.results) == 2 + sum(
                len(tenant.round(i)) + len(tenant.samples(i)) for i in range(tenant.rounds)
            )

    async def _keep_worker(self, name: str) -> None:
        """Run workers under the name, one after the other. Each is killed after a while."""
        policy = WorkerPolicy(
            points=PointPolicy(interval_s=1.0, steps=3),
            renew_s=0.5,
            clock=asyncio.get_running_loop().time,
            device=Inline,
            host=lambda: Later(self.draw),
            disk=Inline,
            reader=Inline,
        )
        while True:
            worker = Worker(
                self._connect,
                self.make_executor(self.folder / "files"),
                FAKE_INFO,
                name=name,
                policy=policy,
            )
            task = asyncio.create_task(worker.run_until_stopped())
            lives_s = self.draw.expovariate(1 / self.faults.crash_s) if self.faults.crash_s else 1e9
            await asyncio.wait([task], timeout=lives_s)
            if task.done() and not isinstance(task.exception(), Fenced):
                task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.crashes += 1
            self.trace.append(f"{name} died")
            await asyncio.sleep(self.draw.random() * 2)

    async def _connect(self) -> Any:
        await self.pause()
        await self.reachable.wait()
        return _Line(self)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            if self.reachable.is_set():
                await self.store.sweep(START_S + loop.time(), SweepPolicy(park_s=1.5))

    async def _outages(self) -> None:
        if not self.faults.outage_s:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self.draw.expovariate(1 / self.faults.outage_s))
            self.reachable.clear()
            self.trace.append("API away")
            await asyncio.sleep(self.draw.random() * 3)
            self.reachable.set()


class _Line:
    """A caller's connection to the store, through the world's network."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method not in QUEUE_METHODS:
            raise AttributeError(method)
        return lambda *given, **named: self._call(method, *given, **named)

    async def _call(self, method: str, *given: Any, **named: Any) -> Any:
        call = getattr(self._world.store, method)
        return await self._world.call(method, lambda: call(*given, **named))

    async def submit(self, *given: Any) -> Submitted:
        submitted: Submitted = await self._call("submit", *given)
        return submitted

    async def wait(self, request_id: str, timeout_s: float) -> Any:
        return await self._call("wait", request_id, timeout_s)

    async def cancel(self, request_id: str) -> bool:
        return bool(await self._call("cancel", request_id))


def fake_executor(folder: Path) -> JobExecutor:
    return JobExecutor(FakeBackend(), FileStore(folder, UnsyncedFs()))


def play(
    seed: int,
    folder: Path,
    faults: Faults = SOME,
    *,
    rounds: int = 3,
    first: int = 0,
    make_executor: Callable[[Path], JobExecutor] = fake_executor,
) -> tuple[dict[str, Any], World]:
    """The results of three tenants under this seed's faults, and the world in which they ran."""
    folder.mkdir(parents=True)
    tenants = [Tenant(first + n, FAKE_INFO.name, rounds) for n in range(3)]
    worlds: list[World] = []

    async def main() -> dict[str, Any]:
        worlds.append(World(seed, folder, faults, make_executor))
        return await worlds[0].play(tenants)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        results = runner.run(main())
    return results, worlds[0]
