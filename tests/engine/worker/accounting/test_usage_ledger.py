"""Costs of requests: every device second is charged to its request, none lost and none twice."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worker.execution.test_executor import (
    CONFIG,
    DATUM,
    GOOD,
    RISE,
    World,
    training_body,
)
from tests.engine.worker.models.test_recovery import NEVER
from tests.engine.worker.test_device_loop import Stepwise, long_gradient, restarted
from tests.support.fake_backend import FakeBackend
from tests.support.worker_bench import Bench, Counting, run, until
from tuneserve_engine.backend.base import SampleProgress, SamplingRequest, TrainBatch, TrainResult
from tuneserve_engine.core.adapter import AdamwParams
from tuneserve_engine.core.jobs import Job, JobKind, OptimStep, Outcome, SampleCommand, encode
from tuneserve_engine.core.usage import MOST_POINTS, CurvePoint, Totals, Usage, stride
from tuneserve_engine.worker import lease as link_module
from tuneserve_engine.worker.accounting.usage_ledger import UsageLedger
from tuneserve_engine.worker.execution.outcomes import BatchResult

SOON = replace(NEVER, renew_s=0.02)


def datum(length: int) -> dict[str, Any]:
    return {"tokens": [1] * length, "target_tokens": [2] * length}


class Clocked(FakeBackend):
    """A backend that takes a second for every call, and half a second more for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.waited_s = 0.0
        self.fails = 0

    @property
    def load_wait_s(self) -> float:
        return self.waited_s

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        self.now_s += 1
        if self.fails:
            self.fails -= 1
            raise RuntimeError("not this time")
        self.now_s += len(batch.micro_batches) / 2
        return super().forward_backward(batch, *between)

    def optim_steps(self, steps: Sequence[tuple[str, AdamwParams]]) -> Any:
        self.now_s += 1
        return super().optim_steps(steps)

    def sample_until(
        self, asked: Mapping[str, SamplingRequest], should_yield: Callable[[], bool]
    ) -> SampleProgress:
        self.now_s += 1
        return super().sample_until(asked, should_yield)


class ClockedWorld(World):
    backend: Clocked

    def __init__(self, root: Path) -> None:
        backend = Clocked()
        super().__init__(root, backend, clock=lambda: backend.now_s)

    def executed(self, *batch: Job, **given: Any) -> BatchResult:
        return self.executor.execute_batch(batch, **given)

    def gradient(self, payload: bytes = GOOD, model: str = "m") -> Job:
        return self.job(JobKind.FORWARD_BACKWARD, payload, model)

    def sample(self, tokens: int = 4) -> Job:
        command = SampleCommand(prompt=[1, 2, 3], seed=1, num_samples=2, max_tokens=tokens)
        return self.job(JobKind.SAMPLE, encode(command), None)


@pytest.fixture
def world(tmp_path: Path) -> ClockedWorld:
    world = ClockedWorld(tmp_path)
    world.create()
    return world


# --- charges --------------------------------------------------------------------------------------


def test_a_pass_is_charged_by_the_blocks_of_each_request(world: ClockedWorld) -> None:
    """The fake device has blocks of 8 tokens: one for 2 tokens, three for 24."""
    small, large = world.gradient(), world.gradient(training_body(datum(24)))
    executed = world.executed(small, large)
    assert executed.device_s == pytest.approx(1.5)
    assert executed.shares == pytest.approx({small.request_id: 0.375, large.request_id: 1.125})
    of_small, of_large = (each.usage for each in executed.outcomes())
    assert of_small == Usage(trained_tokens=2, padded_tokens=6, flops=4.0 * 1000 * 2)
    assert of_large == Usage(trained_tokens=24, padded_tokens=0, flops=4.0 * 1000 * 24)


def test_the_rest_of_the_last_chunk_is_padding_of_the_requests_that_open_it(
    world: ClockedWorld,
) -> None:
    """A chunk has 16 tokens. Each of 3 blocks gets a third of the padding in the fourth."""
    executed = world.executed(world.gradient(), world.gradient(training_body(datum(16))))
    padded = [each.usage.padded_tokens for each in executed.outcomes() if each.usage]
    assert padded == [round(32 / 3) - 2, round(64 / 3) - 16]


def test_a_forward_only_request_costs_half_the_flops(world: ClockedWorld) -> None:
    (outcome,) = world.run(world.gradient(training_body(DATUM, forward_only=True)))
    assert outcome.usage is not None and outcome.usage.flops == 2.0 * 1000 * 2


