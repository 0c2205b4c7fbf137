"""Adapter slots and gradient slots: one is written at a time, in place, and no other changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.adapters import (
    SMALL,
    bits,
    commit,
    counted_compilations,
    live,
    nbytes,
    on_device,
    pointers,
    random_like,
    random_state,
    settled,
    shapes_of,
)
from tests.support.compiled import memory_of
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, TrainingAdapter, new_adapter
from tuneserve_engine.backend.jax.training.adamw import start_step
from tuneserve_engine.backend.jax.training.adapter_slots import (
    accumulate_slot,
    add_earlier_gradient,
    copy_gradient,
    is_sum_finite,
    new_adapter_slots,
    new_gradient_slots,
    write_slot,
)
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams, AdapterConfig

SLOTS, RANK = 4, 8
YES, NO = np.bool_(True), np.bool_(False)
LARGEST = np.finfo(np.float32).max


def gradient_slots_of(seed: int) -> LoraWeights:
    """Random numbers in every slot."""
    return random_like(new_gradient_slots(SMALL, RANK, SLOTS), seed)


def with_entry(gradient_slots: LoraWeights, slot: int, target: str, value: float) -> LoraWeights:
    """A copy with one number of the slot changed."""
    array = np.array(gradient_slots.a[target])
    array[-1, slot, 2, 1] = value
    return LoraWeights(gradient_slots.a | {target: jax.device_put(array)}, gradient_slots.b)


def slot_of(buffers: LoraWeights, slot: int) -> list[np.ndarray]:
    return [np.asarray(leaf)[:, slot] for leaf in jax.tree.leaves(buffers)]


def test_empty_slots_are_zeros_with_a_leading_axis_for_the_unembedding():
    adapter_slots, gradient_slots = (
        new_adapter_slots(SMALL, RANK, SLOTS),
        new_gradient_slots(SMALL, RANK, SLOTS),
    )
    assert (
        adapter_slots.a["o_proj"].shape == gradient_slots.a["o_proj"].shape == (3, SLOTS, 5, RANK)
    )
    assert (
        adapter_slots.b["o_proj"].shape == gradient_slots.b["o_proj"].shape == (3, SLOTS, RANK, 7)
    )
    assert adapter_slots.a[UNEMBED].shape == (1, SLOTS, 7, RANK)
    assert adapter_slots.b[UNEMBED].shape == (1, SLOTS, RANK, 11)
    assert adapter_slots.scale.shape == adapter_slots.trained.shape == (SLOTS,)
    assert not any(leaf.any() for leaf in jax.tree.leaves((adapter_slots, gradient_slots)))


@pytest.mark.acceptance("S7")
def test_writing_an_adapter_fills_its_slot_in_place_and_changes_no_other():
    adapter_slots = new_adapter_slots(SMALL, RANK, SLOTS)
    places = pointers(adapter_slots.a, adapter_slots.b)
    one, two = on_device(random_state(2)), on_device(random_state(3, rank=7))
    for slot, adapter, scale in ((2, one, 5.0), (0, two, 0.5), (2, two, 0.25), (0, one, 2.0)):
        trained = np.bool_(UNEMBED in adapter.config.targets)
        adapter_slots = write_slot(
            adapter_slots, np.int32(slot), adapter.weights, np.float32(scale), trained
        )
    np.testing.assert_array_equal(adapter_slots.scale, np.array([2, 0, 0.25, 0], np.float32))
    np.testing.assert_array_equal(adapter_slots.trained, [True, False, False, False])
    for parts, slot, adapter in ((adapter_slots, 0, one), (adapter_slots, 2, two)):
        for name in SMALL:
            for buffer, array in (
                (parts.a[name], adapter.weights.a[name]),
                (parts.b[name], adapter.weights.b[name]),
            ):
                rows = np.asarray(array)[None] if name == UNEMBED else array
                np.testing.assert_array_equal(buffer[:, slot], rows)
    for slot in (1, 3):
        assert not any(
            leaf.any() for leaf in slot_of(LoraWeights(adapter_slots.a, adapter_slots.b), slot)
        )
    assert pointers(adapter_slots.a, adapter_slots.b) == places


def test_a_commit_adds_the_slots_gradient_and_nothing_of_its_neighbours():
    adapter, gradient_slots = on_device(random_state(2)), gradient_slots_of(1)
    for slot in (0, 1, 3):
        gradient_slots = with_entry(gradient_slots, slot, "q_proj", np.nan)
    want = [
        np.asarray(old) + (new if new.ndim == old.ndim else new[0])
        for old, new in zip(
            jax.tree.leaves(adapter.accumulator),
            (x[0] if len(x) == 1 else x for x in slot_of(gradient_slots, 2)),
            strict=True,
        )
    ]
    before = bits(gradient_slots)
    accumulator, finite = commit(adapter.accumulator, gradient_slots, 2)
    assert finite
    assert bits(accumulator) == [x.tobytes() for x in want]
    assert bits(gradient_slots) == before


@pytest.mark.acceptance("S6")
@pytest.mark.parametrize("target", ["q_proj", "o_proj", UNEMBED])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, LARGEST])
def test_a_sum_that_is_not_finite_leaves_the_accumulators_bits(target: str, value: float):
    adapter = on_device(random_state(2))
    accumulator = jax.tree.map(lambda x: x.at[..., 0, 0].set(-0.0), adapter.accumulator)
    if value == LARGEST:  # finite, but not when doubled
        accumulator.a[target] = accumulator.a[target].at[..., 2, 1].set(LARGEST)
    before, places = bits(accumulator), pointers(accumulator)
    gradient_slots = with_entry(gradient_slots_of(1), 1, target, value)
    accumulator, finite = commit(accumulator, gradient_slots, 1)
    assert not finite
    assert bits(accumulator) == before and pointers(accumulator) == places
    accumulator, finite = commit(accumulator, gradient_slots, 0)
    assert finite and bits(accumulator) != before


def test_an_adapter_without_unembedding_ignores_that_part_of_the_slot():
    adapter = on_device(random_state(3))
    gradient_slots = with_entry(gradient_slots_of(1), 1, UNEMBED, np.nan)
    accumulator, finite = commit(adapter.accumulator, gradient_slots, 1, trained=False)
    assert finite
    assert not accumulator.a[UNEMBED].any() and not accumulator.b[UNEMBED].any()
    np.testing.assert_array_equal(
        accumulator.a["q_proj"],
        np.asarray(on_device(random_state(3)).accumulator.a["q_proj"])
        + np.asarray(gradient_slots.a["q_proj"])[:, 1],
    )


def test_another_slot_scale_or_flag_compiles_nothing():
    def once(slot: int, scale: float, flag: np.bool_, seed: int) -> None:
        adapter = on_device(random_state(seed))
        write_slot(
            new_adapter_slots(SMALL, RANK, SLOTS),
            np.int32(slot),
            adapter.weights,
            np.float32(scale),
            flag,
        )
        commit(adapter.accumulator, gradient_slots_of(seed), slot, trained=bool(flag))

    once(0, 1.0, YES, 2)
    with counted_compilations() as compiled:
        for slot in range(SLOTS):
            once(slot, 1.5 * slot, NO if slot % 2 else YES, slot)
    assert compiled == []


def test_a_hundred_commits_and_ten_steps_allocate_nothing():
    adapters = [on_device(random_state(seed)) for seed in (2, 4)]
    adapter_slots, gradient_slots = new_adapter_slots(SMALL, RANK, SLOTS), gradient_slots_of(1)

    def run_batch(adapter_slots, number: int):
        for slot, adapter in enumerate(adapters):
            adapter_slots = write_slot(
                adapter_slots, np.int32(slot), adapter.weights, np.float32(number), YES
            )
            adapter.accumulator, _ = commit(adapter.accumulator, gradient_slots, slot)
        if number % 5 == 4:
            for adapter in adapters:
                start_step(adapter, AdamwParams())
        return adapter_slots

    for number in range(5):
        adapter_slots = run_batch(adapter_slots, number)
    everything = [*adapters, adapter_slots.a, adapter_slots.b, gradient_slots]
    places, arrays = pointers(*everything), settled()
    for number in range(50):
        adapter_slots = run_batch(adapter_slots, number)
        assert pointers(*adapters, adapter_slots.a, adapter_slots.b, gradient_slots) == places
        assert live() == arrays
    assert [adapter.step for adapter in adapters] == [5 + 11, 5 + 11]


def test_an_earlier_gradient_is_added_to_its_slot_alone():
    gradient_slots = jax.tree.map(np.asarray, gradient_slots_of(1))
    earlier = jax.tree.map(lambda x: x[:, 2], gradient_slots)
    copied = copy_gradient(gradient_slots, np.int32(2))
    added = add_earlier_gradient(jax.tree.map(jnp.asarray, gradient_slots), np.int32(0), copied)
    for old, one, copy, new in zip(
        *map(jax.tree.leaves, (gradient_slots, earlier, copied, added)), strict=True
    ):
        np.testing.assert_array_equal(copy, one)
        np.testing.assert_array_equal(new[:, 0], one + old[:, 0])
        np.testing.assert_array_equal(new[:, 1:], old[:, 1:])


def memory(program, *args: object):
    return memory_of(program.lower(*args))


def bench_adapter() -> tuple[TrainingAdapter, LoraWeights]:
    shapes = shapes_of(4, 64, 96, 256)
    adapter = new_adapter(AdapterConfig(RANK, 16.0, 1), shapes, RANK)
    return adapter, new_gradient_slots(shapes, RANK, SLOTS)


@pytest.mark.acceptance("S3")
def test_writing_and_adding_work_in_place_without_temporaries():
    adapter, gradient_slots = bench_adapter()
    adapter_slots = new_adapter_slots(shapes_of(4, 64, 96, 256), RANK, SLOTS)
    slot = np.int32(1)
    placing = memory(write_slot, adapter_slots, slot, adapter.weights, np.float32(1), YES)
    assert placing.alias_size_in_bytes == nbytes(adapter_slots)
    assert placing.temp_size_in_bytes <= 1024
    adding = memory(accumulate_slot, adapter.accumulator, gradient_slots, slot, YES, YES)
    assert adding.alias_size_in_bytes == nbytes(adapter.accumulator)
    assert adding.temp_size_in_bytes <= 1024
    copying = memory(copy_gradient, gradient_slots, slot)
    assert copying.temp_size_in_bytes <= 1024
    earlier = copy_gradient(gradient_slots, slot)
    adding = memory(add_earlier_gradient, gradient_slots, slot, earlier)
    assert adding.alias_size_in_bytes == nbytes(gradient_slots)
    assert adding.temp_size_in_bytes <= 1024
    checking = memory(is_sum_finite, adapter.accumulator, gradient_slots, slot, YES)
    assert checking.temp_size_in_bytes <= 0.3 * nbytes(adapter.accumulator)


def test_a_single_program_for_adding_and_checking_would_need_room_for_the_sum():
    @partial(jax.jit, donate_argnums=0)
    def both(accumulator: LoraWeights, gradient_slots: LoraWeights, slot):
        finite = is_sum_finite(accumulator, gradient_slots, slot, YES)
        return accumulate_slot(accumulator, gradient_slots, slot, YES, finite), finite

    adapter, gradient_slots = bench_adapter()
    needs = memory(both, adapter.accumulator, gradient_slots, jnp.int32(1))
    assert needs.temp_size_in_bytes >= nbytes(adapter.accumulator)
