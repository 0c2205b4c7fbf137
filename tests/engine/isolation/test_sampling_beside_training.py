"""Samples continue between batches, steps and micro-batches of training, and no bit changes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.backend.jax.sampling.test_decode_batch import after
from tests.engine.worker.scheduling.test_fairness import QUICK
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SampleResult, SamplingRequest, TrainBatch
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig

MODELS = {"a": AdapterConfig(8, 16.0, seed=1), "b": AdapterConfig(32, 16.0, seed=2)}
RUNS = count()
STEP = AdamwParams(learning_rate=0.05, weight_decay=0.1)


def requests(random: Random, snapshots: list[str]) -> dict[str, SamplingRequest]:
    """Some requests for the base model, and some for every snapshot."""
    asked = {}
    for number, snapshot in enumerate([None, *snapshots, *snapshots]):
        prompt = np.array([random.randrange(61) for _ in range(random.randint(1, 12))], np.int32)
        asked[str(number)] = SamplingRequest(
            prompt,
            snapshot,
            seed=random.randrange(2**40),
            num_samples=random.randint(1, 4),
            max_tokens=random.randint(1, 11),
            temperature=random.choice([0.0, 0.7, 1.0]),
            top_p=random.choice([0.8, 1.0]),
            prompt_logprobs=random.random() < 0.5,
        )
    return asked


def bits(result: Any) -> Any:
    assert isinstance(result, SampleResult)
    drawn = [(s.tokens.tobytes(), s.logprobs.tobytes(), s.stop_reason) for s in result.sequences]
    return drawn, result.prompt_logprobs is None or result.prompt_logprobs.tobytes()


def state_bits(state: AdapterState) -> list[Any]:
    groups = (state.weights, state.first_moment, state.second_moment, state.accumulator)
    return [state.step, *[(n, x.tobytes()) for group in groups for n, x in sorted(group.items())]]


class Run:
    """A training run of two models, with a snapshot of each after every step.

    ``pause`` is called wherever sampling may run in between.
    """

    def __init__(self, backend: JaxBackend, batches: list[TrainBatch], prefix: str) -> None:
        self.backend = backend
        self.prefix = prefix  # of its snapshots: a name always stands for the same weights
        self.batches = batches
        self.outputs: list[bytes] = []

    def start(self) -> None:
        for name, config in MODELS.items():
            self.backend.create_adapter(name, config)

    def go(self, pause: Callable[[], None]) -> list[Any]:
        self.start()
        for turn in range(2):
            for batch in self.batches:
                result = self.backend.forward_backward(batch, pause)
                self.outputs += [output.logprobs.tobytes() for output in result.outputs]
                pause()
            for metrics in self.backend.optim_steps([(name, STEP) for name in MODELS]):
                assert not isinstance(metrics, Exception)
            for name in MODELS:
                state = self.backend.adapter_state(name, optimizer=False)
                self.backend.load_snapshot(f"{self.prefix}-{name}-{turn}", state)
            pause()
        states = [
            self.backend.adapter_state(name, optimizer=True, accumulator=True) for name in MODELS
        ]
        for name in MODELS:
            self.backend.delete_adapter(name)
        return [*self.outputs, *[state_bits(state) for state in states]]


@settings(max_examples=4, deadline=None, phases=QUICK)
@given(seed=st.integers(0, 2**32))
def test_sampling_and_training_change_no_bit_of_each_other(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any, seed: int
) -> None:
    random, prefix = Random(seed), f"run {next(RUNS)}"
    rows = [datum(random.randrange(2**20), random.randint(3, 24)) for _ in range(6)]
    batches = [
        batch_of(
            [name],
            [
                micro_batch_of((0, *rows[:3])),
                micro_batch_of((0, *rows[3:])),
                micro_batch_of((0, rows[0])),
            ],
        )
        for name in MODELS
    ]
    want_training = Run(backend, batches, prefix).go(lambda: None)
    snapshots = [f"{prefix}-{name}-{turn}" for name in MODELS for turn in range(2)]
    everyone = requests(random, snapshots)
    want = {}
    for name, one in everyone.items():
        (result,) = backend.sample([one])
        want[name] = bits(result)

    # Repeat with every sample started as soon as its snapshot exists.
    waiting = dict(everyone)
    asked: dict[str, SamplingRequest] = {}
    got: dict[str, Any] = {}
    run = Run(backend, batches, prefix)

    def pause() -> None:
        for name, one in list(waiting.items()):
            snapshot = one.snapshot_id
            if snapshot is not None and not backend.has_snapshot(snapshot):
                continue
            if random.random() < 0.4:
                asked[name] = replace(waiting.pop(name), owner=random.choice("xy"))
        given = backend.sample_until(asked, after(random.randint(1, 3)))
        for name, result in given.finished.items():
            got[name] = bits(result)
            del asked[name]

    assert run.go(pause) == want_training
    while waiting or asked:
        pause()
    assert [name for name in want if got[name] != want[name]] == []
