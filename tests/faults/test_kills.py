"""T2: real workers, ended by SIGKILL at random places of their work, over a real store.

No acknowledged request is lost. Results and states equal those of an undisturbed run, bit for bit.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killed_worker import KILL_POINTS, Life
from tests.faults.simulation import Faults, play
from tests.faults.workload import Client, Tenant, state_bits
from tests.redis_server import RedisServer
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import remote
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.files_mount import new_files
from tuneserve_engine.store.open import open_store

ROUNDS = 12


@asynccontextmanager
async def opened(settings: CommonSettings) -> AsyncIterator[Store]:
    """The store as the API process opens it."""
    store = await open_store(settings)
    try:
        if settings.store_kind == "sqlite":
            async with remote.serve(store, settings.store_socket):
                yield store
        else:
            yield store
    finally:
        await store.close()


class Killer:
    """Keeps a worker running that dies again and again."""

    def __init__(
        self, settings: CommonSettings, seed: int, kills: int, points: Sequence[str] = KILL_POINTS
    ) -> None:
        self.settings = settings
        self.points = points
        self.draw = random.Random(seed)
        self.wanted = kills
        self.kills: dict[str, int] = {}

    @property
    def is_done(self) -> bool:
        return sum(self.kills.values()) >= self.wanted

    async def run(self) -> None:
        while True:
            environment = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
            life = Life(self.settings, "worker", environment=environment)
            if not self.is_done:
                point = self.draw.choice(self.points)
                life = replace(life, kill_at=point, nth=self.draw.randint(1, 4))
            process = await asyncio.to_thread(life.start)
            try:
                # A worker that does not reach its failpoint would keep the others from dying.
                await asyncio.to_thread(process.join, None if self.is_done else 3.0)
                if process.exitcode == -signal.SIGKILL:
                    self.kills[life.kill_at] = self.kills.get(life.kill_at, 0) + 1
                else:
                    assert process.exitcode is None, f"a worker ended with {process.exitcode}"
            finally:
                process.kill()
                await asyncio.to_thread(process.join)


async def disturbed(
    settings: CommonSettings, kills: int, seed: int, points: Sequence[str] = KILL_POINTS
) -> list[dict[str, Any]]:
    """Groups of three tenants, one after the other until enough workers were killed."""
    async with opened(settings) as store:
        killer = Killer(settings, seed, kills, points)
        killing = asyncio.create_task(killer.run())
        groups: list[dict[str, Any]] = []
        try:
            while not killer.is_done:
                playing = asyncio.create_task(play_group(store, settings, len(groups)))
                await asyncio.wait([playing, killing], return_when=asyncio.FIRST_COMPLETED)
                if killing.done():
                    killing.result()
                groups.append(await playing)
        finally:
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
    print(f"{settings.store_kind}: {killer.kills} killed, {len(groups)} groups of three models")
    return groups


async def play_group(store: Store, settings: CommonSettings, index: int) -> dict[str, Any]:
    async def pause() -> None:
        await asyncio.sleep(0)

    tenants = [Tenant(3 * index + n, FAKE_INFO.name, ROUNDS) for n in range(3)]
    for tenant in tenants:
        await store.put_record(tenant.session_record())
    clients = [Client(tenant, store, pause, random.Random(index)) for tenant in tenants]
    await asyncio.gather(*(client.run() for client in clients))
    for tenant in tenants:
        model = await store.get_record(ModelRecord, tenant.model_id)
        assert model is not None and not model.diverged
    files = new_files(settings)
    folders = [await asyncio.to_thread(files.path, tenant.final_file) for tenant in tenants]
    return {
        "results": {client.tenant.name: client.results for client in clients},
        "states": {
            tenant.name: state_bits(folder, FAKE_INFO.name)
            for tenant, folder in zip(tenants, folders, strict=True)
        },
    }


def undisturbed(folder: Path, group: int) -> dict[str, Any]:
    return play(0, folder, Faults(), rounds=ROUNDS, first=3 * group)[0]


def check(
    settings: CommonSettings,
    tmp_path: Path,
    kills: int,
    seed: int,
    points: Sequence[str] = KILL_POINTS,
) -> None:
    groups = asyncio.run(disturbed(settings, kills, seed, points))
    for index, group in enumerate(groups):
        assert group == undisturbed(tmp_path / f"undisturbed-{index}", index), f"group {index}"


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_killed_workers_lose_nothing(tmp_path: Path, store: str) -> None:
    run_on(store, tmp_path, kills=50)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_two_thousand_killed_workers_lose_nothing(tmp_path: Path, store: str) -> None:
    run_on(store, tmp_path, kills=2000)


def run_on(store: str, tmp_path: Path, kills: int) -> None:
    settings = CommonSettings(data_dir=tmp_path / "data", job_attempts=10**6)
    if store == "sqlite":
        check(settings, tmp_path, kills, seed=1)
        return
    with RedisServer(tmp_path / "redis") as server:
        check(settings.model_copy(update={"store": server.url}), tmp_path, kills, seed=2)
