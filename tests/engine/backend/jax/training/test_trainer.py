"""Batches of micro-batches and optimizer steps: gradients are each request's, and nothing grows."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.backend.jax.training.conftest import BatchOf, Datum
from tests.engine.backend.jax.training.packed_case import (
    ADAPTERS,
    SHAPES,
    Ran,
    adapter_of,
    gradient,
    model_of,
    tokens_of,
)
from tests.support.adapters import live, pointers, settled
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import TrainingAdapter, arrays_of
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.training.trainer import Trainer
from tuneserve_engine.core.adapter import AdamwParams


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(ProgramRegistry(), model_of(), SHAPES)


def test_a_batch_adds_each_requests_gradient_to_its_adapter(
    trainer: Trainer,
    ran: Callable[[str], Ran],
    micro_batch_of: BatchOf,
    batch_of: Callable[..., Any],
    mixed: MicroBatch,
) -> None:
    a, b = adapter_of(4), adapter_of(5, unembed=False)
    result = trainer.run_batch(batch_of("aba", [mixed]), [a, b, a])
    assert result.finite == (True, True, True) and a.accumulated and b.accumulated
    for number, field in enumerate(("logprobs", "loss")):
        want = ran("dots").outs[0][number]
        for slot in ADAPTERS:
            places = tokens_of(mixed, slot)
            np.testing.assert_array_equal(getattr(result.outputs[0], field)[places], want[places])
    parts = [gradient(ran("dots").gradient_slots, slot, ADAPTERS[slot]) for slot in range(3)]
    for name, array in accumulated(a).items():
        np.testing.assert_array_equal(array, parts[0][name] + parts[2][name], err_msg=name)
    for name, array in accumulated(b).items():
        np.testing.assert_array_equal(array, parts[1][name], err_msg=name)


def test_a_request_over_two_micro_batches_adds_the_gradient_of_both(
    trainer: Trainer, micro_batch_of: BatchOf, datum: Datum, batch_of: Callable[..., Any]
) -> None:
    def gradients(*micro_batches: MicroBatch) -> dict[str, np.ndarray]:
        adapter = adapter_of(4)
        assert trainer.run_batch(batch_of("a", micro_batches), [adapter]).finite == (True,)
        return accumulated(adapter)

    first, second = (micro_batch_of((0, datum(seed, 21))) for seed in (1, 2))
    both, parts = gradients(first, second), [gradients(first), gradients(second)]
    for name, array in both.items():
        np.testing.assert_array_equal(array, parts[0][name] + parts[1][name], name)


def accumulated(adapter: TrainingAdapter) -> dict[str, np.ndarray]:
    rank = adapter.config.rank
    a, b = adapter.accumulator
    return {f"{name}.A": np.asarray(a[name])[..., :rank] for name in adapter.config.targets} | {
        f"{name}.B": np.asarray(b[name])[..., :rank, :] for name in adapter.config.targets
    }


def test_a_neighbour_of_nan_is_left_out_alone(
    trainer: Trainer, batch_of: Callable[..., Any], mixed: MicroBatch
) -> None:
    def gradients(second: TrainingAdapter) -> tuple[tuple[bool, ...], list[bytes]]:
        first, third = adapter_of(4), adapter_of(4)
        result = trainer.run_batch(batch_of("abc", [mixed]), [first, second, third])
        found = [accumulated(adapter) for adapter in (first, third)]
        return result.finite, [x.tobytes() for each in found for x in each.values()]

    healthy = gradients(adapter_of(5, unembed=False))
    sick = adapter_of(5, unembed=False, poison=np.nan)
    assert gradients(sick) == ((True, False, True), healthy[1])
    assert not sick.accumulated
    assert not any(x.any() for x in accumulated(sick).values())
    assert gradients(adapter_of(5, unembed=False)) == healthy


@pytest.mark.acceptance("W5")
def test_a_second_window_of_requests_equals_the_first_one(
    trainer: Trainer, micro_batch_of: BatchOf, datum: Datum, batch_of: Callable[..., Any]
) -> None:
    """The step in between is counted but changes no weight."""
    mine, other = adapter_of(4), adapter_of(5, unembed=False)

    def window() -> list[bytes]:
        for number in range(2):
            micro_batch = micro_batch_of((0, datum(20 + number, 19)), (1, datum(30 + number, 5)))
            trainer.run_batch(batch_of("ab", [micro_batch]), [mine, other])
        found = [x.tobytes() for each in (mine, other) for x in accumulated(each).values()]
        for each in (mine, other):
            trainer.start_step(each, AdamwParams(learning_rate=0.0)).block_until_ready()
        return found

    first = window()
    assert any(np.frombuffer(x).any() for x in first)
    assert window() == first
    assert (mine.step, other.step) == (2, 2)


@pytest.mark.acceptance("S7")
def test_a_step_leaves_the_bits_of_adapter_slots_gradient_slots_and_others(
    trainer: Trainer, batch_of: Callable[..., Any], mixed: MicroBatch
) -> None:
    adapters = [adapter_of(4), adapter_of(5, unembed=False), adapter_of(7)]
    trainer.run_batch(batch_of("abc", [mixed]), adapters)
    slots = trainer._slots[SHAPES.max_rank]

    def others() -> list[bytes]:
        rest = (
            slots.adapter_slots,
            slots.gradient_slots,
            arrays_of(adapters[0]),
            arrays_of(adapters[2]),
        )
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(rest)]

    before, mine = others(), [x.tobytes() for x in accumulated(adapters[1]).values()]
    trainer.start_step(adapters[1], AdamwParams(learning_rate=0.1, weight_decay=0.1))
    assert others() == before
    assert [x.tobytes() for x in accumulated(adapters[1]).values()] != mine


@pytest.mark.acceptance("S1", "S2")
def test_a_hundred_batches_and_ten_steps_allocate_nothing(
    trainer: Trainer, micro_batch_of: BatchOf, datum: Datum, batch_of: Callable[..., Any]
) -> None:
    adapters = [adapter_of(4), adapter_of(5, unembed=False)]

    def places() -> list[int]:
        slots = trainer._slots[SHAPES.max_rank]
        return pointers(trainer._space, slots.adapter_slots, slots.gradient_slots, *adapters)

    def batch(number: int) -> None:
        bins = [(i, datum(10 * number + i, 5 + 3 * (number % 19))) for i in range(2)]
        trainer.run_batch(batch_of("ab", [micro_batch_of(*bins)]), adapters)
        if number % 10 == 9:
            for adapter in adapters:
                trainer.start_step(adapter, AdamwParams()).block_until_ready()

    for number in range(10):
        batch(number)
    before, arrays = places(), settled()
    for number in range(10, 10 + 100):
        batch(number)
        assert places() == before
        assert live() == arrays
    assert [adapter.step for adapter in adapters] == [1 + 10, 1 + 10]
