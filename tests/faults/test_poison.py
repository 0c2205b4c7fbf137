"""T9: poison beside healthy tenants.

On either device, a world runs once with every offender in it and once without. Each offender gets
one typed error, and no other tenant's results or states differ in a bit.
"""

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.devices import HEAVY as HEAVY_TOKENS
from tests.faults.devices import TOO_HEAVY, Device, FakeDevice, JaxDevice
from tests.faults.poison import Poison, corpus
from tests.faults.test_kills import opened
from tests.faults.workload import (
    Client,
    Tenant,
    file_id,
    no_pause,
    state_bits,
    without_cache_hits,
)
from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    OptimStep,
    Outcome,
    SaveWeights,
    encode,
)
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, Record
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Store

ROUNDS = 6
VOCABULARY = 50
HEALTHY, HEAVY, TWIN, BEFORE, FRESH, DIVERGING, OFFENDERS = (0, 1), 2, 4, 6, 8, 10, 100
SEED = 99  # of the twin and of all offenders
ANSWERS = 5  # and one more, of an old checkpoint


@dataclass
class World:
    """A store and a worker, all results, and the place of the files."""

    device: Device
    store: Store
    files: Path
    log: Path
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)  # of models, in order
    results: dict[str, Any] = field(default_factory=dict)  # of healthy tenants
    answers: list[bytes] = field(default_factory=list)  # of an old checkpoint

    def tenant(self, number: int, length: int = 6, vocabulary: int = VOCABULARY) -> Tenant:
        return Tenant(number, self.device.info.name, ROUNDS, vocabulary, length)

    async def ended(self, job: Job, *records: Record) -> Outcome:
        request_id = (await self.store.submit(job, *records)).request_id
        outcome = await self.store.wait(request_id, 240)
        assert outcome is not None, f"{job.kind} of {job.tenant} did not end"
        return outcome

    async def play(self, tenant: Tenant, *requests: tuple[JobKind, bytes]) -> None:
        """Create a model with the common seed and send these requests, all at once."""
        await self.store.put_record(tenant.session_record())
        job, (model,) = tenant.creation()
        config = replace(tenant.config, seed=SEED)
        job = replace(job, payload=encode(CreateModel(tenant.base_model, config)))
        jobs = [tenant.job(1 + n, *request) for n, request in enumerate(requests)]
        calls = [self.ended(job, model), *(self.ended(each) for each in jobs)]
        self.outcomes[tenant.name] = list(await asyncio.gather(*calls))

    def save(self, tenant: Tenant, name: str = "final") -> tuple[JobKind, bytes]:
        file = file_id(tenant.number, name)
        kind = CheckpointKind.TRAINING
        key = f"tinker://{tenant.model_id}/{kind.value}/{name}"
        record = CheckpointRecord(
            key,
            tenant.name,
            tenant.model_id,
            kind,
            name,
            file,
            tenant.base_model,
            tenant.config,
            0.0,
        )
        return JobKind.SAVE_WEIGHTS, encode(SaveWeights(kind, file, record))

    def state(self, tenant: Tenant) -> AdapterState:
        return checkpoint.read_checkpoint(self.files / tenant.final_file, tenant.base_model)

    def bits(self, tenant: Tenant) -> list[object]:
        return state_bits(self.files / tenant.final_file, tenant.base_model)

    # --- who is there -------------------------------------------------------------------------

    async def healthy(self, tenant: Tenant) -> None:
        await self.store.put_record(tenant.session_record())
        client = Client(tenant, self.store, no_pause, random.Random(tenant.number))
        await client.run()
        self.results[tenant.name] = client.results

    async def twin(self, tenant: Tenant, poison: Poison | None = None) -> None:
        """Run the requests of an offender, with or without its offence."""
        bad = [(poison.kind, poison.payload)] if poison else []
        good, another = self.gradients()
        first, second = (good, *bad, another, STEP), (good, *bad, STEP)
        await self.play(tenant, *first, *second, self.save(tenant))

    def gradients(self) -> list[tuple[JobKind, bytes]]:
        return [(job.kind, job.payload) for job in self.tenant(TWIN).round(0)[:2]]

    async def reborn(self) -> None:
        """Create a model in the room of one that was trained and deleted."""
        before = self.tenant(BEFORE)
        good, another = self.gradients()
        await self.play(before, good, STEP, another)
        await self.store.end_session(before.session, "finished")
        unload = Job(before.name, JobKind.UNLOAD_MODEL, f"{before.model_id}/unload", 0)
        assert (await self.ended(replace(unload, model_id=before.model_id))).rejection is None
        await self.fresh()

    async def fresh(self) -> None:
        """Create a model and take a step without any gradient."""
        tenant = self.tenant(FRESH)
        await self.play(tenant, STEP, self.save(tenant))

    async def diverging(self) -> None:
        """Take a step that makes weights too large to compute with."""
        tenant = self.tenant(DIVERGING)
        good, another = self.gradients()
        leap = JobKind.OPTIM_STEP, encode(OptimStep(AdamwParams(learning_rate=1e37)))
        await self.play(tenant, good, leap, another, self.save(tenant))

    async def sampling(self, tenant: Tenant) -> None:
        """Sample a tenant's first checkpoint while it trains, and a few times in any case."""
        first, *_ = tenant.samples(0)
        scope, number = "s-sampler:sample:0", 0
        while tenant.name not in self.results or number <= ANSWERS:
            if (self.files / tenant.snapshot(0)).exists():
                outcome = await self.ended(replace(first, tenant="else", scope=scope, seq=number))
                assert outcome.rejection is None, outcome.rejection
                self.answers.append(without_cache_hits(outcome.body))
                number += 1
            await asyncio.sleep(0.01)


