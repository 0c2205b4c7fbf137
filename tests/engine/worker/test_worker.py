"""The worker over a real store: jobs run in order, once, and are never lost."""

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tinker.proto.response_conv import (
    deserialize_sample_response,
)

from tests.support.fake_backend import FAKE_INFO
from tests.support.worker_bench import CONFIG, TIMEOUT_S, Bench, loss, run, state_bits, until
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.jobs import CreateModel, Job, JobKind, SaveWeights, encode
from tuneserve_engine.core.records import (
    CheckpointKind,
    CheckpointRecord,
    ModelRecord,
    ModelStatus,
    TenantRecord,
    Update,
)
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.files import new_file_id
from tuneserve_engine.worker import lease as link_module
from tuneserve_engine.worker import unstored
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.worker import WorkerPolicy

# --- end to end ----------------------------------------------------------------------------------


def test_jobs_pass_from_the_store_through_the_device_and_back(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        created = await bench.create("a")
        gradients = [await bench.gradient("a", token) for token in (0, 1)]
        stepped = await bench.step("a")
        file_id = new_file_id()
        checkpoint = CheckpointRecord(
            key="tinker://a/weights/one",
            tenant="a",
            parent="a",
            kind=CheckpointKind.TRAINING,
            name="one",
            file_id=file_id,
            base_model="fake",
            config=CONFIG,
            created_s=0.0,
        )
        save = SaveWeights(CheckpointKind.TRAINING, file_id, checkpoint)
        saved = await bench.submit(JobKind.SAVE_WEIGHTS, encode(save), "a")
        sampled = await bench.sample("b", 1)
        assert json.loads(await bench.ok(created))["model_id"] == "a"
        assert [loss(await bench.ok(each)) for each in gradients] == [1 / 8, 2 / 8]
        assert json.loads(await bench.ok(stepped))["metrics"]["grad_norm"] > 0
        assert json.loads(await bench.ok(saved)) == {"path": "tinker://a/weights/one"}
        sequences = deserialize_sample_response(await bench.ok(sampled)).sequences
        assert [each.tokens for each in sequences] == [[3, 4]]
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.status is ModelStatus.READY
        stored = await bench.store.get_record(CheckpointRecord, "tinker://a/weights/one")
        assert stored is not None and stored.size_bytes > 0

    run(tmp_path, scenario)


def test_jobs_that_arrive_in_the_wrong_order_run_in_the_right_one(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        created = await bench.create("a")
        await bench.ok(created)
        stepped = await bench.step("a", at=3)
        second = await bench.gradient("a", 1, at=2)
        await asyncio.sleep(0.05)
        assert bench.backend.gradients == []
        first = await bench.gradient("a", 0, at=1)
        for request in (first, second, stepped):
            await bench.ok(request)
        assert bench.backend.gradients == ["a", "a"]
        assert bench.backend.steps == ["a"]

    run(tmp_path, scenario)


def test_tenants_that_share_batches_get_the_same_bits_as_alone(tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []

    async def train(bench: Bench, models: str) -> None:
        bench.backend.gate.clear()  # jobs pile up, so that they share batches
        requests: dict[str, list[str]] = {model: [await bench.create(model)] for model in models}
        for round_ in range(3):
            for model in models:
                requests[model] += [
                    await bench.gradient(model, ord(model) % 8 + round_),
                    await bench.step(model),
                ]
        bench.backend.gate.set()
        bodies = {m: [await bench.ok(each) for each in requests[m]] for m in models}
        results.append({m: (bodies[m], state_bits(bench.state(m))) for m in models})

    run(tmp_path / "together", lambda bench: train(bench, "abc"))
    for model in "abc":
        run(tmp_path / model, lambda bench, model=model: train(bench, model))  # type: ignore[misc]
    together, *alone = results
    assert together == {model: each[model] for model, each in zip("abc", alone, strict=True)}


def test_a_failed_creation_rejects_later_requests_of_the_model(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        command = CreateModel("tuneserve/fake", AdapterConfig(rank=999, alpha=1.0, seed=0))
        created = await bench.submit(JobKind.CREATE_MODEL, encode(command), "a")
        gradient = await bench.gradient("a")
        for request, fragment in ((created, "rank is 999"), (gradient, "its creation failed")):
            rejection = (await bench.outcome(request)).rejection
            assert rejection is not None and fragment in rejection.message
        model = await bench.store.get_record(ModelRecord, "a")
        assert model is not None and model.status is ModelStatus.FAILED
        await bench.ok(await bench.create("b"))

    run(tmp_path, scenario)


def test_a_failing_call_ends_the_job_and_not_the_worker(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await bench.ok(await bench.create("b"))
        bench.backend.victim = "a"
        failed, fine = await bench.gradient("a"), await bench.gradient("b")
        rejection = (await bench.outcome(failed)).rejection
        assert rejection is not None and rejection.category == "server"
        await bench.ok(fine)
        bench.backend.victim = ""
        await bench.ok(await bench.gradient("a"))
        assert not bench.task.done()

    run(tmp_path, scenario)


def test_a_weight_in_the_store_reaches_the_scheduler_with_the_next_renewal(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        scheduler = bench.worker._scheduler
        assert scheduler._shares.weight("a") == 1.0
        await bench.store.put_record(TenantRecord("a", "a", 0.0, weight=3.0))
        await until(lambda: scheduler._shares.weight("a") == 3.0)
        await bench.store.update_record(Update("tenant", "a", {"weight": None}))
        await until(lambda: scheduler._shares.weight("a") == 1.0)

    run(tmp_path, scenario, WorkerPolicy(renew_s=0.05))


# --- idleness and load ---------------------------------------------------------------------------


def test_an_idle_worker_makes_no_calls_and_wakes_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await until(lambda: bench.line.calls[-1] == "take_jobs" or "finish" in bench.line.calls)
        await asyncio.sleep(0.05)
        before = list(bench.line.calls)
        await asyncio.sleep(0.3)
        assert bench.line.calls == before  # while the lease need not be renewed
        assert before == [
            "connect",
            "lease",
            "renew",
            "take_jobs",
            "take_jobs",
            "note_running",
            "finish",
        ]
        await bench.ok(await bench.gradient("a"))
        assert bench.line.calls[len(before) :] == ["take_jobs", "note_running", "finish"]

    run(tmp_path, scenario)


def test_results_too_large_for_one_message_are_stored_by_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unstored, "_FINISH_BYTES", 100)

    async def scenario(bench: Bench) -> None:
        bench.backend.gate.clear()
        await bench.ok(await bench.create("a"))
        requests = [await bench.gradient("a") for _ in range(6)]
        await until(lambda: bench.line.calls.count("take_jobs") >= 2)
        bench.backend.gate.set()
        sizes = [len(await bench.ok(request)) for request in requests]
        assert all(50 < size < 150 for size in sizes)
        assert bench.line.calls.count("finish") >= 1 + 6 - 1  # the creation, then almost each alone
        assert bench.backend.gradients == ["a"] * 6

    run(tmp_path, scenario)


def test_jobs_are_taken_while_a_batch_runs(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        running = await bench.gradient("a")
        takes = bench.line.calls.count("take_jobs")
        waiting = [await bench.sample("b", seq) for seq in range(3)]
        await until(lambda: bench.line.calls.count("take_jobs") > takes)
        bench.backend.gate.set()
        for request in (running, *waiting):
            await bench.ok(request)

    run(tmp_path, scenario)


def test_a_result_does_not_wait_while_another_request_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding a request of half a million tokens takes a third of a second."""
    begun, advance, slow = threading.Event(), threading.Event(), set[str]()
    decode = JobExecutor.decode_payload

    def decode_slowly(self: JobExecutor, job: Job) -> Any:
        if job.model_id in slow:
            begun.set()
            assert advance.wait(TIMEOUT_S)
        return decode(self, job)

    async def scenario(bench: Bench) -> None:
        for model in ("a", "b"):
            await bench.ok(await bench.create(model))
        bench.backend.gate.clear()
        first = await bench.gradient("a")
        await until(bench.backend.reached.is_set)
        slow.add("b")
        second = await bench.gradient("b")
        await until(begun.is_set)
        bench.backend.gate.set()
        await bench.ok(first)
        advance.set()
        await bench.ok(second)

    monkeypatch.setattr(JobExecutor, "decode_payload", decode_slowly)
    try:
        run(tmp_path, scenario)
    finally:
        advance.set()


# --- lost connections ----------------------------------------------------------------------------


async def training_run(bench: Bench, cut: Callable[[int], Awaitable[None]]) -> dict[str, Any]:
    """Two models with three steps each, interleaved with samples. ``cut`` is called in between."""
    requests = [await bench.create("a"), await bench.create("b")]
    for round_ in range(3):
        for model in "ab":
            requests.append(await bench.gradient(model, round_))
            requests.append(await bench.gradient(model, round_ + 1))
            await cut(round_)
            requests.append(await bench.step(model))
        requests.append(await bench.sample("c", round_))
    bodies = [await bench.ok(request) for request in requests]
    assert sorted(bench.backend.gradients) == ["a"] * 6 + ["b"] * 6
    assert sorted(bench.backend.steps) == ["a"] * 3 + ["b"] * 3
    return {"bodies": bodies, **{m: state_bits(bench.state(m)) for m in "ab"}}


async def no_cut(_: int) -> None:
    pass


def undisturbed(root: Path) -> dict[str, Any]:
    results: list[dict[str, Any]] = []

    async def scenario(bench: Bench) -> None:
        results.append(await training_run(bench, no_cut))

    run(root, scenario)
    return results[0]


BREAKS: list[dict[str, list[str]]] = [
    {"lease": ["before", "after"]},
    {"take_jobs": ["before", "", "after"]},
    {"take_jobs": ["after", "after", "after"]},
    {"finish": ["before"]},
    {"finish": ["after"]},
    {"finish": ["", "after", "before", "after"]},
    {"lease": ["", "before", "after"], "take_jobs": ["", "after"], "finish": ["after", "before"]},
]


@pytest.mark.parametrize("breaks", BREAKS, ids=str)
def test_a_lost_connection_repeats_no_job_and_loses_no_outcome(
    tmp_path: Path, breaks: dict[str, list[str]]
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {method: list(when) for method, when in breaks.items()}
        assert await training_run(bench, no_cut) == wanted
        # It connected again, as often as necessary.
        assert bench.line.calls.count("connect") > 1

    wanted = undisturbed(tmp_path / "undisturbed")
    run(tmp_path / "broken", scenario)


def test_a_parked_take_that_is_cut_is_repeated(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async def cut(_: int) -> None:
            bench.line.cut.set()
            await asyncio.sleep(0.01)

        assert await training_run(bench, cut) == wanted

    wanted = undisturbed(tmp_path / "undisturbed")
    run(tmp_path / "cut", scenario)


def test_an_outcome_with_a_lost_acknowledgement_needs_no_further_job(tmp_path: Path) -> None:
    """It is sent again on the next connection, not with the next outcome."""

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {"finish": ["before"]}
        await bench.ok(await bench.create("a"))

    run(tmp_path, scenario)


def test_a_store_that_fails_is_tried_again_and_costs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RETRY_S", 0.01)

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {"finish": ["full", "full"], "take_jobs": ["", "full"]}
        assert await training_run(bench, no_cut) == wanted

    wanted = undisturbed(tmp_path / "undisturbed")
    run(tmp_path / "full", scenario)


@pytest.mark.parametrize("seed", range(8))
def test_random_breaks_change_nothing(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {
            method: choose.choices(["", "before", "after"], [3, 1, 1], k=12)
            for method in ("lease", "renew", "note_running", "take_jobs", "finish")
        }

        async def cut(_: int) -> None:
            if choose.random() < 0.5:
                bench.line.cut.set()
            await asyncio.sleep(choose.random() / 100)

        assert await training_run(bench, cut) == wanted

    wanted = undisturbed(tmp_path / "undisturbed")
    run(tmp_path / "broken", scenario)


# --- leases --------------------------------------------------------------------------------------


def test_a_worker_whose_lease_was_taken_stops_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        await bench.store.lease("worker", "another", FAKE_INFO)
        with pytest.raises(Fenced):
            await asyncio.wait_for(bench.task, TIMEOUT_S)

    run(tmp_path, scenario)


def test_a_worker_that_was_replaced_while_busy_stores_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        request = await bench.gradient("a")
        await asyncio.sleep(0.02)
        await bench.store.lease("worker", "another", FAKE_INFO)
        bench.backend.gate.set()
        with pytest.raises(Fenced):
            await asyncio.wait_for(bench.task, TIMEOUT_S)
        assert await bench.store.wait(request, 0) is None  # it belongs to the successor now

    run(tmp_path, scenario)


def test_a_returning_worker_does_not_take_the_lease_from_its_successor(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.line.reachable.clear()
        bench.line.cut.set()
        await until(lambda: bench.line.calls[-1] == "connect")
        lease = await bench.store.lease("worker", "another", FAKE_INFO)
        bench.line.reachable.set()
        with pytest.raises(Fenced):
            await asyncio.wait_for(bench.task, TIMEOUT_S)
        await bench.store.finish(lease.epoch, [])  # still the successor's

    run(tmp_path, scenario)


def test_a_cancelled_worker_stops_after_the_running_batch(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        bench.backend.gate.clear()
        await bench.gradient("a")
        await asyncio.sleep(0.02)
        bench.task.cancel()
        threading.Timer(0.05, bench.backend.gate.set).start()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(bench.task, TIMEOUT_S)

    run(tmp_path, scenario)


def test_calls_without_takes_do_not_wait_for_new_jobs(tmp_path: Path) -> None:
    """Otherwise a model handed over with others would keep its requests until a new job comes."""
    calls_ran = 0
    advance = asyncio.Event()

    async def call() -> None:
        nonlocal calls_ran
        calls_ran += 1
        await advance.wait()

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        calls = [asyncio.create_task(bench.worker._without_takes(call)) for _ in range(2)]
        await until(lambda: calls_ran == 1)
        await asyncio.sleep(0.05)  # a take waits behind the second
        calls.append(asyncio.create_task(bench.worker._without_takes(call)))
        await asyncio.sleep(0)
        advance.set()
        async with asyncio.timeout(2):
            await asyncio.gather(*calls)
        await bench.ok(await bench.create("b"))

    run(tmp_path, scenario)
