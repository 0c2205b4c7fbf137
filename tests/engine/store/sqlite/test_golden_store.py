"""A store and a recovery point written by an earlier commit, which every later one must read.

``golden/store.sql`` is the dump of a store whose worker was killed. A model was created, received
two gradients and a step, was saved, and received another gradient that no recovery point covers.
"""

import shutil
import sqlite3
from pathlib import Path

from tests.engine.worker.models.test_recovery import NEVER, finish_round
from tests.support.worker_bench import Bench, run
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store.base import SamplerClient

GOLDEN = Path(__file__).with_name("golden")


def laid_out(root: Path) -> None:
    """Make ``root`` the directory of the killed service."""
    shutil.copytree(GOLDEN / "files", root / "files")
    connection = sqlite3.connect(root / "store.db")
    connection.executescript((GOLDEN / "store.sql").read_text())
    connection.close()


def test_an_earlier_store_continues_bit_for_bit(tmp_path: Path) -> None:
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
        # the gradient that no point covers, and the new one
        assert len(bench.backend.gradients) == 2
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and not model.diverged

    run(tmp_path / "undisturbed", undisturbed)
    root = tmp_path / "golden"
    laid_out(root)
    run(root, continued, NEVER)
    assert states[0] == states[1]


def test_an_earlier_store_counts_usage_from_now_on(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        before = {each.tenant: each.total.requests for each in await bench.store.usage()}
        bench.positions["a"] = 5
        await bench.ok(await bench.step("a"))
        (used,) = await bench.store.usage("a")
        assert used.total.requests == before.get("a", 0) + 1
        assert [point.position for point in await bench.store.curve("a", after=4)] == [5]

    laid_out(tmp_path / "golden")
    run(tmp_path / "golden", scenario, NEVER)


def test_an_earlier_store_reports_the_samples_that_end_in_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        request_id = await bench.sample("a", 1)
        await bench.ok(request_id)
        client = SamplerClient("a", "a:sample", 0)
        told = await bench.store.completions(client, after=0, limit=9, timeout_s=0)
        assert [(each.request_id, each.number) for each in told] == [(request_id, 1)]

    laid_out(tmp_path / "golden")
    for _ in range(2):  # the second time, the store has this version already
        run(tmp_path / "golden", scenario, NEVER)
