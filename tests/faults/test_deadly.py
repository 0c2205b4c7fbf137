"""T9, the worst case: requests that kill the worker.

After the first death, possible causes run alone. At the third, only the cause ends.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.deadly_backend import DEADLY, DEADLY_RANK, NewDeadlyBackend, deadly_gradient
from tests.faults.killed_worker import Life
from tests.faults.simulation import Faults, play
from tests.faults.test_kills import opened
from tests.faults.workload import Client, Tenant, gradient_body, no_pause, state_bits
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.jobs import CreateModel, Job, JobKind, Outcome, SampleCommand, encode
from tuneserve_engine.core.records import ModelRecord, ModelStatus
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Store

ATTEMPTS = 3
ROUNDS = 12
DEADLY_SEED = 4242
FIRST = 30  # number of the first healthy tenant


@dataclass
class Mourned:
    """Keeps a worker running, and remembers how each one ended."""

    settings: CommonSettings
    new_backend: NewDeadlyBackend
    ends: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._keep())
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep(self) -> None:
        life = Life(self.settings, "worker", new_backend=self.new_backend)
        while True:
            process = life.start()
            try:
                while process.is_alive():
                    await asyncio.sleep(0.01)
                assert process.exitcode is not None and process.exitcode < 0, process.exitcode
                self.ends.append(-process.exitcode)
            finally:
                process.kill()
                process.join()


async def ended(store: Store, job: Job, *records: Any) -> Outcome:
    request_id = (await store.submit(job, *records)).request_id
    outcome = await store.wait(request_id, 20)
    assert outcome is not None, f"{job.kind} of {job.tenant} did not end"
    return outcome


async def gradients(store: Store, tenant: Tenant, token: int) -> list[Outcome]:
    """Create a model and run a good gradient, a deadly one, a good one, and a step."""
    job, records = tenant.creation()
    await store.put_record(tenant.session_record())
    outcomes = [await ended(store, job, *records)]
    good, another, step, *_ = tenant.round(0)
    deadly = replace(another, payload=gradient_body([token, 1], [1, 2], None))
    jobs = [good, deadly, replace(another, seq=3, position=3), replace(step, seq=4, position=4)]
    return outcomes + list(await asyncio.gather(*(ended(store, each) for each in jobs)))


async def creation(store: Store, tenant: Tenant) -> list[Outcome]:
    job, records = tenant.creation()
    config = replace(tenant.config, rank=DEADLY_RANK)
    deadly = replace(job, payload=encode(CreateModel(tenant.base_model, config)))
    outcomes = await asyncio.gather(
        ended(store, deadly, *records), ended(store, tenant.round(0)[0])
    )
    model = await store.get_record(ModelRecord, tenant.model_id)
    assert model is not None and model.status is ModelStatus.FAILED
    return list(outcomes)


async def sample(store: Store, tenant: Tenant, token: int) -> list[Outcome]:
    jobs = [
        Job(
            tenant.name,
            JobKind.SAMPLE,
            f"{tenant.session}:sample:0",
            number,
            encode(SampleCommand([prompt, 2], seed=number, max_tokens=3)),
            base_model=tenant.base_model,
        )
        for number, prompt in ((DEADLY_SEED, token), (0, 1))
    ]
    return list(await asyncio.gather(*(ended(store, job) for job in jobs)))


async def train(store: Store, tenant: Tenant) -> dict[tuple[str, int], bytes]:
    await store.put_record(tenant.session_record())
    client = Client(tenant, store, no_pause, random.Random(tenant.number))
    await client.run()
    return client.results


def test_a_request_that_kills_the_worker_ends_alone(tmp_path: Path) -> None:
    """Four of them run beside tenants that lose nothing: neither results nor bits."""
    settings = CommonSettings(data_dir=tmp_path / "data", job_attempts=ATTEMPTS)
    healthy = [Tenant(FIRST + n, FAKE_INFO.name, ROUNDS) for n in range(3)]
    offenders = [Tenant(2 * n, FAKE_INFO.name, 1) for n in range(4)]
    settings.data_dir.mkdir()
    worker = Mourned(settings, NewDeadlyBackend(settings.data_dir / "deaths"))

    async def main() -> tuple[list[Any], list[list[Outcome]]]:
        async with opened(settings) as store, worker.running(), asyncio.timeout(25):
            training = [asyncio.create_task(train(store, tenant)) for tenant in healthy]
            abort, segfault = DEADLY
            outcomes = await asyncio.gather(
                gradients(store, offenders[0], abort),
                gradients(store, offenders[1], segfault),
                creation(store, offenders[2]),
                sample(store, offenders[3], segfault),
            )
            return await asyncio.gather(*training), outcomes

    results, outcomes = asyncio.run(main())
    for deadly, of_one in zip((2, 2, 0, 0), outcomes, strict=True):
        rejection = of_one[deadly].rejection
        assert rejection is not None and rejection.category == "server"
        assert "3 workers stopped while they ran this request" in rejection.message
    rejected = [[bool(outcome.rejection) for outcome in of_one] for of_one in outcomes]
    alone = [False, False, True, False, False]
    assert rejected == [alone, alone, [True, True], [True, False]]
    guilty = [deadly_gradient(tenant.model_id) for tenant in offenders[:2]]
    check_deaths(worker, [*guilty, offenders[2].model_id, f"None/{DEADLY_SEED}"])
    wanted = play(0, tmp_path / "undisturbed", Faults(), rounds=ROUNDS, first=FIRST)[0]
    assert {t.name: each for t, each in zip(healthy, results, strict=True)} == wanted["results"]
    files = settings.files_dir
    assert {t.name: state_bits(files / t.final_file, FAKE_INFO.name) for t in healthy} == (
        wanted["states"]
    )


def check_deaths(worker: Mourned, guilty: list[str]) -> None:
    """The guilty requests share a batch when they first kill a worker, but not again."""
    deaths = worker.new_backend.noted()
    shared = max(deaths, key=len)
    print(f"{len(deaths)} workers died, one of them of a unit of {len(shared)}: {shared}")
    assert len(worker.ends) == len(deaths)
    assert {*worker.ends} == {*DEADLY.values()}
    for name in guilty:
        _, *later = [batch for batch in deaths if name in batch]
        assert later == [[name]] * (ATTEMPTS - 1)
    companions = {name for batch in deaths for name in batch} - {*guilty}
    assert companions, "no healthy request shared a unit with a deadly one"
