"""Sampling and training beside each other on one device: the work that may interrupt other work,
and the fate of running samples.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.worker.execution.test_executor import record
from tests.engine.worker.models.test_recovery import NEVER
from tests.support.worker_bench import Bench, Counting, run, until
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.backend.base import (
    SampleProgress,
    SamplingRequest,
    TrainBatch,
    TrainResult,
)
from tuneserve_engine.core.jobs import JobKind, SaveWeights, encode
from tuneserve_engine.core.records import CheckpointKind
from tuneserve_engine.store.files import FileStore

DATUMS, TOKENS, MICRO_BATCHES = 5, 64, 5
"""On the fake backend, each datum is a bin, and so has a micro-batch of its own."""


def long_gradient() -> bytes:
    body = wire.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(DATUMS):
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(TOKENS, "<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].dense = np.ones(TOKENS, "<i8").tobytes()
        datum.loss_fn_inputs["target_tokens"].dtype = wire.DTYPE_INT64
    return body.SerializeToString()


class Stepwise(Counting):
    """Decodes nothing before the ``slices``-th call for a request, and records its calls."""

    def __init__(self, slices: int = 1) -> None:
        super().__init__()
        self.slices = slices
        self.calls: dict[str, int] = {}
        self.events: list[str] = []
        self.before_between: Callable[[], None] = lambda: None

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        def noted() -> None:
            self.events.append("between")
            self.before_between()
            between[0]()

        self.events.append("begin")
        result = super().forward_backward(batch, noted)
        self.events.append("end")
        return result

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        for name in [name for name in self.calls if name not in asked]:
            del self.calls[name]
        self.events.append(f"sample {len(asked)}")
        while True:
            for name in asked:
                self.calls[name] = self.calls.get(name, 0) + 1
            ready = {name: each for name, each in asked.items() if self.calls[name] >= self.slices}
            if ready:
                given = super().sample_until(ready, lambda: False)
                left = {name: 1 for name in asked if name not in ready}
                return SampleProgress(given.finished, left, dict.fromkeys(asked, 1.0))
            if should_yield():
                return SampleProgress({}, dict.fromkeys(asked, 1), dict.fromkeys(asked, 1.0))


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


async def restarted(bench: Bench, backend: Counting) -> None:
    await bench.kill()
    bench.start(backend)


def test_a_sample_that_arrives_during_a_long_gradient_waits_for_one_micro_batch(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        backend = Stepwise()
        await restarted(bench, backend)
        await bench.ok(await bench.create("a"))
        arrived = threading.Event()
        backend.before_between = lambda: assert_set(arrived)
        gradient = await bench.submit(JobKind.FORWARD_BACKWARD, long_gradient(), "a")
        await until(lambda: "between" in backend.events)
        sample = await bench.sample("b", 1)
        await until(lambda: bench.worker.pending.has_samples)
        arrived.set()
        await bench.ok(sample)
        await bench.ok(gradient)
        assert backend.events[:3] == ["begin", "between", "sample 1"]
        assert backend.events.count("between") == MICRO_BATCHES - 1
        assert backend.events[-1] == "end"

    run(tmp_path, scenario)


def test_another_tenants_step_interrupts_a_long_gradient(tmp_path: Path) -> None:
    """So does the restoring of its model, which comes first. The tenant's own work waits."""

    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("b"))
        bench.worker.stop()
        await asyncio.wait_for(bench.task, 10)
        backend = Stepwise()
        bench.start(backend)
        await bench.ok(await bench.create("a"))
        await bench.ok(await bench.create("also a"))
        arrived = threading.Event()

        def ready() -> None:
            """The micro-batches of this backend take no time, so each waits for the next event."""
            assert_set(arrived)
            batches, jobs = bench.worker._device_loop, bench.worker.pending._pending
            ends_s = time.monotonic() + 10
            while not ("b" in backend.gradients or batches._calls or small in list(jobs)):
                assert time.monotonic() < ends_s
                time.sleep(0.001)

        backend.before_between = ready
        long = await bench.submit(JobKind.FORWARD_BACKWARD, long_gradient(), "a")
        await until(lambda: "between" in backend.events)
        own = await bench.gradient("also a")
        small, step = await bench.gradient("b"), await bench.step("b")
        await until(
            lambda: bool(bench.worker._device_loop._calls)
        )  # its recovery point is to be loaded
        arrived.set()
        for request_id in (small, step, long, own):
            await bench.ok(request_id)
        assert backend.gradients == ["b", "a", "also a"]

    run(tmp_path, scenario, NEVER)


