"""Training batches that interrupt another one between its micro-batches change no bit of either,
whatever room there is and whatever fails.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.engine.backend.jax.test_backend import assert_same, break_program, state_of, step
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import OutOfMemory, TrainBatch, TrainResult
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdapterConfig

CONFIG = AdapterConfig(rank=3, alpha=16.0, seed=1)
WIDE = AdapterConfig(rank=20, alpha=16.0, seed=2)
ids = count()


@pytest.fixture
def batches(micro_batch_of: Any, batch_of: Any, datum: Any) -> Callable[..., TrainBatch]:
    """``batches("a", "b")``: a request of each of these adapters, in three micro-batches.

    With many adapters, each request is in one of them.
    """

    def make(*names: str, forward_only: bool = False) -> TrainBatch:
        requests = range(len(names))
        batches = [
            micro_batch_of(
                *((i, datum(number + i, 7)) for i in requests if i % 3 == number or len(names) < 9)
            )
            for number in range(3)
        ]
        return batch_of(names, batches, forward_only=forward_only)

    return make


def adapters(backend: JaxBackend, *configs: AdapterConfig) -> list[str]:
    names = [f"interruption-{next(ids)}" for _ in configs]
    for name, config in zip(names, configs, strict=True):
        backend.create_adapter(name, config)
    return names


def bits(result: TrainResult) -> list[bytes]:
    assert all(result.finite)
    return [each.tobytes() for out in result.outputs for each in out]


def assert_undisturbed(
    backend: JaxBackend, batches: Callable[..., TrainBatch], disturbed: str, config: AdapterConfig
) -> None:
    """An adapter of the same seed and requests, without interruptions, has the same bits."""
    (alone,) = adapters(backend, config)
    backend.forward_backward(batches(alone))
    assert_same(state_of(backend, disturbed), state_of(backend, alone))


@pytest.mark.parametrize(
    ("is_crowded", "other"),
    [
        pytest.param(False, WIDE, id="free slots-two rank buckets"),
        pytest.param(True, CONFIG, id="all slots taken-one rank bucket"),
        at_night(False, CONFIG, id="free slots-one rank bucket"),
        at_night(True, WIDE, id="all slots taken-two rank buckets"),
    ],
)
def test_interrupting_batches_change_no_bit_and_no_bit_of_theirs_changes(
    backend: JaxBackend, batches: Callable[..., TrainBatch], other: AdapterConfig, is_crowded: bool
) -> None:
    slots = backend.static_shapes.slots(backend.static_shapes.rank_bucket(other.rank))
    (long,) = adapters(backend, CONFIG)
    short = adapters(backend, *[other] * (slots if is_crowded else 1))
    want = bits(backend.forward_backward(batches(*adapters(backend, CONFIG))))
    nested = []

    def between() -> None:
        if not nested:
            nested.append(backend.forward_backward(batches(*short)))
        else:
            backend.forward_backward(batches(*short, forward_only=True))
            backend.adapter_state(long, optimizer=True)

    assert bits(backend.forward_backward(batches(long), between)) == want
    assert_undisturbed(backend, batches, long, CONFIG)
    alone = adapters(backend, *[other] * len(short))
    assert bits(backend.forward_backward(batches(*alone))) == bits(nested[0])
    for mine, its in zip(short, alone, strict=True):
        assert_same(state_of(backend, mine), state_of(backend, its))
    step(backend, long)
    step(backend, short[0])


def test_an_interrupting_batch_may_be_interrupted_itself(
    backend: JaxBackend, batches: Callable[..., TrainBatch]
) -> None:
    names = adapters(backend, *[CONFIG] * 4)

    def run(depth: int) -> None:
        if depth == len(names):
            return
        calls = count()
        between = lambda: run(depth + 1) if next(calls) == 0 else None  # noqa: E731
        backend.forward_backward(batches(names[depth]), between)

    run(0)
    for name in names:
        assert_undisturbed(backend, batches, name, CONFIG)


def test_a_step_that_evicts_the_running_adapter_changes_no_bit_of_it(
    backend: JaxBackend, batches: Callable[..., TrainBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = adapters(backend, CONFIG, CONFIG)
    backend.forward_backward(batches(short))
    monkeypatch.setattr(backend._adapters, "_device_limit", 1)
    evictions = backend._adapters.evictions
    backend.forward_backward(batches(long), lambda: step(backend, short) and None)
    assert backend._adapters.evictions > evictions + 1
    assert_undisturbed(backend, batches, long, CONFIG)


@pytest.mark.parametrize("failures", [1, 9])
def test_a_batch_that_loses_its_gradients_to_an_interruption_starts_again(
    backend: JaxBackend,
    batches: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
) -> None:
    """However often this happens, the batch ends and its gradients are added once."""
    long, short = adapters(backend, CONFIG, CONFIG)
    calls = count()

    def between() -> None:
        if next(calls) >= failures:
            return
        with monkeypatch.context() as patch:
            break_program(backend, "train", patch, after=0)
            with pytest.raises(OutOfMemory):
                backend.forward_backward(batches(short))

    backend.forward_backward(batches(long), between)
    assert next(calls) >= min(failures, 3)
    assert_undisturbed(backend, batches, long, CONFIG)
    backend.forward_backward(batches(short))
    assert_undisturbed(backend, batches, short, CONFIG)
