"""The host's work beside the device: payloads before their turn, and results after it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worker.execution.test_executor import record
from tests.engine.worker.models.test_recovery import NEVER, OFTEN
from tests.support.worker_bench import TIMEOUT_S, Bench, gradient_body, loss, run, until
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import Job, JobKind, LoadWeights, SaveWeights, encode
from tuneserve_engine.core.records import CheckpointKind
from tuneserve_engine.store import files
from tuneserve_engine.worker import device_loop
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.codecs.training import TrainingData
from tuneserve_engine.worker.scheduling.runnable import RunningSample

FILE = "0" * 32


class Results:
    """Hold back the encoding of gradients' results until ``advance`` is set."""

    def __init__(self) -> None:
        self.advance = threading.Event()
        self.threads: set[threading.Thread] = set()
        self._encode = training.encode_output

    def encode_output(self, *args: Any) -> bytes:
        self.threads.add(threading.current_thread())
        assert self.advance.wait(TIMEOUT_S)
        return self._encode(*args)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Results]:
    held = Results()
    monkeypatch.setattr(training, "encode_output", held.encode_output)
    yield held
    held.advance.set()


class Payloads:
    """Record which thread decodes which payload."""

    def __init__(self) -> None:
        self.decoded: list[tuple[int, threading.Thread]] = []
        self._decode = training.decode_request

    def decode_request(self, payload: bytes, info: BaseModelInfo) -> TrainingData:
        self.decoded.append((token_of(payload), threading.current_thread()))
        return self._decode(payload, info)


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> Payloads:
    noting = Payloads()
    monkeypatch.setattr(training, "decode_request", noting.decode_request)
    return noting


def token_of(payload: bytes) -> int:
    datum = wire.ForwardBackwardRequest.FromString(payload).data[0]
    return int.from_bytes(datum.model_input[0].encoded_text.tokens, "little")


async def running(bench: Bench, model: str, token: int = 0) -> str:
    """Start a gradient that occupies the device until its gate opens."""
    bench.backend.gate.clear()
    request = await bench.gradient(model, token)
    await until(lambda: bool(bench.worker._device_loop._slices))
    return request


async def taken(bench: Bench, count: int) -> None:
    """Return when ``count`` requests wait for the device."""
    await until(lambda: len(bench.worker.pending.in_order()) == count)


# --- results --------------------------------------------------------------------------------------


def test_the_device_runs_while_results_are_encoded(tmp_path: Path, results: Results) -> None:
    async def scenario(bench: Bench) -> None:
        for model in "ab":
            await bench.ok(await bench.create(model))
        first = await running(bench, "a", 3)
        others = [await bench.step("a"), await bench.gradient("b", 4)]
        await taken(bench, 2)
        bench.backend.gate.set()
        await until(lambda: bench.backend.gradients == ["a", "b"])
        await until(lambda: bench.backend.steps == ["a"])
        await asyncio.sleep(0.05)
        # A model's results are reported in order.
        assert [await bench.store.wait(each, 0) for each in (first, *others)] == [None] * 3
        results.advance.set()
        assert loss(await bench.ok(first)) == 4 / 8
        assert loss(await bench.ok(others[1])) == 5 / 8
        await bench.ok(others[0])

    run(tmp_path, scenario)


def test_the_device_does_not_run_too_far_ahead_of_its_results(
    tmp_path: Path, results: Results
) -> None:
    """Each batch that waits for its encoding holds its numbers in memory."""

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        requests = [await running(bench, "a", 0)]
        for token in range(1, 6):
            requests += [await bench.step("a"), await bench.gradient("a", token)]
        await taken(bench, 10)
        bench.backend.gate.set()
        # one is being encoded, and one waits to join the undelivered ones
        most = device_loop._UNDELIVERED + 2
        await until(lambda: executed(bench) == most)
        await asyncio.sleep(0.05)
        assert executed(bench) == most
        results.advance.set()
        for request in requests:
            await bench.ok(request)

    def executed(bench: Bench) -> int:
        return len(bench.backend.gradients) + len(bench.backend.steps)

    run(tmp_path, scenario)


