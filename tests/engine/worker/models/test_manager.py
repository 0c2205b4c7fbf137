"""Models are parked, restored, handed over and shared among workers."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.engine.worker.models.test_recovery import NEVER, finish_round, train, undisturbed
from tests.support.worker_bench import Bench, run, until
from tuneserve_engine.core.policies import SweepPolicy


async def park(bench: Bench) -> None:
    await bench.store.sweep(1e12, SweepPolicy(session_ttl_s=1e13, park_s=1.0, result_ttl_s=1e13))
    await until(lambda: "unassign" in bench.line.calls)


def test_an_idle_model_is_parked_and_restored_by_its_next_request(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", 2)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 2)
        await park(bench)
        assert "a" not in bench.backend._adapters
        assert await finish_round(bench, "a") == wanted
        assert len(bench.backend.gradients) == 5 + 1  # no replay was needed

    run(tmp_path / "parked", scenario, NEVER)


def test_a_request_that_arrives_while_its_model_is_handed_over_still_runs(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        for round_ in range(10):
            bench.line.calls.clear()
            await bench.store.sweep(
                1e12, SweepPolicy(session_ttl_s=1e13, park_s=1.0, result_ttl_s=1e13)
            )
            await asyncio.sleep(0.01 * round_)
            await bench.ok(await bench.gradient("a", round_))
            await bench.ok(await bench.step("a"))
        assert bench.backend.adapter_state("a", optimizer=True).step == 10

    run(tmp_path, scenario, NEVER)


def test_a_second_worker_takes_its_share_of_busy_models(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for model in "abcd":
            await bench.ok(await bench.create(model))
        first, task = bench.backend, bench.task
        bench.start(name="another")
        await until(lambda: len(first._adapters) == 2)
        for model in "abcd":
            await bench.ok(await bench.gradient(model))
            await bench.ok(await bench.step(model))
        assert len(first._adapters) == len(bench.backend._adapters) == 2
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(tmp_path, scenario, NEVER)


def test_a_model_works_until_its_turn_to_be_handed_over(tmp_path: Path) -> None:
    """Many models can wait for it, and the store can change its mind meanwhile."""

    async def scenario(bench: Bench) -> None:
        for model in "abcd":
            await bench.ok(await bench.create(model))
        manager = bench.worker._models
        save, saved, may_save = manager.points.save, [], asyncio.Event()

        async def slow(model_id: str) -> None:
            saved.append(model_id)
            await may_save.wait()
            await save(model_id)

        manager.points.save = slow
        manager.hand_over(["a", "b"])
        await until(lambda: saved == ["a"])
        await bench.ok(await bench.gradient("b"))
        await bench.ok(await bench.step("b"))
        manager.hand_over(["a", "c"])
        may_save.set()
        await until(lambda: sorted(bench.backend._adapters) == ["b", "d"])
        assert saved == ["a", "c"]
        await bench.ok(await bench.gradient("a"))

    run(tmp_path, scenario, replace(NEVER, renew_s=3.0))  # a renewal would name none


def test_models_are_shared_by_the_speed_of_the_workers(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for model in "abcd":
            await bench.ok(await bench.create(model))
        first, task, bench.policy = bench.backend, bench.task, replace(NEVER, speed=3.0)
        bench.start(name="fast")
        await until(lambda: len(first._adapters) == 1)
        for model in "abcd":
            await bench.ok(await bench.gradient(model))
        assert len(first._adapters) == 1 and len(bench.backend._adapters) == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(tmp_path, scenario, NEVER)
