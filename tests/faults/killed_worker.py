"""A real worker process on the fake backend that is killed, or put to sleep, at a failpoint.

It is forked from a server that has imported everything, so a hundred of them take seconds.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.faults.diary import Diary, Watched
from tests.support.fake_backend import FakeBackend
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.process.failpoints import arm
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Queue
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.files_mount import new_files
from tuneserve_engine.store.open import open_queue
from tuneserve_engine.worker import worker
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.lease import LeaseLost
from tuneserve_engine.worker.models.recovery_points import PointPolicy
from tuneserve_engine.worker.scheduling.scheduler import BATCH_S, Scheduler

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

FENCED = 3
"""The exit status of a worker that learned of the end of its lease."""

OFTEN, NEVER = PointPolicy(interval_s=0.2, steps=3), PointPolicy(interval_s=1e9, steps=10**9)

_context = multiprocessing.get_context("forkserver")
# Otherwise every worker would import the store's module late.
_context.set_forkserver_preload(
    ["tests.faults.killed_worker", "tuneserve_engine.store.redis.store"]
)


class BriefLeases(CommonSettings):
    """Leases that expire very soon.

    Deployments may not have them: their workers may pause for longer, and would lose their models
    without any benefit.

    Defined here because a worker that is forked has imported this module already, and would import
    a test's module, with all that it uses, at every start.
    """

    @property
    def store_policy(self) -> StorePolicy:
        return replace(super().store_policy, lease_ttl_s=0.22, job_attempts=1000)


@dataclass(frozen=True)
class Life:
    """A worker process: its settings, its name, and the failpoint at which it dies or sleeps."""

    settings: CommonSettings
    name: str
    kill_at: str = ""
    nth: int = 1
    number: signal.Signals = signal.SIGKILL
    renew_s: float = 0.3
    new_backend: Callable[[], FakeBackend] = FakeBackend
    diary: Path | None = None  # file that records its calls of the store
    log: Path | None = None
    points: PointPolicy = OFTEN
    stop_s: float = worker.STOP_S
    batch_s: float = BATCH_S
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> BaseProcess:
        process = _context.Process(target=_live, args=(self,), daemon=True)
        process.start()
        return process


def _live(life: Life) -> None:
    os.environ.update(life.environment)  # the server of forks has that of the first test
    if life.log is None:
        logging.disable(logging.CRITICAL)
    else:
        logging.basicConfig(filename=life.log, level=logging.INFO)
    if life.kill_at:
        arm(life.kill_at, life.nth, life.number)
    worker.STOP_S = life.stop_s
    try:
        asyncio.run(_work(life))
        status = 0
    except (Fenced, LeaseLost):
        status = FENCED
    logging.shutdown()
    os._exit(status)  # like the real process, which does not wait for an abandoned batch


async def _work(life: Life) -> None:
    backend = life.new_backend()
    executor = JobExecutor(backend, new_files(life.settings))
    policy = worker.WorkerPolicy(points=life.points, renew_s=life.renew_s)
    async with open_queue(life.settings) as connect:
        running = worker.Worker(
            _watching(connect, life.diary),
            executor,
            backend.info,
            name=life.name,
            scheduler=Scheduler(batch_s=life.batch_s),
            policy=policy,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.stop)
        await running.run_until_stopped()


def _watching(
    connect: Callable[[], Awaitable[Queue]], path: Path | None
) -> Callable[[], Awaitable[Queue]]:
    if path is None:
        return connect
    diary = Diary(path)

    async def watched() -> Queue:
        return Watched(await connect(), diary)  # type: ignore[return-value]

    return watched
