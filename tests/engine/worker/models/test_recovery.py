"""Models outlive their worker: recovery points, replay, parking, a graceful stop."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.worker_bench import (
    TIMEOUT_S,
    Bench,
    Counting,
    gradient_body,
    loss,
    run,
    state_bits,
    until,
)
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.backend.base import DeviceFailed, TrainBatch, TrainResult
from tuneserve_engine.core.jobs import JobKind, Outcome
from tuneserve_engine.core.records import ModelRecord, ModelStatus
from tuneserve_engine.worker import worker as worker_module
from tuneserve_engine.worker.models.recovery_points import PointPolicy
from tuneserve_engine.worker.worker import WorkerPolicy

NEVER = WorkerPolicy(points=PointPolicy(interval_s=1e9, steps=10**9), renew_s=0.05)
OFTEN = WorkerPolicy(points=PointPolicy(interval_s=0.01, steps=1), renew_s=0.05)


async def train(bench: Bench, model: str, rounds: int) -> list[bytes]:
    """Two gradients and a step per round, then a gradient that waits for its step."""
    requests = []
    for round_ in range(rounds):
        requests += [
            await bench.gradient(model, round_),
            await bench.gradient(model, round_ + 1),
            await bench.step(model),
        ]
    requests.append(await bench.gradient(model, 7))
    return [await bench.ok(request) for request in requests]


async def finish_round(bench: Bench, model: str) -> list[Any]:
    """One more step, and the model's state after it with its accumulator."""
    await bench.ok(await bench.step(model))
    await bench.ok(await bench.gradient(model, 3))
    state = bench.backend.adapter_state(model, optimizer=True, accumulator=True)
    accumulator = [(name, tensor.tobytes()) for name, tensor in sorted(state.accumulator.items())]
    assert accumulator
    return [*state_bits(state), *accumulator]


def undisturbed(root: Path, rounds: int) -> list[Any]:
    states: list[Any] = []

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", rounds)
        states.extend(await finish_round(bench, "a"))

    run(root, scenario)
    return states


