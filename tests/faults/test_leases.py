"""T7: several workers. Models move to a second one, away from a dead one, and away from a sleeping
one, which writes nothing when it wakes.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.diary import Diary, Entry, Watched
from tests.faults.killed_worker import FENCED, KILL_POINTS, BriefLeases, Life
from tests.faults.test_kills import play_group, undisturbed
from tests.faults.test_kills_jax import BASE_MODEL, JaxWorker, check_models
from tests.faults.workload import Client, Tenant, no_pause
from tests.redis_server import RedisServer
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import remote
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.open import open_store

SLEEPERS = 10  # at a time
GROUPS = 4  # of three tenants each, at a time


@dataclass
class Placements:
    """The places of models according to the diary: by the jobs that workers took, not by the
    store's view.

    Workers may record late what they took, but releases only rise.
    """

    diary: Diary
    epochs: dict[str, list[int]] = field(default_factory=dict)  # by name
    held: dict[int, set[str]] = field(default_factory=dict)  # by epoch
    last: dict[str, tuple[int, int]] = field(default_factory=dict)  # by model: release and epoch
    over: set[int] = field(default_factory=set)
    calls: list[Entry] = field(default_factory=list)

    def read(self) -> None:
        for entry in self.diary.news():
            self.calls.append(entry)
            if entry.method == "lease" and entry.ended == "ok":
                self.epochs.setdefault(entry.name, []).append(entry.epoch)
                self.held.setdefault(entry.epoch, set())
            elif entry.method == "unassign" and not entry.ended:
                self.held[entry.epoch].discard(entry.model)
            for model, release in entry.taken.items():
                self._took(entry.epoch, model, release)

    def _took(self, epoch: int, model: str, release: int) -> None:
        """If another worker had the model and did not hand it over, that worker's epoch is over."""
        newest, before = self.last.get(model, (0, epoch))
        if release > newest:
            self.last[model] = release, epoch
            if before != epoch and model in self.held[before]:
                self.held[before].discard(model)
                self.over.add(before)
            self.held[epoch].add(model)

    def shares(self) -> list[int]:
        """The number of models of each worker, the fewest first."""
        return sorted(
            len(held) for epoch, held in self.held.items() if held and epoch not in self.over
        )

    def written_after(self, epoch: int, woken_s: float) -> list[Entry]:
        """The calls that this epoch started after that time and that were not refused."""
        return [
            entry
            for entry in self.calls
            if entry.epoch == epoch and entry.begun_s > woken_s and entry.ended == "ok"
        ]


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition became true in that time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.01)
    return True


def is_asleep(process: BaseProcess) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


class Sleepers:
    """Workers that fall asleep at work, and wake when others have their models."""

    def __init__(self, settings: CommonSettings, placements: Placements, wanted: int) -> None:
        self.settings = settings
        self.placements = placements
        self.wanted = wanted
        self.draw = random.Random(1)
        self.numbers = count()
        self.woken: dict[int, float] = {}  # times by epoch
        self.points: Counter[str] = Counter()

    @property
    def is_done(self) -> bool:
        return len(self.woken) >= self.wanted

    async def run(self) -> None:
        while not self.is_done:
            await self._one()

    async def _one(self) -> None:
        name = f"sleeper-{next(self.numbers)}"
        point, nth = self.draw.choice(KILL_POINTS), self.draw.randint(1, 2)
        life = a_life(self.settings, name, point, nth)
        process = life.start()
        try:
            await until(lambda: is_asleep(process) or not process.is_alive(), 3)
            if not is_asleep(process):  # it did not reach its failpoint, or was late for its lease
                assert process.exitcode in (None, FENCED), f"it ended with {process.exitcode}"
                return
            self.placements.read()
            if name not in self.placements.epochs:
                return  # it reached its failpoint before it had a lease
            epoch = self.placements.epochs[name][-1]
            if not await until(lambda: epoch in self.placements.over, 3):
                return  # no other worker needed its jobs
            woken_s = time.monotonic()
            os.kill(process.pid or 0, signal.SIGCONT)
            assert await until(lambda: not process.is_alive(), 5), f"{name} still runs"
            assert process.exitcode == FENCED, f"{name} ended with {process.exitcode}"
            self.woken[epoch] = woken_s
            self.points[point] += 1
        finally:
            process.kill()
            process.join()


async def keep_steady(settings: CommonSettings) -> None:
    """Run a worker that stays, or another one if a busy machine lets its lease expire."""
    while True:
        process = a_life(settings, "steady").start()
        try:
            while process.is_alive():
                await asyncio.sleep(0.05)
            assert process.exitcode == FENCED
        finally:
            process.kill()
            process.join()


def a_life(settings: CommonSettings, name: str, point: str = "", nth: int = 1) -> Life:
    diary = settings.data_dir / "diary" if settings.store_kind == "redis" else None
    return Life(settings, name, point, nth, signal.SIGSTOP, renew_s=0.07, diary=diary)


@asynccontextmanager
async def watched(settings: CommonSettings) -> AsyncIterator[tuple[Store, Placements]]:
    """The store as the API process opens it, with the workers' calls recorded in the diary.

    The recording happens here if workers reach the store through this process, and in the workers
    with Redis.
    """
    settings.data_dir.mkdir(parents=True)
    store = await open_store(settings)
    diary = Diary(settings.data_dir / "diary")
    placements = Placements(diary)
    try:
        async with beside(keep_reading(placements)):
            if settings.store_kind == "sqlite":
                queue: Any = Watched(store, diary)
                async with remote.serve(queue, settings.store_socket):
                    yield store, placements
            else:
                yield store, placements
    finally:
        await store.close()
        diary.close()


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the work, which must not end by itself, until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def keep_reading(placements: Placements) -> None:
    while True:
        placements.read()
        await asyncio.sleep(0.01)


