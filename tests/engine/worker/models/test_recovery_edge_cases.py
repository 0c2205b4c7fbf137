"""Models that are hard to restore do not stop the worker or other models."""

import asyncio
import errno
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worker.models.test_recovery import (
    NEVER,
    OFTEN,
    assert_lost,
    finish_round,
    pointed,
    train,
    undisturbed,
)
from tests.support.fake_backend import FAKE_INFO
from tests.support.worker_bench import Bench, Counting, run, until
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import OutOfMemory, TrainBatch, TrainResult
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import ServerError
from tuneserve_engine.core.jobs import JobKind, LoadWeights, encode
from tuneserve_engine.core.records import ModelRecord, ModelStatus, SessionRecord
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.store.files import FileStore, new_file_id
from tuneserve_engine.worker.models import recovery
from tuneserve_engine.worker.worker import WorkerPolicy


def test_a_model_that_cannot_be_created_again_is_lost_with_a_message(tmp_path: Path) -> None:
    """Its log has further requests, which wait for the device by then."""

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


def test_the_log_of_a_suspect_is_replayed_alone(tmp_path: Path) -> None:
    """Otherwise other requests in its batches would become suspects too, and end with it."""
    batches: list[set[str]] = []

    class Recording(Counting):
        def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
            batches.append(set(batch.adapter_ids))
            return super().forward_backward(batch, *between)

    async def scenario(bench: Bench) -> None:
        unsuspected = []
        for model in "abcd":
            await bench.ok(await bench.create(model))
            for token in range(3):
                request = await bench.gradient(model, token)
                await bench.ok(request)
                unsuspected += [request] if model != "a" else []
        await bench.kill()
        suspect, *others = [await bench.step(model) for model in "abcd"]
        await bench.store.note_running(1, [suspect])
        await bench.store.lease("worker", "one that takes over", FAKE_INFO)
        backend = Recording()
        backend.gate.clear()
        bench.start(backend)
        await until(lambda: bench.worker.pending.replays.keys() >= set(unsuspected))
        backend.gate.set()
        for request in (suspect, *others):
            await bench.ok(request)
        assert any(len(batch) > 1 for batch in batches)  # others share batches
        assert all(batch == {"a"} for batch in batches if "a" in batch)

    run(tmp_path, scenario, NEVER)


def test_a_point_after_an_unreadable_one_is_no_older(tmp_path: Path) -> None:
    """Requests that change nothing are not replayed, but count for a point's position."""

    class Slow(Counting):
        def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
            if batch.adapter_ids[0] == "b":
                time.sleep(0.6)  # a point of "a" comes before the waiting step
            return super().forward_backward(batch, *between)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await pointed(bench)
        bench.backend.gate.clear()
        gradient = await bench.gradient("a", 1)
        broken = await bench.submit(JobKind.FORWARD_BACKWARD, b"no request", "a")
        await until(lambda: bench.line.calls.count("take_jobs") >= 4)
        bench.backend.gate.set()
        await bench.ok(gradient)
        assert (await bench.outcome(broken)).rejection is not None
        await pointed(bench, count=2)
        newest, _ = await bench.store.recovery_points(1, "a")
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
        await until(lambda: "read_log" in bench.line.calls)
        gradient = await bench.gradient("b")
        bench.backend.gate.set()
        await bench.ok(step)
        await bench.ok(gradient)
        await until(lambda: bench.task.done() or bench.line.calls.count("save_point") > saved)
        await bench.ok(await bench.step("a"))
        assert not bench.task.done()

    run(tmp_path, scenario, OFTEN)