async def pointed(bench: Bench, count: int = 1) -> None:
    """Return when the model has ``count`` recovery points, the newest of its present state."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            points = await bench.store.recovery_points(bench.worker.session.epoch, "a")
            if len(points) >= count and points[0].position == bench.positions["a"]:
                return
            await asyncio.sleep(0.02)


# --- restoring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [NEVER, OFTEN], ids=["from the log", "from points"])
def test_a_model_continues_bit_for_bit_after_its_worker_died(
    tmp_path: Path, policy: WorkerPolicy
) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", 3)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 3)
        if policy is OFTEN:
            await pointed(bench)
        await bench.kill()
        bench.start()
        assert await finish_round(bench, "a") == wanted
        again = len(bench.backend.gradients) - 1
        assert again == (0 if policy is OFTEN else 7)  # only the requests that no point covers

    run(tmp_path / "killed", scenario, policy)


def test_requests_of_a_dead_worker_run_on_the_next(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        requests = [await bench.gradient("a", 1), await bench.step("a")]
        requests += [await bench.sample("c", 1), await bench.create("b"), await bench.gradient("b")]
        await until(lambda: "note_running" in bench.line.calls)
        await bench.kill()
        bench.start()
        for request in requests:
            await bench.ok(request)
        assert bench.backend.steps == ["a"]

    run(tmp_path, scenario)


def test_reported_results_do_not_change_in_a_replay(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        request = await bench.gradient("a", 5)
        before = await bench.ok(request)
        await bench.kill()
        bench.start()
        await bench.ok(await bench.step("a"))
        assert await bench.ok(request) == before
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.status is ModelStatus.READY and not model.diverged

    run(tmp_path, scenario)


class Drifting(Counting):
    """A device with other last bits."""

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        result = super().forward_backward(batch, *between)
        for output in result.outputs:
            output.logprobs[:] = np.nextafter(output.logprobs, np.float32(9))
        return result


def test_other_bits_are_flagged_and_the_client_keeps_its_result(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        request = await bench.gradient("a", 5)
        before = await bench.ok(request)
        await bench.kill()
        bench.start(Drifting())
        await bench.ok(await bench.step("a"))
        assert await bench.ok(request) == before
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.diverged and model.status is ModelStatus.READY

    run(tmp_path, scenario)


class Forgetful(Counting):
    """A device that cannot repeat its work."""

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        raise RuntimeError("out of order")


def test_a_model_that_cannot_be_replayed_is_lost_with_a_message(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await bench.ok(await bench.gradient("a"))
        await bench.kill()
        bench.start(Forgetful())
        await assert_lost(bench)

    run(tmp_path, scenario)


async def assert_lost(bench: Bench) -> None:
    for request in (await bench.step("a"), await bench.gradient("a")):
        rejection = (await bench.outcome(request)).rejection
        assert rejection is not None and rejection.category == "server"
        assert "from your last checkpoint" in rejection.message
    model = await bench.store.get_record(ModelRecord, "a")
    assert model is not None and model.status is ModelStatus.LOST
    await bench.ok(await bench.create("b"))  # the worker continues


def test_a_damaged_point_is_replaced_by_the_previous_one_and_more_replay(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", 4)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await pointed(bench)
        await train(bench, "a", 4)
        await pointed(bench, count=2)
        points = await bench.store.recovery_points(1, "a")
        await bench.kill()
        member = tmp_path / "damaged" / "files" / points[0].file_id / "adapter.safetensors"
        member.write_bytes(member.read_bytes()[:-1])
        bench.start()
        assert await finish_round(bench, "a") == wanted
        assert len(bench.backend.gradients) > 1

    run(tmp_path / "damaged", scenario, OFTEN)


def test_a_model_without_readable_points_is_lost_with_a_message(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await pointed(bench)
        await train(bench, "a", 4)
        await pointed(bench, count=2)
        await bench.kill()
        shutil.rmtree(tmp_path / "files")
        bench.start()
        await assert_lost(bench)

    run(tmp_path, scenario, OFTEN)


def test_a_small_device_replays_in_the_same_halves(tmp_path: Path) -> None:
    """Replay starts where the first attempt ended."""
    bodies = wire.ForwardBackwardRequest.FromString(gradient_body(3))
    for token in (4, 5, 6):
        bodies.data.append(wire.ForwardBackwardRequest.FromString(gradient_body(token)).data[0])
    lengths: list[int] = []

    class Small(Counting):
        def __init__(self) -> None:
            super().__init__(memory_tokens=32)

        def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
            lengths.extend(len(micro_batch.tokens) for micro_batch in batch.micro_batches)
            return super().forward_backward(batch, *between)

    async def scenario(bench: Bench) -> None:
        await bench.kill()
        bench.start(Small())
        await bench.ok(await bench.create("a"))
        request = await bench.submit(JobKind.FORWARD_BACKWARD, bodies.SerializeToString(), "a")
        assert loss(await bench.ok(request)) == pytest.approx((4 + 5 + 6 + 7) / 8)
        assert lengths == [256, 128, 64, 32]
        lengths.clear()
        await bench.kill()
        bench.start(Small())
        await bench.ok(await bench.step("a"))
        assert lengths == [32]
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and not model.diverged

    run(tmp_path, scenario)


def test_a_replayed_job_is_reported_as_the_request_that_needs_it(tmp_path: Path) -> None:
    """A replay that kills every worker must end with an error."""

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await bench.ok(await bench.gradient("a"))
        await bench.kill()
        bench.start()
        bench.backend.gate.clear()
        noted: list[list[str]] = []
        begin = bench.store.note_running

        async def noting(epoch: int, request_ids: list[str]) -> None:
            noted.append(request_ids)
            await begin(epoch, request_ids)

        bench.store.note_running = noting  # type: ignore[method-assign, assignment]
        request = await bench.step("a")
        bench.backend.gate.set()
        await bench.ok(request)
        assert noted == [[request]] * 3  # the creation, the gradient, and itself

    run(tmp_path, scenario, NEVER)


class Dying(Counting):
    """A device that fails for good at the first gradient."""

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        raise DeviceFailed("the device failed: it fell off the bus")


def test_a_device_failure_ends_its_worker_and_not_the_requests(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.kill()
        bench.start(Dying())
        await bench.ok(await bench.create("a"))
        requests = [await bench.gradient("a", token) for token in range(3)]
        requests.append(await bench.step("a"))
        with pytest.raises(DeviceFailed, match="fell off"):
            await asyncio.wait_for(bench.task, TIMEOUT_S)
        bench.start()
        for request in requests:
            await bench.ok(request)

    run(tmp_path, scenario)


# --- points --------------------------------------------------------------------------------------


# --- giving up -----------------------------------------------------------------------------------


# --- stopping ------------------------------------------------------------------------------------


def test_a_stopped_worker_leaves_nothing_to_replay(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", 2)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 2)
        bench.worker.stop()
        await asyncio.wait_for(bench.task, TIMEOUT_S)
        assert (await bench.store.base_models())[0].workers == 0
        bench.start()
        assert await finish_round(bench, "a") == wanted
        assert len(bench.backend.gradients) == 1

    run(tmp_path / "stopped", scenario, NEVER)


def test_a_stopping_worker_ends_its_batch_and_takes_no_other(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        running = await bench.gradient("a")
        await until(lambda: bench.line.calls.count("note_running") == 2)
        waiting = await bench.step("a")
        bench.worker.stop()
        await asyncio.sleep(0.05)
        assert not bench.task.done()
        bench.backend.gate.set()
        await asyncio.wait_for(bench.task, TIMEOUT_S)
        await bench.ok(running)
        assert await bench.store.wait(waiting, 0) is None
        bench.start()
        await bench.ok(waiting)

    run(tmp_path, scenario)


def test_a_batch_that_does_not_end_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STOP_S", 0.1)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        request = await bench.gradient("a", 2)
        await until(lambda: bench.line.calls.count("note_running") == 2)
        bench.worker.stop()
        await asyncio.wait_for(bench.task, TIMEOUT_S)
        bench.backend.gate.set()
        bench.start()
        outcome: Outcome = await bench.outcome(request)
        assert loss(outcome.body) == 3 / 8

    run(tmp_path, scenario)