def test_a_failed_pass_is_charged_to_no_request(world: ClockedWorld) -> None:
    world.backend.fails = 1
    jobs = [world.gradient(), world.gradient()]
    executed = world.executed(*jobs)
    assert executed.device_s == pytest.approx(1 + 2 * 1.5)
    assert executed.shares == pytest.approx({job.request_id: 1.5 for job in jobs})


def test_a_gradient_that_is_not_finite_is_charged(world: ClockedWorld) -> None:
    bad = training_body({**datum(4), "weights": [3e38] * 4})
    job = world.gradient(bad)
    executed = world.executed(job)
    assert executed.outcomes()[0].rejection is not None
    assert executed.shares == pytest.approx({job.request_id: 1.5})


def test_steps_are_charged_by_rank(world: ClockedWorld) -> None:
    world.create("wide", replace(CONFIG, rank=12))
    jobs = [world.job(JobKind.OPTIM_STEP, encode(OptimStep(RISE)), m) for m in ("m", "wide")]
    executed = world.executed(*jobs)
    assert list(executed.shares.values()) == pytest.approx([0.25, 0.75])


def test_samples_are_charged_by_the_work_done_for_each(world: ClockedWorld) -> None:
    """On the fake device: three tokens of the prompt, and the maximum of sampled ones."""
    short, long = world.sample(tokens=3), world.sample(tokens=15)
    executed = world.executed(short, long)
    shares = pytest.approx({short.request_id: 0.25, long.request_id: 0.75})
    assert executed.shares == shares
    usage = executed.outcomes()[0].usage
    assert usage == Usage(prompt_tokens=3, sampled_tokens=6, flops=2.0 * 1000 * (3 + 6))


def test_an_interruption_is_not_charged_twice(world: ClockedWorld) -> None:
    """Neither request is charged for waiting for the other."""
    samples: list[BatchResult] = []

    def between() -> None:
        world.backend.waited_s, world.backend.now_s = 5.0, world.backend.now_s + 5
        samples.append(world.executed(world.sample()))
        world.backend.waited_s, world.backend.now_s = 12.0, world.backend.now_s + 7

    long = world.gradient(training_body(*[datum(64)] * 2))  # two bins: two micro-batches
    executed = world.executed(long, on_micro_batch_done=between)
    assert [each.device_s for each in samples] == pytest.approx([1.0])
    assert executed.device_s == pytest.approx(1 + 2 * 0.5)
    assert executed.shares == pytest.approx({long.request_id: 2.0})


def test_the_curve_has_losses_weights_rates_and_norms(world: ClockedWorld) -> None:
    weighted = training_body({**DATUM, "weights": [1.0, 0.5]})
    (gradient,) = world.run(world.gradient(weighted))
    assert gradient.point == CurvePoint(
        "forward_backward", 2, loss_sum=0.5 + 0.5 * 0.75, tokens=2, weight=1.5
    )
    for number in (1, 2):
        (step,) = world.run(world.job(JobKind.OPTIM_STEP, encode(OptimStep(RISE))))
        assert step.point is not None
        assert (step.point.step, step.point.learning_rate) == (number, 2**-10)
    assert step.point is not None and step.point.grad_norm == 0.0
    (forward,) = world.run(world.gradient(training_body(DATUM, forward_only=True)))
    assert forward.point is not None and forward.point.kind == "forward"


# --- the ledger -----------------------------------------------------------------------------------


def test_the_ledger_times_a_request_and_adds_up_its_slices() -> None:
    now_s = 10.0
    ledger = UsageLedger(lambda: now_s)
    a, b = (Job("t", JobKind.SAMPLE, "s", 0, b"", request_id=each) for each in "ab")
    ledger.on_arrived([a, b])
    now_s = 12.0
    ledger.on_started([a], others=4)
    now_s = 13.0
    ledger.on_ran(
        BatchResult(
            [], [], {"a": 1}, device_s=1.0, shares={"a": 0.5, "unknown": 0.25}, began_s=12.25
        )
    )
    now_s = 15.0
    ledger.on_started([b], others=0)
    ledger.on_ran(
        BatchResult([a], [], {"b": 1}, device_s=2.0, shares={"a": 0.5, "b": 1.5}, began_s=13.5)
    )
    now_s = 15.5
    of_a = ledger.with_usage(Outcome("a", usage=Usage(flops=7.0)))
    unknown = ledger.with_usage(Outcome("unknown"))
    assert of_a.usage == Usage(
        1.0, flops=7.0, queued_s=2.0, ran_s=3.5, others=4, packed_s=0.25, transfer_s=0.5
    )
    assert unknown.usage is None
    assert (ledger.overhead_s, ledger.flops) == (0.5, 7.0)
    ledger.move_to_overhead(["b", "c"])
    assert ledger.overhead_s == 2.0


