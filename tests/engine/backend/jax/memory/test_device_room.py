"""The device's room for concurrent steps and micro-batches, and the state after it ran out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.conftest import STATIC_SHAPES
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.backend.jax.adapters.arrays import TrainingAdapter, adapter_bytes
from tuneserve_engine.backend.jax.adapters.room import AdapterRoom
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig

CONFIG = AdapterConfig(rank=8, alpha=32, seed=1)
STEP = AdamwParams(learning_rate=0.01)


def exhausted(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.")


def state_of(backend: JaxBackend, adapter_id: str) -> AdapterState:
    return backend.adapter_state(adapter_id, optimizer=True, accumulator=True)


def assert_same(a: AdapterState, b: AdapterState) -> None:
    assert (a.config, a.step) == (b.config, b.step)
    for part in ("weights", "first_moment", "second_moment", "accumulator"):
        mine, other = getattr(a, part), getattr(b, part)
        assert mine.keys() == other.keys()
        assert all(mine[name].tobytes() == other[name].tobytes() for name in mine)


# --- steps ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(base_model: Path, backend: JaxBackend) -> JaxBackend:
    """A backend with room for two adapters of rank 8 on its device."""
    room = AdapterRoom(device_bytes=2 * adapter_bytes(backend._shapes, 8))
    return JaxBackend(
        str(base_model), name="tiny", tokenizer_id="t", static_shapes=STATIC_SHAPES, room=room
    )


def with_gradient(backend: JaxBackend, name: str, seed: int) -> None:
    """Create an adapter that has a gradient."""
    backend.create_adapter(name, CONFIG)
    state = backend.adapter_state(name, optimizer=False)
    random = np.random.default_rng(seed)
    gradient = {
        name: random.standard_normal(x.shape, np.float32) for name, x in state.weights.items()
    }
    backend.load_adapter(name, replace(state, accumulator=gradient))


def test_no_more_adapters_step_at_once_than_fit_on_the_device(
    narrow: JaxBackend, backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"stepping {number}" for number in range(5)]
    for each in (narrow, backend):
        for seed, name in enumerate(names):
            with_gradient(each, name, seed)
    get, asked, most = narrow._adapters.get, [], 0

    def noting(adapter_ids: Sequence[str]) -> list[TrainingAdapter]:
        nonlocal most
        adapters = get(adapter_ids)
        asked.append(list(adapter_ids))
        most = max(most, narrow._adapters.on_device)
        return adapters

    monkeypatch.setattr(narrow._adapters, "get", noting)
    got = narrow.optim_steps([(name, STEP) for name in names])
    assert asked == [names[:2], names[2:4], names[4:]]
    assert most == 2
    assert got == backend.optim_steps([(name, STEP) for name in names])
    for name in names:
        assert_same(state_of(narrow, name), state_of(backend, name))


def test_a_group_without_room_fails_alone_and_no_step_is_taken_twice(
    narrow: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"waiting {number}" for number in range(4)]
    for seed, name in enumerate(names):
        with_gradient(narrow, name, seed)
    get, asked = narrow._adapters.get, []

    def cramped(adapter_ids: Sequence[str]) -> list[TrainingAdapter]:
        asked.append(list(adapter_ids))
        adapters: list[TrainingAdapter] = (
            exhausted() if names[2] in adapter_ids else get(adapter_ids)
        )
        return adapters

    monkeypatch.setattr(narrow._adapters, "get", cramped)
    results = narrow.optim_steps([(name, STEP) for name in names])
    monkeypatch.undo()
    assert asked == [names[:2], names[2:], [names[2]], [names[3]]]
    assert isinstance(results[2], OutOfMemory)
    assert [isinstance(result, Exception) for result in results] == [False, False, True, False]
    assert [state_of(narrow, name).step for name in names] == [1, 1, 0, 1]
    (taken,) = narrow.optim_steps([(names[2], STEP)])
    assert not isinstance(taken, Exception)
    assert state_of(narrow, names[2]).step == 1


# --- gradients ------------------------------------------------------------------------------------


def test_a_failure_after_dispatch_does_not_affect_later_batches(
    backend: JaxBackend,
    micro_batch_of: Any,
    batch_of: Any,
    datum: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program's output buffers exist before it has run."""
    for name in ("unlucky", "undisturbed"):
        backend.create_adapter(name, CONFIG)
    micro_batch = micro_batch_of((0, datum(1, 11)))
    train = backend._trainer._micro_batches.train[False]

    def fail_later(*args: Any) -> Any:
        trained = train(*args)
        for array in jax.tree.leaves((trained.space, trained.gradient_slots)):
            array.delete()
        monkeypatch.setattr(jax, "device_get", exhausted)
        return trained

    before = state_of(backend, "unlucky")
    monkeypatch.setitem(backend._trainer._micro_batches.train, False, fail_later)
    with pytest.raises(OutOfMemory):
        backend.forward_backward(batch_of(["unlucky"], [micro_batch]))
    monkeypatch.undo()
    assert_same(state_of(backend, "unlucky"), before)
    for name in ("unlucky", "undisturbed"):
        backend.forward_backward(batch_of([name], [micro_batch]))
    assert state_of(backend, "unlucky").accumulator
    assert_same(state_of(backend, "unlucky"), state_of(backend, "undisturbed"))


