"""Devices with too little memory and a defect, and workers on them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from tests.faults.killed_worker import Life
from tests.faults.poison import BROKEN
from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.backend.base import TrainResult, TrainUnit
from tuneserve_engine.backend.fake import FAKE_INFO, FakeBackend
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.config import CommonSettings
from tuneserve_engine.files import FileStore
from tuneserve_engine.operations import Operations
from tuneserve_engine.queue.base import Queue, Store
from tuneserve_engine.scheduler import Scheduler
from tuneserve_engine.worker import Worker

HEAVY, TOO_HEAVY = range(50, 56), 56
"""Tokens for which the JAX device has room in a row of its own, and one for which it never has."""

LONG_S = 10.0
"""Of a unit, so that whatever waits shares it."""


class Device(Protocol):
    """``too_heavy`` are tokens of a datum that never fits. ``heavy`` are the length and the
    vocabulary with which some requests fit only when halved."""

    info: BaseModelInfo
    too_heavy: list[int]
    heavy: tuple[int, int]

    def working(self, settings: CommonSettings, store: Store, log: Path) -> Any:
        """A worker in the block, with an empty memory, and its log."""
        ...


# --- the fake device, in a process of its own -----------------------------------------------------


class CrampedBackend(FakeBackend):
    def __init__(self) -> None:
        super().__init__(replace(FAKE_INFO, context_length=1024), memory_tokens=128)

    def forward_backward(self, unit: TrainUnit) -> TrainResult:
        if any((batch.tokens == BROKEN).any() for batch in unit.batches):
            raise RuntimeError("the device is on fire")
        return super().forward_backward(unit)


class FakeDevice:
    info = CrampedBackend().info
    too_heavy = [1] * 512
    heavy = 20, 50

    @asynccontextmanager
    async def working(
        self, settings: CommonSettings, store: Store, log: Path
    ) -> AsyncIterator[None]:
        life = Life(settings, "worker", new_backend=CrampedBackend, log=log, unit_s=LONG_S)
        process = life.start()
        try:
            yield
            assert process.is_alive(), log.read_text()
        finally:
            process.kill()
            process.join()


# --- the JAX device, in this process --------------------------------------------------------------


class JaxDevice:
    heavy = 6, HEAVY.stop

    def __init__(self, backend: JaxBackend) -> None:
        self.info = backend.info
        self.too_heavy = [TOO_HEAVY] * 20
        self._backend = backend
        backend._train = partial(_in_little_memory, backend._train)

    @asynccontextmanager
    async def working(
        self, settings: CommonSettings, store: Store, log: Path
    ) -> AsyncIterator[None]:
        async def connect() -> Queue:
            return store

        operations = Operations(self._backend, FileStore(settings.files_dir))
        scheduler = Scheduler(unit_s=LONG_S)
        worker = Worker(connect, operations, self.info, name="worker", scheduler=scheduler)
        handler = logging.FileHandler(log)
        logger = logging.getLogger("tuneserve_engine")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        task = asyncio.create_task(worker.run())
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            logger.removeHandler(handler)
            handler.close()


def _in_little_memory(train: Callable[..., Any], weights: Any, scale: Any, rows: Any) -> Any:
    tokens = np.asarray(rows.tokens)
    if (tokens == BROKEN).any():
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the program is on fire")
    heavy = np.isin(tokens, HEAVY).any() and len(tokens) > 1
    if heavy or (tokens == TOO_HEAVY).any():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    return train(weights, scale, rows)
