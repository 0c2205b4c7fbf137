"""A store and a recovery point as a release wrote them: a later one must read them, or refuse.

``golden/store-<n>.sql`` is the dump of a store of version n whose worker was killed: a model that
was created, got two gradients and a step, was saved, and got another gradient that no point covers.
Keep them when the format changes, and add one of the new format beside them.
"""

import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.engine.worker.models.test_recovery import NEVER, finish_round
from tests.support.worker_bench import Bench, run
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store.base import SamplerClient
from tuneserve_engine.store.sqlite.schema import VERSION

GOLDEN = Path(__file__).with_name("golden")


def laid_out(root: Path, version: int) -> None:
    """Makes ``root`` the directory of the killed service."""
    shutil.copytree(GOLDEN / "files", root / "files")
    connection = sqlite3.connect(root / "store.db")
    connection.executescript((GOLDEN / f"store-{version}.sql").read_text())
    connection.close()


@pytest.mark.parametrize("version", range(2, VERSION + 1))
def test_an_earlier_store_goes_on_bit_for_bit(tmp_path: Path, version: int) -> None:
    states = []

    async def undisturbed(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        for token in (1, 2):
            await bench.ok(await bench.gradient("a", token))
        await bench.ok(await bench.step("a"))
        await bench.ok(await bench.gradient("a", 3))
        states.append(await finish_round(bench, "a"))

    async def continued(bench: Bench) -> None:
        bench.positions["a"] = 5
        states.append(await finish_round(bench, "a"))
        assert len(bench.backend.gradients) == 2  # the one that no point covers, and the new one
        model = await bench.store.get(ModelRecord, "a")
        assert model is not None and not model.diverged

    run(tmp_path / "undisturbed", undisturbed)
    root = tmp_path / "golden"
    laid_out(root, version)
    run(root, continued, NEVER)
    assert states[0] == states[1]


@pytest.mark.parametrize("version", range(2, VERSION + 1))
def test_an_earlier_store_counts_what_is_used_from_now_on(tmp_path: Path, version: int) -> None:
    async def scenario(bench: Bench) -> None:
        before = {each.tenant: each.total.requests for each in await bench.store.usage()}
        bench.positions["a"] = 5
        await bench.ok(await bench.step("a"))
        (used,) = await bench.store.usage("a")
        assert used.total.requests == before.get("a", 0) + 1
        assert [point.position for point in await bench.store.curve("a", after=4)] == [5]

    laid_out(tmp_path / "golden", version)
    run(tmp_path / "golden", scenario, NEVER)


@pytest.mark.parametrize("version", range(2, VERSION + 1))
def test_an_earlier_store_tells_of_the_samples_that_end_in_it(tmp_path: Path, version: int) -> None:
    async def scenario(bench: Bench) -> None:
        request_id = await bench.sample("a", 1)
        await bench.ok(request_id)
        client = SamplerClient("a", "a:sample", 0)
        told = await bench.store.completions(client, after=0, limit=9, timeout_s=0)
        assert [(each.request_id, each.number) for each in told] == [(request_id, 1)]

    laid_out(tmp_path / "golden", version)
    for _ in range(2):  # opened again, it is of this version already
        run(tmp_path / "golden", scenario, NEVER)
