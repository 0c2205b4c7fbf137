"""A worker's metrics on their way to the store."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.fake_backend import FAKE_INFO
from tests.support.memory_store import MemoryStore
from tuneserve_engine.store.base import Queue, Store
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.remote import RemoteQueue, serve
from tuneserve_engine.telemetry.metric_names import WORKER_METRICS
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.lease import StoreSession
from tuneserve_engine.worker.worker import Worker, WorkerPolicy

if TYPE_CHECKING:
    from tuneserve_engine.backend.jax.backend import JaxBackend


@dataclass
class Counting:
    """Metrics that change with every reading."""

    looks: list[float] = field(default_factory=list)

    def __call__(self) -> dict[str, float]:
        self.looks.append(len(self.looks) + 1.0)
        return {"units_total": self.looks[-1], "ready": 0}  # an int is a number too


async def told(store: Store) -> dict[str, float]:
    (served,) = await store.base_models()
    return dict(served.metrics.get("worker", {}))


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0.002)


async def renew_thrice(store: Store, queue: Queue) -> None:
    metrics = Counting()

    async def connect() -> Queue:
        return queue

    link = StoreSession(connect, "worker", FAKE_INFO, lambda _: None, 0.01, metrics)
    keeping = asyncio.create_task(link.run_session())
    await until(lambda: len(metrics.looks) >= 3)
    await until(lambda: link.is_up)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    found = await told(store)
    assert found["ready"] == 0.0
    assert metrics.looks[-1] - 1 <= found["units_total"] <= metrics.looks[-1]


def test_every_renewal_reports_the_current_metrics() -> None:
    async def main() -> None:
        store = MemoryStore()
        await renew_thrice(store, store)
        await store.close()

    asyncio.run(main())


def test_metrics_pass_through_the_socket(tmp_path: Path) -> None:
    async def main() -> None:
        store = MemoryStore()
        queue = RemoteQueue(tmp_path / "socket")
        async with serve(store, tmp_path / "socket"):
            await queue.connect()
            await renew_thrice(store, queue)
            await queue.close()
        await store.close()

    asyncio.run(main())


def test_a_worker_reports_every_metric_and_no_other(tmp_path: Path, backend: "JaxBackend") -> None:
    async def connect() -> Queue:
        return MemoryStore()

    worker = Worker(
        connect,
        JobExecutor(backend, FileStore(tmp_path)),
        backend.info,
        name="worker",
        policy=WorkerPolicy(metrics=lambda: backend.metrics),
    )
    compiling_ahead = {"ready"}
    from_the_first_osft_on = {"weights_to_decompose", "weights_decomposed"}
    told = worker._metrics().keys()
    assert told | compiling_ahead | from_the_first_osft_on == WORKER_METRICS.keys()
