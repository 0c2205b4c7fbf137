"""Models that are hard to bring back: the worker goes on, and so does everybody else."""

import time
from pathlib import Path

from tests.engine.test_recovery import NEVER, OFTEN, assert_lost, pointed, train
from tests.engine.worker_bench import Bench, Counting, run, until
from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import TrainResult, TrainUnit
from tuneserve_engine.backend.fake import FAKE_INFO
from tuneserve_engine.jobs import JobKind


def test_a_model_that_cannot_be_created_again_is_lost_with_a_message(tmp_path: Path) -> None:
    """Though its log has more, which waits for the device by then."""

    class Refusing(Counting):
        def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
            if adapter_id == "a":
                raise RuntimeError("out of order")
            super().create_adapter(adapter_id, config)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 1)
        await bench.kill()
        bench.start(Refusing())
        await assert_lost(bench)

    run(tmp_path, scenario, NEVER)


def test_the_log_of_a_suspect_is_done_again_alone(tmp_path: Path) -> None:
    """Else the requests whose logs share its units would be suspects as well, and end with it."""
    units: list[set[str]] = []

    class Recording(Counting):
        def forward_backward(self, unit: TrainUnit) -> TrainResult:
            units.append({request.adapter_id for request in unit.requests})
            return super().forward_backward(unit)

    async def scenario(bench: Bench) -> None:
        for model in "abc":
            await bench.ok(await bench.create(model))
            for token in range(3):
                await bench.ok(await bench.gradient(model, token))
        await bench.kill()
        suspect, *others = [await bench.step(model) for model in "abc"]
        await bench.store.begin(1, [suspect])
        await bench.store.lease("worker", "one that takes over", FAKE_INFO)
        bench.start(Recording())
        for request in (suspect, *others):
            await bench.ok(request)
        assert {"b", "c"} in units  # others share
        assert all(unit == {"a"} for unit in units if "a" in unit)

    run(tmp_path, scenario, NEVER)


def test_a_point_after_one_that_could_not_be_read_is_no_older(tmp_path: Path) -> None:
    """Requests that change nothing are not done again, but count for a point's position."""

    class Slow(Counting):
        def forward_backward(self, unit: TrainUnit) -> TrainResult:
            if unit.requests[0].adapter_id == "b":
                time.sleep(0.6)  # a point of "a" comes before the step that waits
            return super().forward_backward(unit)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await pointed(bench)
        bench.backend.gate.clear()
        gradient = await bench.gradient("a", 1)
        broken = await bench.submit(JobKind.FORWARD_BACKWARD, b"no request", "a")
        await until(lambda: bench.line.calls.count("take") >= 4)
        bench.backend.gate.set()
        await bench.ok(gradient)
        assert (await bench.outcome(broken)).rejection is not None
        await pointed(bench, count=2)
        newest, _ = await bench.store.points(1, "a")
        assert newest.position == 3
        await bench.kill()
        member = tmp_path / "files" / newest.file_id / "adapter.safetensors"
        member.write_bytes(member.read_bytes()[:-1])
        bench.start(Slow())
        await bench.ok(await bench.create("b"))
        await until(lambda: "save_point" in bench.line.calls)
        saved = bench.line.calls.count("save_point")
        bench.backend.gate.clear()
        step = await bench.step("a")
        await until(lambda: "log" in bench.line.calls)
        gradient = await bench.gradient("b")
        bench.backend.gate.set()
        await bench.ok(step)
        await bench.ok(gradient)
        await until(lambda: bench.task.done() or bench.line.calls.count("save_point") > saved)
        await bench.ok(await bench.step("a"))
        assert not bench.task.done()

    run(tmp_path, scenario, OFTEN)
