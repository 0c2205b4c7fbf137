"""The start of an adapter, as PEFT's, and the same everywhere."""

import math

import numpy as np
import peft
import pytest
import torch

from tuneserve_engine.adapters import UNEMBED, AdapterConfig
from tuneserve_engine.backend.jax.adapters import initial_weights

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
