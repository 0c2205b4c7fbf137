"""Batches of several jobs: passes, retries after failures, and deferred answers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.worker.execution.test_executor import (
    CONFIG,
    DATUM,
    GOOD,
    RISE,
    World,
    assert_same,
    body,
    message,
    trained,
    training_body,
)
from tests.support.fake_backend import FakeBackend
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory, TrainBatch, TrainResult
from tuneserve_engine.core.adapter import AdamwParams
from tuneserve_engine.core.jobs import Job, JobKind, OptimStep, Outcome, encode
from tuneserve_engine.store.files import new_file_id

LARGE = replace(CONFIG, rank=16)  # in another rank bucket than CONFIG's 4
FORWARD = training_body(DATUM, forward_only=True)


class Noting(FakeBackend):
    """Records its calls. Calls with an adapter of ``failing`` raise.

    Adapters of ``lonely`` cannot step beside others.
    """

    def __init__(self, memory_tokens: int | None = None) -> None:
        super().__init__(memory_tokens=memory_tokens)
        self.batches: list[tuple[str, ...]] = []
        self.steps: list[list[str]] = []
        self.failing: dict[str, Exception] = {}
        self.lonely: dict[str, OutOfMemory] = {}

    def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
        self.batches.append(batch.adapter_ids)
        self._check(batch.adapter_ids)
        return super().forward_backward(batch, *between)

    def optim_steps(self, steps: Sequence[tuple[str, AdamwParams]]) -> list[Any]:
        names = [name for name, _ in steps]
        self.steps.append(names)
        self._check(names)
        if len(names) == 1:
            return super().optim_steps(steps)
        return [
            self.lonely.get(step[0]) or super(Noting, self).optim_steps([step])[0] for step in steps
        ]

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.failing:
                raise self.failing[name]


@pytest.fixture
def new_world(tmp_path: Path) -> Callable[..., World]:
    """Worlds with separate disks and models of two rank buckets: "a", "b", "A" and "B"."""

    def make(backend: FakeBackend | None = None) -> World:
        world = World(tmp_path / new_file_id(), backend or Noting())
        for name in "abAB":
            world.create(name, LARGE if name.isupper() else CONFIG)
        return world

    return make


def whole_state(world: World, model: str) -> AdapterState:
    return world.backend.adapter_state(model, optimizer=True, accumulator=True)


def assert_same_gradient(one: World, other: World, models: str) -> None:
    for model in models:
        mine, theirs = whole_state(one, model), whole_state(other, model)
        assert mine.accumulator.keys() == theirs.accumulator.keys() != set()
        for name, tensor in mine.accumulator.items():
            assert tensor.tobytes() == theirs.accumulator[name].tobytes()


def step_of(world: World, model: str, params: AdamwParams = RISE) -> Job:
    return world.job(JobKind.OPTIM_STEP, encode(OptimStep(params)), model)


# --- passes ---------------------------------------------------------------------------------------


def test_requests_that_cannot_share_a_pass_share_a_batch(new_world: Callable[..., World]) -> None:
    world, alone = new_world(), new_world()
    models = ["a", "A", "a", "b", "B", "a"]
    asked = [GOOD, GOOD, FORWARD, training_body(DATUM, DATUM), GOOD, GOOD]
    together = world.run(*[world.gradient(*each) for each in zip(asked, models, strict=True)])
    assert world.backend.batches == [("a", "b", "a"), ("A", "B"), ("a",)]
    for outcome, data, model in zip(together, asked, models, strict=True):
        assert outcome.body == alone.run(alone.gradient(data, model))[0].body
    assert_same_gradient(world, alone, "abAB")


def test_only_the_requests_of_the_failed_pass_run_again(
    new_world: Callable[..., World],
) -> None:
    world, undisturbed = new_world(), new_world()
    models = ["a", "A", "b", "B", "a"]
    undisturbed.run(*[undisturbed.gradient(model=model) for model in models if model != "B"])
    world.backend.failing = {"B": RuntimeError("the device is on fire")}
    *fine, failed, last = world.run(*[world.gradient(model=model) for model in models])
    assert world.backend.batches == [("a", "b", "a"), ("A", "B"), ("A",), ("B",)]
    assert "internal error" in message(failed, "server")
    assert [trained(each).metrics for each in (*fine, last)] == [{"loss:sum": 1.25}] * 4
    assert_same_gradient(world, undisturbed, "abA")
    assert not whole_state(world, "B").accumulator


def test_requests_without_room_together_are_halved_alone_and_recorded(
    new_world: Callable[..., World],
) -> None:
    """A micro-batch has 256 tokens, and half of it fits."""
    small, large = new_world(Noting(memory_tokens=128)), new_world()
    models = ["a", "A", "b"]
    outcomes = small.run(*[small.gradient(model=model) for model in models])
    assert small.backend.batches == [("a", "b"), *[("a",)] * 2, *[("b",)] * 2, *[("A",)] * 2]
    assert [each.halvings for each in outcomes] == [1, 1, 1]
    small.backend.batches.clear()
    (again,) = small.run(replace(small.gradient(), model_id="a", halvings=1))
    assert small.backend.batches == [("a",)]
    assert (again.halvings, again.body) == (1, outcomes[0].body)
    large.run(*[large.gradient(model=model) for model in [*models, "a"]])
    assert_same_gradient(small, large, "abA")


def test_a_request_that_never_fits_ends_in_an_error(new_world: Callable[..., World]) -> None:
    world = new_world(Noting(memory_tokens=16))
    (outcome,) = world.run(world.gradient(model="a"))
    assert "no memory for this forward_backward" in message(outcome)
    assert len(world.backend.batches) == 4  # whole and halved three times
    assert outcome.rejection is not None and outcome.rejection.no_room


def test_a_request_does_not_retry_micro_batches_of_a_length_that_did_not_fit(
    new_world: Callable[..., World],
) -> None:
    world = new_world(Noting(memory_tokens=16))
    longest = training_body({"tokens": [1] * 64, "target_tokens": [2] * 64})
    (outcome,) = world.run(world.gradient(longest, "a"))
    assert "no memory for this forward_backward" in message(outcome)
    assert len(world.backend.batches) == 3  # of 256, 128 and 64 tokens


def test_a_device_failure_ends_the_batch_at_once(new_world: Callable[..., World]) -> None:
    world = new_world()
    world.backend.failing = {"A": DeviceFailed("it fell off the bus")}
    for jobs in (
        [world.gradient(model="a"), world.gradient(model="A"), world.gradient(model="B")],
        [step_of(world, "a"), step_of(world, "A")],
    ):
        with pytest.raises(DeviceFailed, match="fell off"):
            world.executor.execute_batch(jobs)
    assert world.backend.batches == [("a",), ("A", "B")]
    assert world.backend.steps == [["a", "A"]]


# --- steps ----------------------------------------------------------------------------------------


def test_the_steps_of_a_batch_are_one_call(new_world: Callable[..., World]) -> None:
    worlds = [new_world(), new_world()]
    for world in worlds:
        world.run(*[world.gradient(model=model) for model in "abA"])
    together, alone = worlds
    bad = AdamwParams(beta1=2.0)
    asked = {"a": RISE, "b": bad, "A": AdamwParams(learning_rate=0.01)}
    first, second, third = together.run(*[step_of(together, *each) for each in asked.items()])
    assert together.backend.steps == [["a", "b", "A"]]
    assert "beta1 is 2.0" in message(second)
    for outcome, model in ((first, "a"), (third, "A")):
        assert outcome.changed
        assert body(outcome) == body(alone.step(asked[model], model))
        assert_same(together.state(model), alone.state(model))
    assert whole_state(together, "b").accumulator and whole_state(together, "b").step == 0


def test_steps_that_fail_together_are_taken_one_by_one(new_world: Callable[..., World]) -> None:
    world = new_world()
    for failure, text in (
        (RuntimeError("the device is on fire"), "internal error while running optim_step"),
        (OutOfMemory("no room"), "no memory for optim_step; nothing was changed; retry"),
    ):
        world.backend.steps.clear()
        world.backend.failing = {"b": failure}
        jobs = [step_of(world, model) for model in ("a", "ghost", "b", "A")]
        first, ghost, second, third = world.run(*jobs)
        assert world.backend.steps == [["a", "b", "A"], ["a"], ["b"], ["A"]]
        assert text in message(second, "server")
        assert "ghost is not loaded" in message(ghost)
        assert body(first) == body(third) == {"metrics": {"grad_norm": 0.0}}


def test_a_step_that_cannot_be_taken_even_alone_fails_alone(
    new_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()
    results = {"a": {"grad_norm": 1.0}, "b": OutOfMemory("no room"), "A": RuntimeError("on fire")}
    monkeypatch.setattr(
        world.backend, "optim_steps", lambda steps: [results[name] for name, _ in steps]
    )
    first, second, third = world.run(*[step_of(world, model) for model in "abA"])
    assert body(first) == {"metrics": {"grad_norm": 1.0}}
    assert "no memory" in message(second, "server")
    assert "internal error" in message(third, "server")


def test_a_step_without_room_beside_others_is_taken_alone(new_world: Callable[..., World]) -> None:
    world, alone = new_world(), new_world()
    for each in (world, alone):
        each.run(*[each.gradient(model=model) for model in "abA"])
    world.backend.lonely = {"b": OutOfMemory("no room"), "A": OutOfMemory("no room")}
    outcomes = world.run(*[step_of(world, model) for model in "abA"])
    assert world.backend.steps == [["a", "b", "A"], ["b"], ["A"]]
    for model, outcome in zip("abA", outcomes, strict=True):
        assert body(outcome) == body(alone.step(model=model))
        assert_same(world.state(model), alone.state(model))


# --- answers and payloads beside the device -------------------------------------------------------


def test_answers_can_be_encoded_while_the_device_continues(new_world: Callable[..., World]) -> None:
    world, other = new_world(), new_world()
    executed = [
        world.executor.execute_batch([world.gradient(model="a"), world.gradient(FORWARD, "b")]),
        world.executor.execute_batch([step_of(world, "a")]),
        world.executor.execute_batch([world.gradient(model="a")]),
        world.executor.execute_batch([world.sample(seed=3)]),
    ]
    with ThreadPoolExecutor(1) as host:
        late = [host.submit(each.outcomes).result() for each in executed]
    at_once: list[Sequence[Outcome]] = [
        other.run(other.gradient(model="a"), other.gradient(FORWARD, "b")),
        [other.step(model="a")],
        other.run(other.gradient(model="a")),
        other.run(other.sample(seed=3)),
    ]
    assert [[each.body for each in batch] for batch in late] == [
        [each.body for each in batch] for batch in at_once
    ]


def test_a_model_has_its_new_position_before_its_answers_are_encoded(
    new_world: Callable[..., World],
) -> None:
    """A recovery point may be captured in between, of a state that includes the batch's effect."""
    world = new_world()
    job = world.gradient(model="a")
    executed = world.executor.execute_batch([job])
    captured = world.executor.capture_model("a")
    assert captured is not None and job.position is not None
    state, position = captured
    assert position == job.position + 1
    assert state.accumulator
    assert trained(executed.outcomes()[0]).metrics == {"loss:sum": 1.25}


