"""A store and a recovery point as a release wrote them: a later one must read them, or refuse.

``golden/store-2.sql`` is the dump of a store of version 2 whose worker was killed: a model that
was created, got two gradients and a step, was saved, and got another gradient that no point covers.
Keep it when the format changes, and add one of the new format beside it.
"""

import shutil
import sqlite3
from pathlib import Path

from tests.engine.test_recovery import NEVER, finish_round
from tests.engine.worker_bench import Bench, run
from tuneserve_engine.records import Model

GOLDEN = Path(__file__).with_name("golden")


def test_a_store_of_version_2_goes_on_bit_for_bit(tmp_path: Path) -> None:
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
        model = await bench.store.get(Model, "a")
        assert model is not None and not model.diverged

    run(tmp_path / "undisturbed", undisturbed)
    root = tmp_path / "golden"
    shutil.copytree(GOLDEN / "files", root / "files")
    connection = sqlite3.connect(root / "store.db")
    connection.executescript((GOLDEN / "store-2.sql").read_text())
    connection.close()
    run(root, continued, NEVER)
    assert states[0] == states[1]