def test_a_request_learns_how_many_jobs_were_ahead_in_total_and_of_its_tenant() -> None:
    ledger = UsageLedger(lambda: 0.0)

    def jobs(*names: str) -> list[Job]:
        return [Job(name[0], JobKind.SAMPLE, "s", 0, b"", request_id=name) for name in names]

    def behind(name: str) -> tuple[int, int]:
        outcome = ledger.with_usage(Outcome(name))
        assert outcome.usage is not None
        return outcome.usage.behind, outcome.usage.behind_own

    ledger.on_arrived(jobs("a1", "a2", "b1"))
    ledger.on_started(jobs("a1"), others=0)
    ledger.on_arrived(jobs("a3", "b2"))
    ledger.on_started(jobs("a2", "b1"), others=1)  # they share a batch: neither is behind the other
    ledger.on_started(jobs("b2"), others=0)
    ledger.on_started(jobs("a3"), others=0)
    ledger.on_arrived(jobs("a4"))
    ledger.on_started(jobs("a4", "unknown"), others=0)
    assert [behind(name) for name in ("a1", "a2", "b1", "b2", "a3", "a4", "unknown")] == [
        *((0, 0), (1, 1), (1, 0), (2, 1), (3, 1), (0, 0), (0, 0))
    ]
    assert not ledger._begun  # no request waits, so nothing is counted


def test_requests_that_move_elsewhere_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_engine.worker.accounting.usage_ledger._ARRIVALS", 3)
    ledger = UsageLedger(lambda: 0.0)
    jobs = [Job("t", JobKind.SAMPLE, "s", 0, b"", request_id=str(i)) for i in range(10)]
    ledger.on_arrived(jobs)
    assert list(ledger._arrived) == ["7", "8", "9"]


def test_strides_keep_curves_short_and_even() -> None:
    """The strides were worked out by hand for the places where they change."""
    most = MOST_POINTS
    places = (0, most - 1, most, 2 * most - 1, 2 * most, 4 * most - 1, 4 * most, 8 * most - 1)
    assert [stride(n) for n in places] == [1, 1, 2, 2, 4, 4, 8, 8]


# --- the sum --------------------------------------------------------------------------------------


async def counted(bench: Bench) -> Totals:
    """The sums in the store.

    Asserts that they contain everything that this worker's device did, and nothing twice.
    """
    await bench.worker._unstored.wait(None, None)
    used = sum((each.total for each in await bench.store.usage()), Totals())
    metrics = bench.worker._metrics()
    busy_s = metrics["device_seconds_total"]
    overhead_s = metrics["device_seconds_overhead_total"]
    assert busy_s > 0
    assert used.device_s + overhead_s == pytest.approx(busy_s, rel=1e-6), (used, metrics)
    return used


