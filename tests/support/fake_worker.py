"""A worker process without a model: ``fake_worker.py <data directory> [<supervisor pid>]``.

Each gradient adds a letter to the file ``begun`` in the data directory, if it exists, and then
takes a second.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tuneserve_engine.backend.base import TrainBatch, TrainResult
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.store.base import Queue
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.remote import RemoteQueue
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.worker import Worker
from tuneserve_server.cli.supervisor import end_with


class Noting(FakeBackend):
    def __init__(self, begun: Path, info: BaseModelInfo) -> None:
        super().__init__(info)
        self._begun = begun

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        if self._begun.exists():
            with self._begun.open("a") as file:
                file.write("x")
            time.sleep(1)
        return super().forward_backward(batch, *between)


async def main(data_dir: Path, info: BaseModelInfo = FAKE_INFO) -> None:
    backend, files = Noting(data_dir / "begun", info), FileStore(data_dir / "files")

    async def connect() -> Queue:
        queue = RemoteQueue(data_dir / "store.sock")
        await queue.connect()
        return queue

    worker = Worker(connect, JobExecutor(backend, files), backend.info, name="worker")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run_until_stopped()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        end_with(int(sys.argv[2]))
    asyncio.run(main(Path(sys.argv[1])))
