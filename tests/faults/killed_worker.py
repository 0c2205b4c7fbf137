"""A real worker process on the fake backend that ends by SIGKILL at a kill point.

Forked from a server that has everything imported, so that a hundred of them take seconds.
"""

import asyncio
import logging
import multiprocessing
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tuneserve_engine.backend.fake import FAKE_INFO, FakeBackend
from tuneserve_engine.config import CommonSettings
from tuneserve_engine.files import FileStore
from tuneserve_engine.kill_points import arm
from tuneserve_engine.operations import Operations
from tuneserve_engine.queue.opening import open_queue
from tuneserve_engine.residents import PointPolicy
from tuneserve_engine.worker import Worker, WorkerPolicy

KILL_POINTS = (
    "worker-took",
    "worker-before-unit",
    "worker-after-unit",
    "worker-before-finish",
    "worker-finished",
    "point-before-file",
    "point-after-file",
    "point-saved",
    "file-before-rename",
    "file-after-rename",
)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.killed_worker"])


@dataclass(frozen=True)
class Life:
    """A worker process: where it works, as whom, and where it is to die."""

    settings: CommonSettings
    name: str
    kill_at: str = ""
    nth: int = 1

    def start(self) -> BaseProcess:
        process = _context.Process(target=_live, args=(self,), daemon=True)
        process.start()
        return process


def _live(life: Life) -> None:
    logging.disable(logging.CRITICAL)
    if life.kill_at:
        arm(life.kill_at, life.nth)
    asyncio.run(_work(life))


async def _work(life: Life) -> None:
    operations = Operations(FakeBackend(), FileStore(Path(life.settings.files_dir)))
    policy = WorkerPolicy(points=PointPolicy(interval_s=0.2, steps=3), renew_s=0.3)
    async with open_queue(life.settings) as connect:
        await Worker(connect, operations, FAKE_INFO, name=life.name, policy=policy).run()