def test_a_point_waits_for_results_being_encoded(tmp_path: Path, results: Results) -> None:
    """Otherwise a worker's death between the two would apply those requests twice."""

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        request = await running(bench, "a", 3)
        await bench.sample("b", 1)
        await taken(bench, 1)
        bench.backend.gate.set()
        await until(lambda: bench.backend.gradients == ["a"])
        await asyncio.sleep(0.3)  # long enough for many points
        await bench.kill()
        assert [p.position for p in await bench.store.recovery_points(1, "a")] in ([], [1])
        results.advance.set()
        bench.start()
        assert loss(await bench.ok(request)) == 4 / 8
        await bench.ok(await bench.step("a"))
        assert bench.backend.gradients == ["a"]
        assert bench.state("a").step == 1

    run(tmp_path, scenario, OFTEN)


def test_a_stopping_worker_stores_the_results_still_being_encoded(
    tmp_path: Path, results: Results
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        request = await running(bench, "a", 3)
        await bench.sample("b", 1)
        await taken(bench, 1)
        bench.worker.stop()
        bench.backend.gate.set()
        await until(lambda: bool(results.threads))
        await asyncio.sleep(0.05)
        assert not bench.task.done()
        results.advance.set()
        await asyncio.wait_for(bench.task, TIMEOUT_S)
        assert loss(await bench.ok(request)) == 4 / 8
        bench.start()
        await bench.ok(await bench.step("a"))
        assert bench.backend.gradients == []  # no request was replayed

    run(tmp_path, scenario, NEVER)


def test_an_idle_device_decodes_and_encodes_for_itself(
    tmp_path: Path, payloads: Payloads, results: Results
) -> None:
    """Another thread would only have to be woken."""
    results.advance.set()

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        for token in range(3):
            await bench.ok(await bench.gradient("a", token))
        assert results.threads == {thread for _, thread in payloads.decoded}
        assert len(results.threads) == 1

    run(tmp_path, scenario)


def test_the_device_does_not_wait_for_the_disk_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun, advance = files._write_synced, threading.Event(), threading.Event()

    def held(*given: Any) -> None:
        begun.set()
        assert advance.wait(TIMEOUT_S)
        write(*given)

    monkeypatch.setattr(files, "_write_synced", held)

    async def scenario(bench: Bench) -> None:
        for model in "ab":
            await bench.ok(await bench.create(model))
        checkpoint = record(CheckpointKind.TRAINING, FILE)
        command = SaveWeights(CheckpointKind.TRAINING, FILE, checkpoint)
        saved = await bench.submit(JobKind.SAVE_WEIGHTS, encode(command), "a")
        await until(begun.is_set)
        others = [await bench.gradient("b"), await bench.step("a")]
        await until(lambda: (bench.backend.gradients, bench.backend.steps) == (["b"], ["a"]))
        assert await bench.store.wait(saved, 0) is None
        advance.set()
        for request in (saved, *others):
            await bench.ok(request)
        load = LoadWeights(FILE, checkpoint.key, optimizer=True)
        await bench.ok(await bench.submit(JobKind.LOAD_WEIGHTS, encode(load), "a"))
        assert bench.state("a").step == 0

    try:
        run(tmp_path, scenario, NEVER)
    finally:
        advance.set()


# --- the device's idle time -----------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_host_is_charged_for_the_time_between_batches(tmp_path: Path) -> None:
    clock = Clock()

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        assert bench.worker._metrics()["host_seconds_total"] == 0
        choose = bench.worker._device_loop._scheduler.next_batch

        def slow(pending: Sequence[Job], running_samples: Sequence[RunningSample]) -> list[Job]:
            clock.now_s += 2.0 if pending else 0.0
            return choose(pending, running_samples)

        bench.worker._device_loop._scheduler.next_batch = slow  # type: ignore[method-assign]
        first = await running(bench, "a")
        others = [await bench.step("a"), await bench.gradient("a")]
        await taken(bench, 2)
        bench.backend.gate.set()
        for request in (first, *others):
            await bench.ok(request)
        clock.now_s += 100.0  # no request arrived
        await bench.ok(await bench.gradient("a"))
        assert bench.worker._metrics()["host_seconds_total"] == 8.0

    run(tmp_path, scenario, replace(NEVER, clock=clock))


def test_the_host_is_charged_for_results_that_the_device_waits_for(
    tmp_path: Path, results: Results
) -> None:
    clock = Clock()

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        requests = [await running(bench, "a", 0)]
        for token in range(1, 6):
            requests += [await bench.step("a"), await bench.gradient("a", token)]
        await taken(bench, 10)
        bench.backend.gate.set()
        most = device_loop._UNDELIVERED + 2
        await until(lambda: len(bench.backend.gradients) + len(bench.backend.steps) == most)
        await asyncio.sleep(0.05)
        clock.now_s += 3.0
        results.advance.set()
        for request in requests:
            await bench.ok(request)
        assert bench.worker._metrics()["host_seconds_total"] == 3.0

    run(tmp_path, scenario, replace(NEVER, clock=clock))


# --- payloads -------------------------------------------------------------------------------------


def test_payloads_that_arrive_while_the_device_is_busy_are_decoded_meanwhile(
    tmp_path: Path, payloads: Payloads
) -> None:
    async def scenario(bench: Bench) -> None:
        for model in "ab":
            await bench.ok(await bench.create(model))
        first = await running(bench, "a", 1)
        await until(lambda: [token for token, _ in payloads.decoded] == [1])
        bad = wire.ForwardBackwardRequest.FromString(gradient_body(2))
        bad.loss_fn = "mse"
        others = [
            await bench.submit(JobKind.FORWARD_BACKWARD, bad.SerializeToString(), "b"),
            await bench.gradient("b", 3),
            await bench.step("b"),
            await bench.gradient("b", 4),
        ]
        await until(lambda: len(payloads.decoded) == 4)
        bench.backend.gate.set()
        rejection = (await bench.outcome(others[0])).rejection
        assert rejection is not None and "'mse'" in rejection.message
        for request in (first, others[1], others[3]):
            await bench.ok(request)
        assert [token for token, _ in payloads.decoded] == [1, 2, 3, 4]  # each once
        device, *host = [thread for _, thread in payloads.decoded]
        assert len(set(host)) == 1 and device not in host

    run(tmp_path, scenario)


def test_the_backend_learns_the_next_models_while_a_batch_runs(tmp_path: Path) -> None:
    told: list[list[str]] = []

    async def scenario(bench: Bench) -> None:
        bench.backend.prefetch = lambda ids: told.append(list(ids))  # type: ignore[method-assign]
        for model in "abcd":
            await bench.ok(await bench.create(model))
        requests = [await running(bench, "a")]
        told.clear()
        requests += [await bench.step("a")]
        requests += [await bench.gradient(model) for model in "dcb"]
        await until(lambda: len(told) > 0 and len(told[-1]) == 4)
        assert told[-1][-1] == "a"  # it runs now, so the others are first
        assert sorted(told[-1]) == [*"abcd"]
        bench.backend.gate.set()
        for request in requests:
            await bench.ok(request)

    run(tmp_path, scenario)


def test_several_models_step_in_one_call(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    async def scenario(bench: Bench) -> None:
        steps = bench.backend.optim_steps

        def noting(asked: Sequence[tuple[str, Any]]) -> Any:
            calls.append([model for model, _ in asked])
            return steps(asked)

        bench.backend.optim_steps = noting  # type: ignore[method-assign]
        for model in "abc":
            await bench.ok(await bench.create(model))
            await bench.ok(await bench.step(model))  # so that their time is known
        calls.clear()
        requests = [await running(bench, "a")]
        requests += [await bench.step(model) for model in "abc"]
        await taken(bench, 3)
        bench.backend.gate.set()
        for request in requests:
            await bench.ok(request)
        assert calls == [[*"abc"]]

    run(tmp_path, scenario)
