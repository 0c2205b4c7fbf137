"""The worker and cancelled samples: before they run, and while they do."""

import asyncio
from pathlib import Path

import pytest

from tests.support.worker_bench import Bench, run, until
from tuneserve_engine.worker import lease as link_module
from tuneserve_engine.worker.worker import WorkerPolicy

SOON = WorkerPolicy(renew_s=0.02)


async def assert_cancelled(bench: Bench, request_id: str) -> None:
    rejection = (await bench.outcome(request_id)).rejection
    assert rejection is not None and "was cancelled" in rejection.message


def test_a_cancelled_sample_that_waits_for_the_device_does_not_run(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        running = await bench.gradient("a")
        unwanted, wanted = await bench.sample("b", 1), await bench.sample("c", 1)
        backlog = bench.worker.pending
        await until(lambda: len(backlog.in_order()) == 2)
        await bench.store.cancel(unwanted)
        await until(lambda: [job.request_id for job in backlog.in_order()] == [wanted])
        await assert_cancelled(bench, unwanted)
        bench.backend.gate.set()
        await bench.ok(running)
        await bench.ok(wanted)
        await assert_cancelled(bench, unwanted)

    run(tmp_path, scenario, SOON)


def test_a_sample_cancelled_while_it_runs_finishes_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RETRY_S", 0.1)

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {"finish": ["full"]}  # it has run, and the store does not know yet
        unwanted, beside = await bench.sample("b", 1), await bench.sample("c", 1)
        await until(lambda: "finish" in bench.line.calls)
        await bench.store.cancel(unwanted)
        await bench.ok(beside)
        await assert_cancelled(bench, unwanted)
        await bench.ok(await bench.sample("b", 2))
        assert not bench.task.done()
        bench.worker.stop()
        await bench.task

    run(tmp_path, scenario, SOON)


def test_no_call_waits_for_the_outcome_of_a_cancelled_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RETRY_S", 0.01)

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {"finish": ["full"] * 1000}
        unwanted = await bench.sample("b", 1)
        await until(lambda: "finish" in bench.line.calls)
        stored = asyncio.create_task(bench.worker._unstored.wait(None, None))
        await asyncio.sleep(0.05)
        assert not stored.done()
        await bench.store.cancel(unwanted)
        await stored
        bench.line.breaks = {}
        await bench.ok(await bench.sample("b", 2))

    run(tmp_path, scenario, SOON)


def test_a_lost_cancellation_only_costs_time(tmp_path: Path) -> None:
    """A worker that does not learn of it runs the sample in vain, and continues."""

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        running = await bench.gradient("a")
        unwanted = await bench.sample("b", 1)
        await until(lambda: len(bench.worker.pending.in_order()) == 1)
        bench.line.breaks = {"renew": ["after"]}
        await bench.store.cancel(unwanted)
        await until(lambda: bench.line.calls.count("connect") == 2)
        bench.backend.gate.set()
        await bench.ok(running)
        await bench.ok(await bench.sample("b", 2))
        await assert_cancelled(bench, unwanted)

    run(tmp_path, scenario, SOON)


def test_cancelling_an_unknown_request_does_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.worker._cancel(["req_unknown"])
        await bench.ok(await bench.sample("b", 1))

    run(tmp_path, scenario)
