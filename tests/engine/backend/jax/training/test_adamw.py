"""AdamW equals torch.optim.AdamW under hyper-parameters that change from step to step."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.support.adapters import bits, on_device, pointers, random_like, random_state
from tests.support.compiled import memory_of
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, arrays_of
from tuneserve_engine.backend.jax.training.adamw import (
    SteppedAdapter,
    adamw_step,
    global_norm,
    start_step,
    step_scalars,
)
from tuneserve_engine.core.adapter import AdamwParams
from tuneserve_engine.core.errors import UserError

SHAPES = {"a": {"q_proj": (2, 6, 3), "unembed": (6, 3)}, "b": {"q_proj": (2, 3, 5)}}


def tree(make) -> LoraWeights:
    """``make(shape)`` for every array of a small adapter."""
    arrays = {
        part: {name: jnp.array(make(shape), jnp.float32) for name, shape in shapes.items()}
        for part, shapes in SHAPES.items()
    }
    return LoraWeights(**arrays)


def zeros() -> LoraWeights:
    return tree(np.zeros)


def step(
    state: SteppedAdapter, gradient: LoraWeights, params: AdamwParams, number: int
) -> SteppedAdapter:
    """Take a step. It consumes the state and the gradient."""
    scalars = step_scalars(params, number)
    return adamw_step(state.weights, state.first_moment, state.second_moment, gradient, scalars)


def fresh(weights: LoraWeights) -> SteppedAdapter:
    return SteppedAdapter(weights, zeros(), zeros(), zeros(), jnp.float32(0))


def params_of_step(number: int) -> AdamwParams:
    """Different hyper-parameters at every step. Some clip, above and below the norm."""
    return AdamwParams(
        learning_rate=0.01 * (1 + number % 5),
        beta1=(0.9, 0.0, 0.45, 0.95)[number % 4],
        beta2=(0.95, 0.999, 0.5)[number % 3],
        eps=(1e-12, 1e-8, 1e-3)[number % 3],
        weight_decay=(0.0, 0.1, 1.0)[number % 3],
        grad_clip_norm=(0.0, 0.5, 1e6, -1.0)[number % 4],
    )


def torch_step(optimizer: torch.optim.AdamW, params: AdamwParams) -> float:
    group = optimizer.param_groups[0]
    group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
    group["eps"], group["weight_decay"] = params.eps, params.weight_decay
    limit = params.grad_clip_norm if params.grad_clip_norm > 0 else math.inf
    norm = torch.nn.utils.clip_grad_norm_(group["params"], limit)
    optimizer.step()
    return float(norm)


def test_twenty_steps_of_changing_hyperparameters_equal_torch():
    random = np.random.default_rng(0)
    weights = tree(random.standard_normal)
    reference = [torch.tensor(np.array(x), requires_grad=True) for x in jax.tree.leaves(weights)]
    optimizer = torch.optim.AdamW(reference)
    state = fresh(weights)
    for number in range(1, 21):
        scale = 10.0 ** random.integers(-4, 3)
        gradient = tree(lambda shape, scale=scale: random.standard_normal(shape) * scale)
        for parameter, g in zip(reference, jax.tree.leaves(gradient), strict=True):
            parameter.grad = torch.tensor(np.array(g))
        norm = torch_step(optimizer, params_of_step(number))
        state = step(state, gradient, params_of_step(number), number)
        np.testing.assert_allclose(state.grad_norm, norm, rtol=1e-6)
        for mine, theirs in zip(jax.tree.leaves(state.weights), reference, strict=True):
            expected = theirs.detach().numpy()
            np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-6 * abs(expected).max())
    for moments, key in ((state.first_moment, "exp_avg"), (state.second_moment, "exp_avg_sq")):
        for mine, parameter in zip(jax.tree.leaves(moments), reference, strict=True):
            expected = optimizer.state[parameter][key].numpy()
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6 * abs(expected).max())


def test_a_step_without_a_gradient_decays_like_a_zero_gradient_in_torch():
    weights = tree(np.ones)
    reference = [torch.tensor(np.array(x), requires_grad=True) for x in jax.tree.leaves(weights)]
    optimizer = torch.optim.AdamW(reference)
    params = AdamwParams(learning_rate=0.1, weight_decay=0.5)
    state = fresh(weights)
    for number, size in ((1, 2.0), (2, 0.0), (3, 0.0)):
        for parameter in reference:
            parameter.grad = torch.full_like(parameter, size)
        torch_step(optimizer, params)
        gradient = tree(lambda shape, size=size: np.full(shape, size))
        state = step(state, gradient, params, number)
    for mine, theirs in zip(jax.tree.leaves(state.weights), reference, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-6)


def test_a_step_leaves_zeros_in_the_accumulator_even_after_infinities():
    state = step(fresh(tree(np.ones)), tree(lambda s: np.full(s, np.inf)), AdamwParams(), 1)
    assert all((x == 0).all() for x in jax.tree.leaves(state.accumulator))


def test_an_array_without_gradients_stays_zero_under_any_decay_and_eps():
    state = fresh(zeros())
    params = AdamwParams(learning_rate=1.0, weight_decay=0.3, eps=0.0, grad_clip_norm=1.0)
    for number in range(1, 4):
        state = step(state, zeros(), params, number)
    assert all((x == 0).all() for x in jax.tree.leaves(state.weights))


def test_other_hyperparameters_compile_nothing():
    step(fresh(tree(np.ones)), tree(np.ones), params_of_step(1), 1)
    compiled = adamw_step._cache_size()
    step(fresh(tree(np.ones)), tree(np.ones), params_of_step(2), 7)
    assert adamw_step._cache_size() == compiled


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_norm_neither_overflows_nor_vanishes(size: float):
    leaves = jax.tree.leaves(tree(np.ones))
    entries = sum(x.size for x in leaves)
    norm = jax.jit(global_norm)(tree(lambda shape: np.full(shape, size)))
    np.testing.assert_allclose(norm, size * math.sqrt(entries), rtol=1e-6)


def one_entry(size: float) -> LoraWeights:
    gradient = zeros()
    gradient.a["q_proj"] = gradient.a["q_proj"].at[1, 2, 0].set(size)
    return gradient


@pytest.mark.parametrize("size", [2.0**125, 2.0**126, 2.0**127, 3e38])
def test_the_norm_of_one_huge_entry_is_that_entry(size: float):
    want = np.linalg.norm(np.array([size, 0, 0], np.float64))
    np.testing.assert_allclose(jax.jit(global_norm)(one_entry(size)), want, rtol=1e-6)


def test_a_huge_entry_is_clipped():
    params = AdamwParams(beta1=0.0, grad_clip_norm=1.0)
    state = step(fresh(zeros()), one_entry(3e38), params, 1)
    np.testing.assert_allclose(state.first_moment.a["q_proj"][1, 2, 0], 1.0, rtol=1e-6)


def test_the_norm_of_the_largest_entries_is_still_finite():
    assert np.isfinite(jax.jit(global_norm)(tree(lambda shape: np.full(shape, 3e38))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", math.nan),
        ("learning_rate", -1.0),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", math.inf),
        ("weight_decay", -1e-3),
        ("grad_clip_norm", math.nan),
        ("learning_rate", 1e39),
    ],
)
def test_hyperparameters_that_torch_refuses_are_refused_by_name_and_value(field, value):
    with pytest.raises(UserError, match=f"adam_params.{field} is {value}".replace("+", r"\+")):
        step_scalars(replace(AdamwParams(), **{field: value}), 1)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (AdamwParams(learning_rate=1e38), r"learning_rate is 1e\+38 with a beta1 of 0.9"),
        (
            AdamwParams(learning_rate=1e20, weight_decay=1e20),
            r"learning_rate is 1e\+20 and weight_",
        ),
    ],
)
def test_a_step_whose_own_scalars_overflow_is_refused(params, named):
    with pytest.raises(UserError, match=named):
        step_scalars(params, step=1)


def test_writing_in_place_changes_no_bit():
    elsewhere = jax.jit(adamw_step.__wrapped__)
    for number in range(1, 7):
        adapter = on_device(random_state(number, step=number))
        parts = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
        scalars = step_scalars(params_of_step(number), number)
        want = elsewhere(*parts, scalars)
        assert bits(adamw_step(*parts, scalars)) == bits(want)


@pytest.mark.acceptance("S4")
def test_a_step_needs_little_extra_memory():
    adapter = on_device(random_state(2))
    parts = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
    scalars = step_scalars(AdamwParams(), 1)
    needs = memory_of(adamw_step.lower(*parts, scalars))
    size = sum(array.nbytes for array in arrays_of(adapter))
    assert needs.alias_size_in_bytes == size
    assert needs.temp_size_in_bytes <= size  # four times the adapter's weights


@pytest.mark.acceptance("S7")
def test_a_tenants_step_leaves_the_bytes_of_all_others():
    adapters = [on_device(random_state(seed)) for seed in range(4)]
    before, places = [bits(x) for x in adapters], [pointers(x) for x in adapters]
    start_step(adapters[2], AdamwParams(learning_rate=0.1, weight_decay=0.1))
    assert [pointers(x) for x in adapters] == places
    same = [bits(x) == old for x, old in zip(adapters, before, strict=True)]
    assert same == [True, True, False, True]


def test_a_step_has_the_same_bits_among_many_adapters_as_alone():
    def stepped(others: int) -> list[bytes]:
        crowd = [on_device(random_state(seed)) for seed in range(others)]
        mine = on_device(random_state(7))
        for adapter in (*crowd, mine):
            start_step(adapter, AdamwParams())
        return bits(mine)

    assert stepped(0) == stepped(5)


def test_a_step_is_counted_and_empties_the_accumulator():
    adapter = on_device(random_state(2, step=4))
    norm = start_step(adapter, AdamwParams())
    assert (adapter.step, adapter.accumulated) == (5, False)
    assert not any(x.any() for x in jax.tree.leaves(adapter.accumulator))
    np.testing.assert_allclose(
        norm,
        math.sqrt(sum((x**2).sum() for x in random_state(2).accumulator.values())),
        rtol=1e-5,
    )


def test_a_step_runs_the_compiled_program_that_it_is_given():
    one, other = on_device(random_state(2)), on_device(random_state(2))
    ran = []

    def run(*args):
        ran.append(adamw_step(*args))
        return ran[-1]

    start_step(one, AdamwParams())
    norm = start_step(other, AdamwParams(), run)
    assert len(ran) == 1 and norm is ran[0].grad_norm
    assert bits(other) == bits(one)


def test_refused_hyperparameters_change_nothing():
    adapter = on_device(random_state(2, step=4))
    before = bits(adapter)
    with pytest.raises(UserError, match="beta1"):
        start_step(adapter, AdamwParams(beta1=1.0))
    assert (adapter.step, adapter.accumulated, bits(adapter)) == (4, True, before)


def test_a_step_consumes_the_adapters_old_arrays():
    adapter = on_device(random_state(2))
    adapter.accumulator = random_like(adapter.accumulator, seed=1)
    old = arrays_of(adapter)
    start_step(adapter, AdamwParams())
    assert all(array.is_deleted() for array in old)