def test_all_seconds_of_a_mixed_load_are_charged(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        backend = Stepwise(slices=3)
        await restarted(bench, backend)
        requests = [await bench.create(each) for each in ("a", "b", "c")]
        for turn in range(4):
            requests.append(await bench.submit(JobKind.FORWARD_BACKWARD, long_gradient(), "a"))
            for model in ("b", "c"):
                requests += [await bench.gradient(model, turn), await bench.step(model)]
            requests += [await bench.sample(tenant, turn) for tenant in ("a", "d", "e")]
        for each in requests:
            await bench.ok(each)
        used = await counted(bench)
        assert bench.worker._metrics()["device_seconds_overhead_total"] < 0.02 * used.device_s
        assert "between" in backend.events
        assert used.requests == len(requests)
        assert (used.trained_tokens, used.prompt_tokens) == (4 * 5 * 64 + 8, 12 * 2)
        by_tenant = {each.tenant: each.total.requests for each in await bench.store.usage()}
        assert by_tenant == {"a": 9, "b": 9, "c": 9, "d": 4, "e": 4}

    run(tmp_path, scenario, NEVER)


def test_a_lost_answer_and_a_failed_pass_are_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RETRY_S", 0.01)

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {"finish": ["", "after", "before", "full", "after"]}
        for model in ("a", "b"):
            await bench.ok(await bench.create(model))
        bench.backend.victim = "b"
        bench.backend.gate.clear()
        first = await bench.gradient("a")
        await until(lambda: not bench.worker.pending.in_order())
        good, bad = await bench.gradient("a"), await bench.gradient("b")
        bench.backend.gate.set()
        await bench.ok(first)
        await bench.ok(good)
        assert (await bench.outcome(bad)).rejection is not None
        await bench.ok(await bench.step("a"))
        used = await counted(bench)
        assert used.requests == 6
        assert bench.worker._metrics()["device_seconds_overhead_total"] > 0

    run(tmp_path, scenario, SOON)


def test_replay_after_a_death_is_overhead(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ok(await bench.create("a"))
        for token in range(3):
            await bench.ok(await bench.gradient("a", token))
        before = await counted(bench)
        curve = await bench.store.curve("a")
        await bench.kill()
        bench.start(Counting(), name="other")
        await bench.store.resign(1)
        await bench.ok(await bench.step("a"))
        await bench.worker._unstored.wait(None, None)
        (used,) = await bench.store.usage()
        metrics = bench.worker._metrics()
        after_s = used.total.device_s - before.device_s
        overhead_s = metrics["device_seconds_overhead_total"]
        assert len(bench.backend.gradients) == 3
        assert used.total.requests == 5 and overhead_s > 0
        assert after_s + overhead_s == pytest.approx(metrics["device_seconds_total"], rel=1e-6)
        assert (await bench.store.curve("a"))[:-1] == curve

    run(tmp_path, scenario, NEVER)


def test_a_sample_cancelled_while_it_runs_is_charged(tmp_path: Path) -> None:
    """Otherwise a client that reads the stream could have it for nothing."""

    async def scenario(bench: Bench) -> None:
        backend = Stepwise(slices=10**9)
        await restarted(bench, backend)
        cancelled, other = [await bench.sample("b", seq) for seq in range(2)]
        await until(lambda: backend.calls.keys() == {cancelled, other})
        assert await bench.store.cancel(cancelled)
        await until(lambda: backend.calls.keys() == {other})
        backend.slices = 1
        await bench.ok(other)
        async with asyncio.timeout(5):
            while not (used := await bench.store.usage()) or used[0].total.requests < 2:
                await asyncio.sleep(0.01)
        assert (await counted(bench)).requests == 2
        state = await bench.store.request(cancelled)
        assert state is not None and state.usage is not None and state.usage.device_s > 0

    run(tmp_path, scenario, replace(NEVER, renew_s=0.05))


def test_a_sample_that_ran_in_vain_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RETRY_S", 0.05)

    async def scenario(bench: Bench) -> None:
        bench.line.breaks = {"finish": ["full"]}
        unwanted = await bench.sample("b", 1)
        await until(lambda: "finish" in bench.line.calls)
        await bench.store.cancel(unwanted)
        await bench.ok(await bench.sample("b", 2))
        assert (await counted(bench)).requests == 2

    run(tmp_path, scenario, SOON)


def test_samples_dropped_at_a_stop_are_overhead(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await restarted(bench, Stepwise(slices=10**9))
        await bench.sample("b", 1)
        await until(lambda: bool(bench.backend.calls))  # type: ignore[attr-defined]
        bench.worker.stop()
        await asyncio.wait_for(bench.task, 10)
        metrics = bench.worker._metrics()
        assert metrics["device_seconds_overhead_total"] == metrics["device_seconds_total"] > 0
        assert await bench.store.usage() == []

    run(tmp_path, scenario)


def test_a_result_says_how_long_it_waited_and_how_many_ran_with_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for model in ("a", "b", "c"):
            await bench.ok(await bench.create(model))
        bench.backend.gate.clear()
        first = await bench.gradient("a")
        await until(lambda: not bench.worker.pending.in_order())
        others = [await bench.gradient(model) for model in ("b", "c")]
        await until(lambda: len(bench.worker.pending.in_order()) == 2)
        await asyncio.sleep(0.05)
        bench.backend.gate.set()
        outcomes = [await bench.outcome(each) for each in (first, *others)]
        costs = [each.usage for each in outcomes]
        alone, *together = [each for each in costs if each is not None]
        assert (alone.others, [each.others for each in together]) == (0, [1, 1])
        assert alone.ran_s >= alone.device_s >= 0.05
        for each in together:
            assert each.queued_s >= 0.05 > each.device_s > 0
            assert each.total_s >= each.queued_s + each.ran_s

    run(tmp_path, scenario, NEVER)
