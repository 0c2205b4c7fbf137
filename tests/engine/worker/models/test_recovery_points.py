"""Recovery points: a failed write only costs replay, and a point waits for earlier results."""

import asyncio
import errno
from pathlib import Path

import pytest

from tests.engine.worker.models.test_recovery import OFTEN, finish_round, train, undisturbed
from tests.support.fake_backend import FAKE_INFO
from tests.support.worker_bench import (
    TIMEOUT_S,
    Bench,
    run,
    until,
)
from tuneserve_engine.store.files import FileStore, LocalFs
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.worker import Worker


def test_a_point_that_cannot_be_written_only_costs_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(LocalFs):
        is_full = False

        def fsync(self, descriptor: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().fsync(descriptor)

    fs = Full()

    async def scenario(bench: Bench) -> None:
        await bench.kill()
        executor = JobExecutor(bench.backend, FileStore(tmp_path / "files", fs))
        worker = Worker(bench.line.connect, executor, FAKE_INFO, name="worker", policy=OFTEN)
        bench.task = asyncio.create_task(worker.run_until_stopped())
        fs.is_full = True
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 2)
        await until(lambda: "was not written" in caplog.text)
        fs.is_full = False
        async with asyncio.timeout(TIMEOUT_S):
            while not await worker.session.call(
                lambda queue, epoch: queue.recovery_points(epoch, "a")
            ):
                await asyncio.sleep(0.02)

    run(tmp_path, scenario, OFTEN)


def test_a_point_waits_for_the_results_before_it(tmp_path: Path) -> None:
    """Otherwise a worker's death between the two would apply those requests twice."""
    wanted = undisturbed(tmp_path / "undisturbed", 1)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        gradients = [await bench.gradient("a", token) for token in (0, 1)]
        await until(lambda: bench.line.calls.count("take_jobs") >= 3)
        bench.line.breaks = {"finish": ["before"] * 10_000}
        bench.backend.gate.set()
        await until(lambda: len(bench.backend.gradients) == 2)
        await asyncio.sleep(0.2)  # long enough for many points
        await bench.kill()
        assert [p.position for p in await bench.store.recovery_points(1, "a")] in ([], [1])
        bench.start()
        for request in gradients:
            await bench.ok(request)
        await bench.ok(await bench.step("a"))
        await bench.ok(await bench.gradient("a", 7))
        assert await finish_round(bench, "a") == wanted

    run(tmp_path / "killed", scenario, OFTEN)