async def sleep_and_wake(settings: CommonSettings, wanted: int) -> dict[int, dict[str, Any]]:
    """Groups of tenants train, on one worker that stays and many that fall asleep."""
    groups: dict[int, dict[str, Any]] = {}
    async with watched(settings) as (store, placements):
        sleepers = Sleepers(settings, placements, wanted)
        numbers = count()

        async def train() -> None:
            while not sleepers.is_done:
                number = next(numbers)
                groups[number] = await play_group(store, settings, number)

        async with beside(keep_steady(settings)), asyncio.timeout(60):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(SLEEPERS):
                    tasks.create_task(sleepers.run())
                for _ in range(GROUPS):
                    tasks.create_task(train())
        placements.read()
        for epoch, woken_s in sleepers.woken.items():
            assert placements.written_after(epoch, woken_s) == []
        for name, epochs in placements.epochs.items():
            assert name == "steady" or len(epochs) == 1, f"{name} has leased again"
    shown = ", ".join(f"{n} at {point}" for point, n in sorted(sleepers.points.items()))
    print(f"{settings.store_kind}: woken {shown}; {len(groups)} groups of three models")
    return groups


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_worker_that_wakes_after_its_lease_writes_nothing(tmp_path: Path, store: str) -> None:
    with ExitStack() as server:
        url = "" if store == "sqlite" else server.enter_context(RedisServer(tmp_path / "redis")).url
        settings = BriefLeases(data_dir=tmp_path / "data", store=url)
        groups = asyncio.run(sleep_and_wake(settings, wanted=50))
    for number, group in groups.items():
        assert group == undisturbed(tmp_path / f"undisturbed-{number}", number), f"group {number}"


# --- a second worker, and its death ---------------------------------------------------------------


class Training:
    """Tenants that train until the block ends."""

    def __init__(self, store: Store, tenants: Sequence[Tenant]) -> None:
        self.clients = {
            tenant.model_id: Client(tenant, store, no_pause, random.Random(tenant.number))
            for tenant in tenants
        }
        self._store = store
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Training":
        for client in self.clients.values():
            await self._store.put_record(client.tenant.session_record())
            self._running.append(asyncio.create_task(client.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        for ended in await asyncio.gather(*self._running, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended

    async def results(self, more: int, models: Iterable[str], timeout_s: float) -> None:
        """Return when each of the models has ``more`` further results."""
        clients = [self.clients[model_id] for model_id in models]
        wanted = [len(client.results) + more for client in clients]
        pairs = list(zip(clients, wanted, strict=True))
        assert await until(
            lambda: (
                all(len(client.results) >= count for client, count in pairs)
                or any(task.done() for task in self._running)
            ),
            timeout_s,
        ), f"no result in {timeout_s:g} s"


@pytest.mark.alone
def test_a_second_worker_takes_its_share(tmp_path: Path) -> None:
    """So does a third, which then dies without leaving a trace."""

    async def scenario() -> None:
        settings = BriefLeases(data_dir=tmp_path / "data")
        tenants = [Tenant(n, FAKE_INFO.name, rounds=10**6) for n in range(6)]
        async with watched(settings) as (store, placements), Training(store, tenants) as training:
            processes = [a_life(settings, "first").start()]
            try:
                await training.results(3, training.clients, 5)
                processes.append(a_life(settings, "second").start())
                assert await until(lambda: placements.shares() == [3, 3], 5)
                processes.append(a_life(settings, "third").start())
                assert await until(lambda: placements.shares() == [2, 2, 2], 5)
                processes[2].kill()
                assert await until(lambda: placements.shares() == [3, 3], 5)
                await training.results(3, training.clients, 5)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    asyncio.run(scenario())


@pytest.mark.alone
def test_models_of_a_dead_worker_continue_within_15_s(tmp_path: Path, compiled: Path) -> None:
    """The real engine on the embedded model, with the default settings: a lease of 6 s, and
    recovery points every 60 s, so everything is replayed from the log.
    """

    async def scenario() -> None:
        settings = CommonSettings(data_dir=tmp_path / "data")
        tenants = [Tenant(2 * n, BASE_MODEL, rounds=10**6, length=12) for n in range(4)]
        async with watched(settings) as (store, placements):
            workers = [JaxWorker(settings, compiled, name) for name in ("first", "second")]
            processes = [await worker.start() for worker in workers]
            try:
                assert await until(lambda: len(placements.epochs) == 2, 60), workers[0].log
                async with Training(store, tenants) as training:
                    await training.results(20, training.clients, 60)
                    moving = placements.held[placements.epochs["second"][0]]
                    assert len(moving) == 2
                    processes[1].kill()
                    killed_s = time.monotonic()
                    # More results than can have been in flight from the dead worker.
                    await training.results(6, moving, 15)
                    print(f"models of a dead worker went on after {age(killed_s):.1f} s")
                await check_models(store, tenants)
            finally:
                for worker, process in zip(workers, processes, strict=True):
                    worker.kill()
                    await process.wait()
        assert workers[0].log.count("is restored:") == 2, workers[0].log

    asyncio.run(scenario())


def age(since_s: float) -> float:
    return time.monotonic() - since_s