def test_a_failure_during_an_interruption_does_not_affect_the_long_gradient(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = Stepwise()
        await restarted(bench, backend)
        await bench.ok(await bench.create("a"))
        await bench.ok(await bench.create("b"))
        arrived = threading.Event()
        backend.before_between = lambda: assert_set(arrived)
        backend.victim = "b"
        long = await bench.submit(JobKind.FORWARD_BACKWARD, long_gradient(), "a")
        await until(lambda: "between" in backend.events)
        small = await bench.gradient("b")
        await until(lambda: not bench.worker.pending.is_empty)
        arrived.set()
        assert (await bench.outcome(small)).rejection is not None
        await bench.ok(long)
        assert backend.gradients == ["a"]

    run(tmp_path, scenario, NEVER)


def test_a_stopping_worker_starts_no_interruption(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = Stepwise()
        await restarted(bench, backend)
        await bench.ok(await bench.create("a"))
        await bench.ok(await bench.create("b"))
        arrived = threading.Event()
        backend.before_between = lambda: assert_set(arrived)
        long = await bench.submit(JobKind.FORWARD_BACKWARD, long_gradient(), "a")
        await until(lambda: "between" in backend.events)
        small = await bench.gradient("b")
        await until(lambda: not bench.worker.pending.is_empty)
        bench.worker.stop()
        arrived.set()
        await asyncio.wait_for(bench.task, 10)
        assert backend.gradients == ["a"]
        await bench.ok(long)
        bench.start(Stepwise())
        await bench.ok(small)

    run(tmp_path, scenario, NEVER)


def test_samples_running_at_a_stop_are_drawn_by_the_next_worker(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await restarted(bench, Stepwise(slices=10**9))
        sample = await bench.sample("b", 1)
        await until(lambda: bool(bench.backend.calls))  # type: ignore[attr-defined]
        bench.worker.stop()
        await asyncio.wait_for(bench.task, 10)
        bench.start(Stepwise())
        await bench.ok(sample)

    run(tmp_path, scenario)


def test_a_sample_cancelled_while_it_runs_stops(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = Stepwise(slices=10**9)
        await restarted(bench, backend)
        cancelled, other = [await bench.sample("b", seq) for seq in range(2)]
        await until(lambda: backend.calls.keys() == {cancelled, other})
        assert await bench.store.cancel(cancelled)
        await until(lambda: backend.calls.keys() == {other})
        backend.slices = 1
        await bench.ok(other)
        rejection = (await bench.outcome(cancelled)).rejection
        assert rejection is not None and "cancelled" in rejection.message

    run(tmp_path, scenario, replace(NEVER, renew_s=0.05))


def test_the_metric_of_samples_counts_their_sequences_from_arrival_to_end(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = Stepwise(slices=10**9)
        await restarted(bench, backend)
        loop = bench.worker._device_loop
        assert loop.sequences == 0
        samples = [await bench.sample("b", seq) for seq in range(3)]
        await until(lambda: backend.calls.keys() == set(samples))
        assert loop.sequences == 3
        backend.slices = 1
        for each in samples:
            await bench.ok(each)
        await until(lambda: loop.sequences == 0)

    run(tmp_path, scenario, NEVER)


def test_samples_continue_while_a_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    write = FileStore.write

    def slowly(*given: Any, **how: Any) -> int:
        assert written.wait(10)
        return write(*given, **how)

    async def scenario(bench: Bench) -> None:
        backend = Stepwise(slices=10**9)
        await restarted(bench, backend)
        await bench.ok(await bench.create("a"))
        monkeypatch.setattr(FileStore, "write", slowly)
        checkpoint = record(CheckpointKind.TRAINING, "0" * 32)
        command = SaveWeights(CheckpointKind.TRAINING, "0" * 32, checkpoint)
        save = await bench.submit(JobKind.SAVE_WEIGHTS, encode(command), "a")
        sample = await bench.sample("b", 1)
        await until(lambda: backend.events.count("sample 1") > 5)
        written.set()
        await bench.ok(save)
        backend.slices = 1
        await bench.ok(sample)

    run(tmp_path, scenario, NEVER)