def test_a_prefetched_payload_is_not_decoded_again(
    new_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()
    jobs = [world.gradient(model=model) for model in "abA"]
    bad = replace(world.gradient(training_body({**DATUM, "weights": [1.0, np.nan]})), model_id="B")
    decode, threads = world.executor.decode_payload, []

    def noting(job: Job) -> Any:
        threads.append(threading.current_thread())
        return decode(job)

    monkeypatch.setattr(world.executor, "decode_payload", noting)
    with ThreadPoolExecutor(1) as host:
        decoded = {job.request_id: host.submit(noting, job) for job in (*jobs[:2], bad)}
    decoded[jobs[2].request_id] = Future()  # a decode that has not started
    outcomes = world.executor.execute_batch([*jobs, bad], decoded).outcomes()
    assert "nan at position 1" in message(outcomes.pop())
    assert [trained(each).metrics for each in outcomes] == [{"loss:sum": 1.25}] * 3
    assert [each is threading.current_thread() for each in threads] == [False] * 3 + [True]


def test_a_payload_that_cannot_be_decoded_because_of_a_bug_fails_alone(
    new_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()
    good, bad = world.gradient(model="a"), world.gradient(model="b")
    decode = world.executor.decode_payload

    def failing(job: Job) -> Any:
        if job is bad:
            raise MemoryError
        return decode(job)

    monkeypatch.setattr(world.executor, "decode_payload", failing)
    first, second = world.run(good, bad)
    assert trained(first).metrics == {"loss:sum": 1.25}
    assert "internal error" in message(second, "server")
    assert world.backend.batches == [("a",)]


def test_only_hosted_models_are_prefetched(
    new_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(world.backend, "prefetch", asked.append)
    world.executor.prefetch(["B", "ghost", "a"])
    assert asked == [["B", "a"]]


def test_the_device_time_of_a_batch_is_reported(tmp_path: Path) -> None:
    """The batch waits a quarter of it for adapters."""
    now_s = 0.0

    class Slow(FakeBackend):
        def forward_backward(self, batch: TrainBatch, *between: Any) -> TrainResult:
            nonlocal now_s
            now_s += 2.0
            return super().forward_backward(batch, *between)

        @property
        def load_wait_s(self) -> float:
            return now_s / 4

    world = World(tmp_path, Slow(), clock=lambda: now_s)
    for name in "aA":
        world.create(name, LARGE if name.isupper() else CONFIG)
    batch = [world.gradient(model="a"), world.gradient(model="A")]
    assert world.executor.execute_batch(batch).device_s == 3.0
    assert world.executor.execute_batch(batch[:1]).device_s == 1.5
