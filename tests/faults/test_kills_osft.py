"""T3 for adapters that share the base model's decomposition: OSFT beside LoRA, in the same batches.

The worker is ended by ``kill -9`` while it decomposes, before it has saved a recovery point, and
after that. Weights, moments and every returned result equal those of an undisturbed run, bit for
bit.
"""

import asyncio
import json
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.slow_decomposition import WEIGHT_S
from tests.faults.test_kills import opened
from tests.faults.test_kills_jax import BASE_MODEL, JaxWorker, check_models
from tests.faults.workload import Client, Tenant, no_pause, state_bits
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Store

SLOW = "tests.faults.slow_decomposition"
WEIGHTS = 28
"""Weights of the embedded model: seven in each of four layers."""
HALF_DONE = "decomposed k_proj of layer 1:"
"""The log line when one target is whole and another one has started."""


@dataclass
class OsftTenant(Tenant):
    form: str = "factors"

    @property
    def config(self) -> AdapterConfig:
        return replace(super().config, alpha=0.0, kind="osft", options={"form": self.form})


ROUNDS = 8
LORA = Tenant(0, BASE_MODEL, ROUNDS, length=12)
OSFT = OsftTenant(1, BASE_MODEL, ROUNDS, length=12)
SHORT_FIXED = OsftTenant(2, BASE_MODEL, ROUNDS, length=12, form="short_fixed")


@dataclass
class HeldClient(Client):
    """A client that plays no further than ``held_at``, so that each death finds it at work."""

    held_at: int = ROUNDS

    async def before_round(self, index: int) -> None:
        while index >= self.held_at:
            await asyncio.sleep(0.01)


class Play:
    """Three tenants, and their worker."""

    def __init__(self, store: Store, worker: JaxWorker) -> None:
        self._store = store
        self._worker = worker
        tenants = (LORA, OSFT, SHORT_FIXED)
        self.clients = [HeldClient(t, store, no_pause, random.Random(t.number)) for t in tenants]

    def hold_at(self, index: int) -> None:
        for client in self.clients:
            client.held_at = index

    async def run(self) -> None:
        lora, *osft = self.clients
        for client in self.clients:
            await self._store.put_record(client.tenant.session_record())
        async with asyncio.TaskGroup() as playing:
            for client in osft:
                playing.create_task(client.run())
            # It does not wait for the decomposition, or it would be done before the others have
            # started.
            while not all(client.results for client in osft):
                await asyncio.sleep(0.01)
            playing.create_task(lora.run())

    async def die_three_times(self) -> None:
        """The deaths: while it decomposes, while all train without a point, and with a saved
        point.
        """
        self.hold_at(3)
        while HALF_DONE not in self._worker.log:
            await asyncio.sleep(0.01)
        self._worker.kill()
        while not all(len(client.results) > 1 for client in self.clients):
            await asyncio.sleep(0.01)
        self._worker.set(point_steps=1)
        self._worker.kill()
        self.hold_at(6)
        while not await self._has_points():
            await asyncio.sleep(0.01)
        self._worker.kill()
        self.hold_at(ROUNDS)

    async def _has_points(self) -> bool:
        """Whether all are restored, and there are as many points as models."""
        restored = len(restores(self._worker.log))
        points = (await self._store.stats()).points
        return min(restored, points) >= len(self.clients)


def restores(log: str) -> list[int]:
    """The requests replayed at each restore of a model."""
    return [int(count) for count in re.findall(r"is restored: (\d+) requests replayed", log)]


async def train(folder: Path, compiled: Path, *, calm: bool) -> tuple[dict[str, Any], str]:
    """The results of the tenants with the end states of their models, and the worker's log."""
    settings = CommonSettings(data_dir=folder, job_attempts=1000)
    never: dict[str, object] = {"point_s": 1e6, "point_steps": 10**6}
    worker = JaxWorker(
        settings, compiled, module=SLOW, log_format="json", log_level="debug", **never
    )
    async with opened(settings) as store:
        play = Play(store, worker)
        keeping = asyncio.create_task(worker.keep())
        playing = asyncio.gather(play.run(), *([] if calm else [play.die_three_times()]))
        try:
            await asyncio.wait([keeping, playing], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            await playing
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        tenants = [client.tenant for client in play.clients]
        await check_models(store, tenants)
    root = Path(settings.files_dir)
    files = {t.name: state_bits(root / t.final_file, BASE_MODEL) for t in tenants}
    results = {client.tenant.name: client.results for client in play.clients}
    return {"results": results, "states": files}, worker.log


def mixed_batches(log: str) -> int:
    """The number of ``forward_backward`` batches that the LoRA shared."""
    batches = [json.loads(line) for line in log.splitlines() if " forward_backward of " in line]
    return sum(LORA.name in batch["tenants"] and len(batch["tenants"]) > 1 for batch in batches)


@pytest.mark.nightly
def test_kills_of_a_worker_with_osft_adapters_change_no_bit(
    tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEIGHT_S, "0.1")
    wanted, calm = asyncio.run(train(tmp_path / "calm", compiled, calm=True))
    got, log = asyncio.run(train(tmp_path / "stormy", compiled, calm=False))
    assert got == wanted
    assert mixed_batches(calm + log), "LoRA and OSFT shared no batch"
    # Weights that were whole at its death are not made again, and the others are.
    assert log.count("decomposed q_proj of layer 0:") == 1
    assert log.count("decomposed k_proj of layer 0:") == 2
    again = restores(log)
    assert len(again) == 6, "three models, after two deaths"
    print(
        f"{mixed_batches(calm + log)} mixed batches; requests done again after the deaths: {again}"
    )


def test_a_stopping_worker_does_not_finish_its_decomposition(
    tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter that waited for it is created by the next worker."""

    async def scenario() -> None:
        settings = CommonSettings(data_dir=tmp_path)
        async with opened(settings) as store:
            await store.put_record(OSFT.session_record())
            job, records = OSFT.creation()
            creation = (await store.submit(job, *records)).request_id
            monkeypatch.setenv(WEIGHT_S, "1")
            worker = JaxWorker(settings, compiled, module=SLOW)
            process = await worker.start()
            while "decomposed " not in worker.log:
                assert process.returncode is None, worker.log
                await asyncio.sleep(0.01)
            stopped_s = time.monotonic()
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 10) == 0, worker.log
            took_s = time.monotonic() - stopped_s
            assert worker.log.count("decomposed ") <= 2 + took_s < WEIGHTS
            assert await store.wait(creation, 0.0) is None
            monkeypatch.setenv(WEIGHT_S, "0")
            worker = JaxWorker(settings, compiled, module=SLOW)
            process = await worker.start()
            try:
                outcome = await store.wait(creation, 60.0)
            finally:
                worker.kill()
                await process.wait()
            assert outcome is not None and outcome.rejection is None, worker.log

    asyncio.run(scenario())
