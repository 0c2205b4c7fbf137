"""Devices with too little memory and a defect, and workers on them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from tests.faults.killed_worker import Life
from tests.faults.poison import BROKEN
from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tuneserve_engine.backend.base import IntArray, OutOfMemory, TrainBatch, TrainResult
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Queue, Store
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.scheduling.scheduler import Scheduler
from tuneserve_engine.worker.worker import Worker

HEAVY, TOO_HEAVY = range(50, 56), 56
"""Tokens that fit in micro-batches of ``ROOM`` tokens, and one that never fits."""
ROOM = 64

LONG_S = 10.0
"""The time limit of a batch, so long that all waiting jobs share it."""


class Device(Protocol):
    info: BaseModelInfo

    def working(self, settings: CommonSettings, store: Store, log: Path) -> Any:
        """Run a worker without models in memory during the block, with its log."""
        ...


def is_broken_by(tokens: IntArray) -> bool:
    return bool((tokens == BROKEN).any())


def has_no_room_for(tokens: IntArray) -> bool:
    is_heavy = bool(np.isin(tokens, HEAVY).any()) and tokens.size > ROOM
    return is_heavy or bool((tokens == TOO_HEAVY).any())


# --- the fake device, in a process of its own -----------------------------------------------------


class CrampedBackend(FakeBackend):
    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        for micro_batch in batch.micro_batches:
            if is_broken_by(micro_batch.tokens):
                raise RuntimeError("the device is on fire")
            if has_no_room_for(micro_batch.tokens):
                raise OutOfMemory("the device has no room")
        return super().forward_backward(batch, *between)


class FakeDevice:
    info = FAKE_INFO

    @asynccontextmanager
    async def working(
        self, settings: CommonSettings, store: Store, log: Path
    ) -> AsyncIterator[None]:
        life = Life(settings, "worker", new_backend=CrampedBackend, log=log, batch_s=LONG_S)
        process = life.start()
        try:
            yield
            assert process.is_alive(), log.read_text()
        finally:
            process.kill()
            process.join()


# --- the JAX device, in this process --------------------------------------------------------------


class JaxDevice:
    def __init__(self, backend: JaxBackend) -> None:
        self.info = backend.info
        self._backend = backend
        train: dict[bool, Any] = backend._trainer._micro_batches.train
        train[False] = partial(_in_little_memory, train[False])

    @asynccontextmanager
    async def working(
        self, settings: CommonSettings, store: Store, log: Path
    ) -> AsyncIterator[None]:
        async def connect() -> Queue:
            return store

        executor = JobExecutor(self._backend, FileStore(settings.files_dir))
        scheduler = Scheduler(batch_s=LONG_S)
        worker = Worker(connect, executor, self.info, name="worker", scheduler=scheduler)
        handler = logging.FileHandler(log)
        logger = logging.getLogger("tuneserve_engine")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        task = asyncio.create_task(worker.run_until_stopped())
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            logger.removeHandler(handler)
            handler.close()


def _in_little_memory(train: Callable[..., Any], key: Any, *arguments: Any) -> Any:
    *_, micro_batch = arguments
    if is_broken_by(micro_batch.tokens):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the program is on fire")
    if has_no_room_for(micro_batch.tokens):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    return train(key, *arguments)