class Full(Counting):
    """A device without room for ``what`` of model "a", until it ``has_room``."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.has_room = False

    def _check(self, what: str, adapter_id: str) -> None:
        if what == self.what and adapter_id == "a" and not self.has_room:
            raise OutOfMemory("the device has no room")

    def create_adapter(self, adapter_id: str, config: AdapterConfig) -> None:
        self._check("creating", adapter_id)
        super().create_adapter(adapter_id, config)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        self._check("loading", adapter_id)
        super().load_adapter(adapter_id, state)

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        for adapter_id in batch.adapter_ids:
            self._check("a gradient", adapter_id)
        return super().forward_backward(batch, *between)


@pytest.mark.parametrize("what", ["creating", "loading", "a gradient"])
def test_a_model_without_room_is_restored_later(tmp_path: Path, what: str) -> None:
    """Neither the model nor the worker is lost: only waiting requests end with an error."""
    policy = OFTEN if what == "loading" else NEVER
    wanted = undisturbed(tmp_path / "undisturbed", 1)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 1)
        if what == "loading":
            await pointed(bench)
        await bench.kill()
        full = Full(what)
        bench.start(full)
        requests = [await bench.gradient("a", 9), await bench.gradient("a", 9)]
        for request in requests:
            rejection = (await bench.outcome(request)).rejection
            assert rejection is not None and rejection.category == "server"
            assert "no room to restore model a" in rejection.message
        await bench.ok(await bench.create("b"))
        full.has_room = True
        assert await finish_round(bench, "a") == wanted
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.status is ModelStatus.READY

    run(tmp_path / "full", scenario, policy)


class LowRanks(Counting):
    """A worker whose memory was planned for ranks up to 2."""

    def __init__(self) -> None:
        super().__init__()
        self._static_shapes = StaticShapes(
            64, block=8, chunk=16, requested_tokens=256, rank_buckets=(2,)
        )


class Refusing(Counting):
    """A worker that cannot take the state that it has read."""

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        raise ServerError("no")


@pytest.mark.parametrize(
    ("unfit", "policy"),
    [(LowRanks, NEVER), (LowRanks, OFTEN), (Refusing, OFTEN)],
    ids=["ranks, from the log", "ranks, from points", "anything, from points"],
)
def test_a_model_that_this_worker_cannot_take_is_left_for_another(
    tmp_path: Path, unfit: type[Counting], policy: WorkerPolicy
) -> None:
    """CONFIG has rank 4. Older points would not help, and must not be used to continue."""
    wanted = undisturbed(tmp_path / "undisturbed", 1)

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        if policy is OFTEN:
            await pointed(bench)
        await train(bench, "a", 1)
        if policy is OFTEN:
            await pointed(bench, count=2)
        await bench.kill()
        bench.start(unfit())
        rejection = (await bench.outcome(await bench.gradient("a", 9))).rejection
        assert rejection is not None and rejection.category == "server"
        assert "no room to restore model a" in rejection.message
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.status is ModelStatus.READY
        await bench.kill()
        bench.start()
        assert await finish_round(bench, "a") == wanted

    run(tmp_path / "moved", scenario, policy)


def test_a_session_can_end_while_there_is_no_room_for_its_model(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.store.put_record(SessionRecord("s", "a", 0.0, 0.0))
        await bench.ok(await bench.create("a"))
        await bench.kill()
        bench.start(Full("creating"))
        gradient = await bench.gradient("a")
        await bench.store.end_session("s", "success")
        assert (await bench.outcome(gradient)).rejection is not None
        await until(lambda: bench.line.calls.count("finish") >= 2)
        assert not bench.task.done()

    run(tmp_path, scenario, NEVER)


def test_the_pause_after_a_point_is_measured_on_the_disk_alone(tmp_path: Path) -> None:
    """An unreachable store does not delay the next points by three times its absence."""

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await pointed(bench)
        bench.line.breaks = {"save_point": ["before"] * 40}  # about two seconds
        await bench.ok(await bench.gradient("a"))
        await until(lambda: not bench.line.breaks["save_point"])
        await pointed(bench, count=2)
        await bench.ok(await bench.gradient("a"))
        async with asyncio.timeout(2):
            await pointed(bench, count=2)

    run(tmp_path, scenario, OFTEN)


@pytest.mark.parametrize("policy", [OFTEN, NEVER], ids=["a point", "a load in the log"])
def test_a_model_waits_for_files_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: WorkerPolicy
) -> None:
    """It is not lost, and its requests are not refused: the store of files may be away."""
    away = {"calls": 0}
    path = FileStore.path

    def reached(self: FileStore, file_id: str) -> Path:
        if away["calls"] > 0:
            away["calls"] -= 1
            raise OSError(errno.EIO, "the bucket does not answer")
        return path(self, file_id)

    monkeypatch.setattr(recovery, "_AWAY_S", 0.01)
    file_id = new_file_id()
    load = encode(LoadWeights(file_id, "tinker://m/weights/a", optimizer=True))

    async def play(bench: Bench, *, is_killed: bool) -> list[Any]:
        await bench.ok(await bench.create("a"))
        await train(bench, "a", 1)
        bench.worker._models.points._executor.write_state(file_id, bench.state("a"))
        if is_killed and policy is OFTEN:
            await pointed(bench)  # with two points, the log no longer starts with the creation
        await train(bench, "a", 1)
        await bench.ok(await bench.submit(JobKind.LOAD_WEIGHTS, load, "a"))
        await train(bench, "a", 1)
        if is_killed:
            if policy is OFTEN:
                await pointed(bench, 2)
            await bench.kill()
            monkeypatch.setattr(FileStore, "path", reached)
            away["calls"] = 3
            bench.start()
        state = await finish_round(bench, "a")
        assert away["calls"] == 0
        return state

    states: list[list[Any]] = []

    async def undisturbed_scenario(bench: Bench) -> None:
        states.append(await play(bench, is_killed=False))

    async def killed_scenario(bench: Bench) -> None:
        states.append(await play(bench, is_killed=True))
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.status is ModelStatus.READY and not model.diverged

    run(tmp_path / "undisturbed", undisturbed_scenario, NEVER)
    run(tmp_path / "killed", killed_scenario, policy)
    assert states[0] == states[1]


def test_a_load_of_a_file_that_cannot_be_reached_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreached(self: FileStore, file_id: str) -> Path:
        raise OSError(errno.EIO, "the bucket does not answer")

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        monkeypatch.setattr(FileStore, "path", unreached)
        load = encode(LoadWeights(new_file_id(), "tinker://m/weights/a", optimizer=True))
        outcome = await bench.outcome(await bench.submit(JobKind.LOAD_WEIGHTS, load, "a"))
        assert outcome.rejection is not None and outcome.rejection.category == "server"
        assert "cannot be read now: the bucket does not answer" in outcome.rejection.message
        assert "send the request again" in outcome.rejection.message
        await train(bench, "a", 1)  # the model is as it was

    run(tmp_path, scenario, NEVER)