STEP = JobKind.OPTIM_STEP, encode(OptimStep(AdamwParams(learning_rate=0.01, weight_decay=0.01)))


async def run_world(device: Device, folder: Path, poisons: list[Poison]) -> World:
    settings = CommonSettings(data_dir=folder / "data")
    async with opened(settings) as store:
        world = World(device, store, settings.files_dir, folder / "log")
        everybody = [world.healthy(world.tenant(number)) for number in HEALTHY]
        everybody.append(world.healthy(world.tenant(HEAVY, vocabulary=HEAVY_TOKENS.stop)))
        everybody.append(world.twin(world.tenant(TWIN)))
        if poisons:
            everybody += [world.twin(offender(world, n), each) for n, each in enumerate(poisons)]
            everybody += [world.reborn(), world.diverging()]
            everybody.append(world.sampling(world.tenant(HEALTHY[1])))
        else:
            everybody.append(world.fresh())
        async with device.working(settings, store, world.log), asyncio.timeout(280):
            await asyncio.gather(*everybody)
        return world


def offender(world: World, number: int) -> Tenant:
    return world.tenant(OFFENDERS + 2 * number)


# --- what must be true ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fake", "jax"])
def device(request: pytest.FixtureRequest) -> Device:
    """The device. On JAX it has a model of random weights."""
    if request.param == "fake":
        return FakeDevice()
    new_backend: Callable[[], JaxBackend] = request.getfixturevalue("new_backend")
    return JaxDevice(new_backend())


@pytest.fixture(scope="module")
def poisons(device: Device) -> list[Poison]:
    return corpus(device.info, [TOO_HEAVY] * 20)


@pytest.fixture(scope="module")
def calm(device: Device, tmp_path_factory: pytest.TempPathFactory) -> World:
    return asyncio.run(run_world(device, tmp_path_factory.mktemp("calm"), []))


@pytest.fixture(scope="module")
def poisoned(
    device: Device, poisons: list[Poison], tmp_path_factory: pytest.TempPathFactory
) -> World:
    return asyncio.run(run_world(device, tmp_path_factory.mktemp("poisoned"), poisons))


def test_healthy_tenants_get_the_same_bits(calm: World, poisoned: World) -> None:
    assert poisoned.results == calm.results
    for number in (*HEALTHY, HEAVY, TWIN):
        tenant = calm.tenant(number)
        assert poisoned.bits(tenant) == calm.bits(tenant), tenant.name


def test_each_offence_ends_in_one_typed_error(poisoned: World, poisons: list[Poison]) -> None:
    for number, poison in enumerate(poisons):
        rejections = [o.rejection for o in poisoned.outcomes[offender(poisoned, number).name]]
        assert [n for n, each in enumerate(rejections) if each] == [2, 6], poison.name
        for rejection in (rejections[2], rejections[6]):
            assert rejection is not None and poison.error in rejection.message, poison.name
            assert rejection.category == poison.category, poison.name


def test_an_offence_leaves_no_trace(calm: World, poisoned: World, poisons: list[Poison]) -> None:
    """Steps apply the gradients before and after the offence, and nothing of it."""
    twin = calm.bits(calm.tenant(TWIN))
    for number, poison in enumerate(poisons):
        assert poisoned.bits(offender(poisoned, number)) == twin, poison.name


def test_the_worlds_had_the_intended_failures(calm: World, poisoned: World) -> None:
    """Offenders made whole batches fail, and a healthy tenant's requests fit only when halved."""
    failed = re.findall(
        r"no room for a unit of (\d+) jobs|a unit of (\d+) jobs failed", poisoned.log.read_text()
    )
    assert max(int(full or broken) for full, broken in failed) > 2
    assert "no room for forward_backward, halved 0 times" in calm.log.read_text()


def test_overflowing_weights_fail_later_computations(poisoned: World) -> None:
    *_, stepped, gradient, saved = poisoned.outcomes[poisoned.tenant(DIVERGING).name]
    assert stepped.rejection is None and saved.rejection is None
    assert gradient.rejection is not None and gradient.rejection.category == "user"
    assert "not finite; nothing was accumulated" in gradient.rejection.message


def test_a_new_model_has_nothing_of_a_deleted_one(calm: World, poisoned: World) -> None:
    tenant = poisoned.tenant(FRESH)
    assert poisoned.bits(tenant) == calm.bits(tenant)
    state = poisoned.state(tenant)
    assert {name for name, array in state.weights.items() if not array.any()} == {
        name for name in state.weights if name.endswith(".B")
    }
    for moment in (state.first_moment, state.second_moment):
        assert not any(array.any() for array in moment.values())


def test_an_old_checkpoint_gives_the_same_samples_while_its_model_trains(poisoned: World) -> None:
    """``test_healthy_tenants_get_the_same_bits`` shows that training is not affected."""
    assert len(poisoned.answers) > ANSWERS
    assert len(set(poisoned.answers)) == 1
