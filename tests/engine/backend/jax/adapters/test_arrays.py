"""An adapter starts like PEFT's, equally everywhere, and moves to the device and back."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from tests.support.adapters import (
    SMALL,
    bits,
    counted_compilations,
    on_device,
    pointers,
    random_state,
    shapes_of,
)
from tuneserve_engine.backend.jax.adapters.arrays import (
    adapter_bytes,
    arrays_of,
    host_zeros,
    initial_weights,
    new_adapter,
    restored_adapter,
    saved_state,
)
from tuneserve_engine.backend.jax.training.adamw import start_step
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams, AdapterConfig
from tuneserve_engine.core.errors import UserError

SHAPES = {"q_proj": (3, 50, 20), "down_proj": (3, 80, 50), UNEMBED: (50, 90)}


def initial(**options):
    return initial_weights(AdapterConfig(**{"rank": 4, "alpha": 32, "seed": 1} | options), SHAPES)


def test_the_seed_decides_the_weights_and_each_target_draws_its_own():
    first, again, other = initial(), initial(), initial(seed=2)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["q_proj.A"], other["q_proj.A"])
    assert not np.array_equal(first["q_proj.A"].flat[:90], first["unembed.A"].flat[:90])


def test_training_fewer_targets_changes_no_number_of_the_others():
    all_of_them, attention = initial(), initial(train_mlp=False, train_unembed=False)
    assert sorted(attention) == ["q_proj.A", "q_proj.B"]
    np.testing.assert_array_equal(attention["q_proj.A"], all_of_them["q_proj.A"])


def test_a_is_uniform_within_pefts_bounds_and_b_is_zero():
    layer = torch.nn.Sequential(torch.nn.Linear(50, 20))
    model = peft.get_peft_model(layer, peft.LoraConfig(r=400, target_modules=["0"]))
    theirs = model.base_model.model[0].lora_A["default"].weight.detach().numpy()
    weights = initial(rank=400)
    ours = weights["q_proj.A"]
    bound = 1 / math.sqrt(50)
    for array in (ours, theirs):
        assert bound * 0.99 < np.abs(array).max() <= bound
        np.testing.assert_allclose(array.std(), bound / math.sqrt(3), rtol=0.02)
        np.testing.assert_allclose(array.mean(), 0, atol=bound * 0.02)
    assert not weights["q_proj.B"].any() and weights["q_proj.B"].shape == (3, 400, 20)


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**63, 2**70])
def test_any_integer_is_a_seed(seed: int):
    assert initial(seed=seed)["q_proj.A"].dtype == np.float32


def test_adapters_of_any_rank_load_without_a_compilation():
    shapes = shapes_of(2, 13, 17, 19)  # sizes that no other test uses
    with counted_compilations() as compiled:
        for rank in range(1, 33):
            adapter = new_adapter(AdapterConfig(rank, 32, 1), shapes, 32)
            state = saved_state(adapter, optimizer=True, accumulator=True)
            restored_adapter(replace(state, step=3), shapes, 32)
        assert compiled == []
        jnp.zeros((2, 13, 23))
        assert compiled, "compilations are not counted"


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_saved_state_is_restored_with_the_same_bits(rank: int, step: int, accumulated: bool):
    before = random_state(4, rank, step=step, accumulated=accumulated)
    adapter = on_device(before)
    assert (adapter.step, adapter.accumulated) == (step, accumulated)
    after = saved_state(adapter, optimizer=step > 0, accumulator=True)
    assert (after.config, after.step) == (before.config, before.step)
    assert after.to_tensors().keys() == before.to_tensors().keys()
    for name, tensor in before.to_tensors().items():
        np.testing.assert_array_equal(after.to_tensors()[name], tensor, err_msg=name)


def test_the_padding_of_an_adapter_to_its_rank_bucket_is_zero():
    adapter = on_device(random_state(3, rank=5))  # this adapter does not train the unembedding
    assert adapter.weights.a["q_proj"].shape == (3, 7, 8)
    assert adapter.weights.b["o_proj"].shape == (3, 8, 7)
    for part in (adapter.weights, adapter.first_moment, adapter.accumulator):
        assert not part.a["q_proj"][..., 5:].any() and part.a["q_proj"][..., :5].all()
        assert not part.b["q_proj"][:, 5:].any() and part.b["q_proj"][:, :5].all()
        assert not part.a[UNEMBED].any() and not part.b[UNEMBED].any()


def test_before_the_first_step_there_are_no_moments():
    state = replace(random_state(2), step=0)
    adapter = on_device(state)
    assert not any(x.any() for x in jax.tree.leaves((adapter.first_moment, adapter.second_moment)))


def test_the_bytes_of_an_adapter_are_counted_before_it_is_made():
    adapter = on_device(random_state(2), rank_bucket=8)
    assert adapter_bytes(SMALL, 8) == sum(array.nbytes for array in arrays_of(adapter))


@pytest.mark.parametrize("part", ["weights", "second_moment", "accumulator"])
def test_a_state_of_another_base_model_is_refused_by_the_name_of_its_tensor(part: str):
    state = random_state(2)
    tensors = getattr(state, part) | {"q_proj.A": np.zeros((3, 6, 3), np.float32)}
    with pytest.raises(UserError, match=rf"{part}\[q_proj.A\].*\[3, 6, 3\].*\[3, 7, 3\]"):
        on_device(replace(state, **{part: tensors}))


def test_the_device_owns_its_arrays_of_any_size():
    for size in range(1, 300):
        host = host_zeros((size,))
        assert host.shape == (size,) and not host.any()
        array = jax.device_put(host)
        lent = range(host.ctypes.data, host.ctypes.data + host.nbytes)
        assert array.unsafe_buffer_pointer() not in lent


def test_a_step_writes_in_place_and_not_into_arrays_of_the_host():
    given = random_state(2)
    adapter = on_device(given)
    taken = saved_state(adapter, optimizer=True, accumulator=True)
    before, places = bits([given.to_tensors(), taken.to_tensors()]), pointers(adapter)
    old = bits(adapter)
    for _ in range(3):
        start_step(adapter, AdamwParams(learning_rate=0.1))
    assert pointers(adapter) == places and bits(adapter) != old
    assert bits([given.to_tensors(), taken.to_tensors()]) == before


def test_a_step_does_not_change_an_array_that_is_still_read():
    adapter = on_device(random_state(2))
    view = np.asarray(adapter.weights.a["q_proj"])
    before = view.tobytes()
    start_step(adapter, AdamwParams(learning_rate=0.1))
    assert view.tobytes() == before != bits(adapter.weights.a["q_proj"])[0]
