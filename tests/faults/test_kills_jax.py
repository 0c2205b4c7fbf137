"""T3: the JAX worker on the embedded model, ended by ``kill -9`` while three tenants train.

Final weights, moments and every returned result equal those of an undisturbed run, bit for bit.
"""

import asyncio
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_kills import opened
from tests.faults.workload import Client, Tenant, state_bits
from tests.redis_server import RedisServer
from tests.support.nightly import at_night
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Store

BASE_MODEL = "tuneserve/tiny"


SMALL_PROGRAMS = {
    "TUNESERVE_COMPILE_AHEAD": "false",
    "TUNESERVE_MAX_CONTEXT_TOKENS": "64",
    "TUNESERVE_BATCH_TOKENS": "128",
    "TUNESERVE_CHUNK_TOKENS": "64",
}
"""Environment of a worker whose programs compile fast and on demand."""


class JaxWorker:
    """A worker process. ``keep`` starts another one whenever it has died.

    ``module`` is the program to run. Other keyword arguments are settings by their names.
    """

    def __init__(
        self,
        settings: CommonSettings,
        compiled: Path,
        name: str = "worker",
        *,
        module: str = "tuneserve_engine.worker",
        **options: object,
    ) -> None:
        self._module = module
        self._environment = {
            **os.environ,
            "TUNESERVE_DATA_DIR": str(settings.data_dir),
            "TUNESERVE_STORE": settings.store,
            "TUNESERVE_JOB_ATTEMPTS": str(settings.job_attempts),
            "TUNESERVE_COMPILE_CACHE": str(compiled),
            **SMALL_PROGRAMS,
            "TUNESERVE_WORKER_NAME": name,
        }
        self.set(**options)
        self._log = settings.data_dir / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    def set(self, **options: object) -> None:
        """Change settings for processes that start from now on."""
        given = {f"TUNESERVE_{each.upper()}": str(value) for each, value in options.items()}
        self._environment.update(given)

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def start(self) -> asyncio.subprocess.Process:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, env=self._environment, stderr=log
            )
        return self._process

    async def keep(self) -> None:
        while True:
            process = await self.start()
            try:
                status = await process.wait()
            finally:
                self.kill()
                await process.wait()
            assert status < 0, f"it ended with {status}: {self.log[-3000:]}"

    def kill(self) -> None:
        assert self._process is not None, "results came without a worker"
        with suppress(ProcessLookupError):
            self._process.kill()


async def train(
    settings: CommonSettings,
    compiled: Path,
    rounds: int,
    kills: int,
    seed: int = 0,
    *,
    new_worker: Callable[..., Any] = JaxWorker,
    **options: object,
) -> dict[str, Any]:
    """The results of three tenants, and the end states of their models.

    ``kills`` workers die. The last dies when a recovery point exists from which its successor can
    continue. ``new_worker`` makes what ``keep`` restarts, with ``options`` as settings.
    """
    tenants = [Tenant(n, BASE_MODEL, rounds, length=12) for n in range(3)]
    worker = new_worker(settings, compiled, point_s=0.5, point_steps=1, **options)
    progress = Progress(kills, sum(len(t.round(0)) + len(t.samples(0)) for t in tenants) * rounds)
    draw = random.Random(seed)

    async def pause() -> None:
        # Called between any two actions of a client: a good place for a worker to die.
        if progress.is_time_to_die(sum(len(client.results) for client in clients), draw):
            while progress.kills == kills and (await store.stats()).points < len(tenants):
                await asyncio.sleep(0.01)
            worker.kill()

    async with opened(settings) as store:
        for tenant in tenants:
            await store.put_record(tenant.session_record())
        clients = [
            Client(tenant, store, pause, random.Random(n)) for n, tenant in enumerate(tenants)
        ]
        keeping = asyncio.create_task(worker.keep())
        playing = asyncio.gather(*(client.run() for client in clients))
        try:
            await asyncio.wait([keeping, playing], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            await playing
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        await check_models(store, tenants)
    assert progress.kills == kills, f"only {progress.kills} were killed"
    root = Path(settings.files_dir)
    return {
        "results": {client.tenant.name: client.results for client in clients},
        "states": {t.name: state_bits(root / t.final_file, BASE_MODEL) for t in tenants},
    }


class Progress:
    """Spreads the kills over a run of ``total`` results."""

    def __init__(self, wanted: int, total: int) -> None:
        self.kills = 0
        self._wanted = wanted
        self._every = total / (wanted + 1)

    def is_time_to_die(self, results: int, draw: random.Random) -> bool:
        at = max(1.0, (self.kills + draw.random()) * self._every)
        due = self.kills < self._wanted and results >= at
        self.kills += due
        return due


async def check_models(store: Store, tenants: list[Tenant]) -> None:
    for tenant in tenants:
        model = await store.get_record(ModelRecord, tenant.model_id)
        assert model is not None and not model.diverged, f"{tenant.model_id} diverged"


def compare(folder: Path, compiled: Path, store: str, rounds: int, kills: int) -> None:
    calm = CommonSettings(data_dir=folder / "calm")
    wanted = asyncio.run(train(calm, compiled, rounds, 0))
    stormy = CommonSettings(data_dir=folder / "stormy", store=store, job_attempts=1000)
    assert asyncio.run(train(stormy, compiled, rounds, kills)) == wanted
    print(f"{stormy.store_kind}: {kills} kills, {3 * rounds} rounds of training, equal bits")


def on(store: str, folder: Path, compiled: Path, rounds: int, kills: int) -> None:
    if store == "sqlite":
        compare(folder, compiled, "", rounds, kills)
        return
    with RedisServer(folder / "redis") as server:
        compare(folder, compiled, server.url, rounds, kills)


@pytest.mark.parametrize("store", ["sqlite", at_night("redis")])
def test_a_few_kills_of_the_jax_worker_change_no_bit(
    tmp_path: Path, compiled: Path, store: str
) -> None:
    on(store, tmp_path, compiled, rounds=4, kills=3 if store == "sqlite" else 1)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_hundred_kills_of_the_jax_worker_change_no_bit(
    tmp_path: Path, compiled: Path, store: str
) -> None:
    on(store, tmp_path, compiled, rounds=60, kills=100)