@pytest.mark.parametrize(("program", "forward_only"), [("train", False), ("score", True)])
def test_one_micro_batch_runs_at_a_time_and_the_device_is_free_in_between(
    backend: JaxBackend,
    micro_batch_of: Any,
    batch_of: Any,
    datum: Any,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    forward_only: bool,
) -> None:
    backend.create_adapter("many", CONFIG)
    micro_batches = [micro_batch_of((0, datum(seed, 5 + seed))) for seed in range(5)]
    running_samples: list[Any] = []
    most = 0
    programs: dict[bool, Any] = getattr(backend._trainer._micro_batches, program)
    run: Callable[..., Any] = programs[False]
    fetch = jax.device_get

    def noting(*args: Any) -> Any:
        nonlocal most
        result = run(*args)
        running_samples.append(result if forward_only else result.out)
        most = max(most, len(running_samples))
        return result

    def fetched(tree: Any) -> Any:
        running_samples[:] = [each for each in running_samples if each is not tree]
        return fetch(tree)

    monkeypatch.setitem(programs, False, noting)
    monkeypatch.setattr(jax, "device_get", fetched)
    batch = batch_of(["many"], micro_batches, forward_only=forward_only)
    between: list[int] = []
    together = backend.forward_backward(batch, lambda: between.append(len(running_samples))).outputs
    assert (most, running_samples, between) == (1, [], [0, 0, 0, 0])
    monkeypatch.undo()
    for micro_batch, output in zip(micro_batches, together, strict=True):
        alone = backend.forward_backward(
            batch_of(["many"], [micro_batch], forward_only=True)
        ).outputs[0]
        used = micro_batch.segment_ids >= 0
        np.testing.assert_allclose(output.loss[used], alone.loss[used], rtol=1e-5)


def test_tokens_are_counted_without_and_with_padding(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
) -> None:
    """Blocks have 8 tokens, chunks 16."""
    backend.create_adapter("counted", CONFIG)
    micro_batches = [
        micro_batch_of((0, datum(1, 11)), (1, datum(2, 3), datum(3, 9))),
        micro_batch_of((1, datum(4, 5))),
    ]
    names = ("tokens_trained_total", "tokens_computed_total")
    before = [backend.metrics[name] for name in names]
    backend.forward_backward(batch_of(["counted"] * 2, micro_batches))
    assert [backend.metrics[name] for name in names] == [before[0] + 28, before[1] + 32 + 16]


def test_the_gap_between_the_samplers_logprobs_and_the_trainers_is_counted(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
) -> None:
    """Tokens of policy losses with an advantage count. The rest were not sampled."""
    backend.create_adapter("compared", CONFIG)
    old = np.linspace(-3, -1, 11)
    advantages = np.array([0, 0, 0, 1, -1, 0.5, 0, 2, 1, 1, 0])
    policy = datum(1, 11, "ppo", old_logprobs=old, advantages=advantages)
    micro_batch = micro_batch_of((0, policy), (1, datum(2, 9)))
    names = ("policy_tokens_total", "policy_logprob_gap_total")
    before = [backend.metrics[name] for name in names]
    result = backend.forward_backward(batch_of(["compared"] * 2, [micro_batch]))
    found = result.outputs[0].logprobs[:11, 0]
    expected = np.abs(found - old)[advantages != 0]
    tokens, gap = (backend.metrics[name] - was for name, was in zip(names, before, strict=True))
    assert tokens == len(expected) == 6
    np.testing.assert_allclose(gap, expected.sum(), rtol=1e-6)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expected"),
    [("INTERNAL: the device is gone", DeviceFailed), ("RESOURCE_EXHAUSTED: full", OutOfMemory)],
)
def test_a_failed_copy_of_a_state_is_a_device_failure_or_out_of_memory(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, message: str, expected: type[Exception]
) -> None:
    def broken(_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    backend.create_adapter("copied", CONFIG)
    backend.optim_steps([("copied", STEP)])  # this call loads it on the device
    monkeypatch.setattr(jax, "device_get", broken)
    with pytest.raises(expected, match=message.split(": ")[1]):
        backend.adapter_state("copied", optimizer=True)
