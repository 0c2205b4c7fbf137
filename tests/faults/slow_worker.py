"""A worker whose device takes time: ``slow_worker.py <data directory>``.

A micro-batch takes ``TOKEN_S`` per token of its chunks, padding included, without using the
processor: as on a GPU. Batches, the tenants charged for them and the waiting tenants are written to
``batches.jsonl``.
"""

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.fake_backend import FakeBackend
from tuneserve_engine.backend.base import MicroBatch, TrainBatch, TrainResult
from tuneserve_engine.core.jobs import Job
from tuneserve_engine.core.shapes import multiple_from
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.store.base import Queue
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.remote import RemoteQueue
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.scheduling.cost_model import CostModel
from tuneserve_engine.worker.scheduling.runnable import RunningSample
from tuneserve_engine.worker.scheduling.scheduler import Scheduler
from tuneserve_engine.worker.worker import Worker

CHUNK, TOKEN_S = 512, 0.0004
BATCHES = "batches.jsonl"


class SlowBackend(FakeBackend):
    def __init__(self) -> None:
        super().__init__()
        self._static_shapes = replace(self._static_shapes, chunk=CHUNK, requested_tokens=CHUNK)

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        started_s = time.monotonic()
        result = super().forward_backward(batch, *between)
        needed_s = TOKEN_S * sum(self._computed(micro_batch) for micro_batch in batch.micro_batches)
        time.sleep(max(0.0, started_s + needed_s - time.monotonic()))
        return result

    def _computed(self, micro_batch: MicroBatch) -> int:
        return multiple_from(
            micro_batch.blocks * self.static_shapes.block, self.static_shapes.chunk
        )


class Noting(Scheduler):
    """Writes a line per batch: kind, seconds, each tenant's requests, and who has work."""

    def __init__(self, weights: dict[str, float], path: Path) -> None:
        super().__init__(weights, costs=CostModel(SlowBackend().static_shapes))
        self._file = path.open("w")
        self._waiting: list[str] = []

    def next_batch(
        self, pending: Sequence[Job], running_samples: Sequence[RunningSample] = ()
    ) -> list[Job]:
        self._waiting = sorted({job.tenant for job in pending})
        return super().next_batch(pending, running_samples)

    def charge(
        self, batch: Sequence[Job], seconds: float, work: Mapping[str, float] | None = None
    ) -> None:
        requests = Counter(job.tenant for job in batch)
        line = {
            "kind": batch[0].kind,
            "seconds": seconds,
            "requests": requests,
            "waiting": self._waiting,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        super().charge(batch, seconds, work)


async def main(data_dir: Path) -> None:
    backend, files = SlowBackend(), FileStore(data_dir / "files")
    scheduler = Noting(WorkerSettings().tenant_weights, data_dir / BATCHES)

    async def connect() -> Queue:
        queue = RemoteQueue(data_dir / "store.sock")
        await queue.connect()
        return queue

    executor = JobExecutor(backend, files)
    worker = Worker(connect, executor, backend.info, name="worker", scheduler=scheduler)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run_until_stopped()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
