"""Every loss and its gradient equal a float64 oracle that loops over tokens."""

import math
from typing import Any

import hypothesis.extra.numpy as arrays
import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tuneserve_engine.backend.base import LOSS_NAMES
from tuneserve_engine.backend.jax.losses import LOSSES, LossInputs, loss_and_gradient

B, T, K = 3, 5, 2
STEP = 1e-30  # of the complex step: f(x + ih) / h has no rounding to speak of

run = jax.jit(loss_and_gradient)


def smaller(a: complex, b: complex) -> complex:
    return a if a.real <= b.real else b


def clip(x: complex, low: float, high: float) -> complex:
    return complex(high) if x.real > high else complex(low) if x.real < low else x


def constant(x: complex) -> complex:
    return complex(x.real)


def exp(x: complex) -> complex:
    return math.exp(x.real) * complex(math.cos(x.imag), math.sin(x.imag))


def oracle(row: dict[str, Any], lp: list[list[complex]]) -> complex:
    """One row's loss, from the formulas of the wire's documentation."""
    length = int(row["valid"].sum())
    total = 0j
    masked = [t for t in range(length) if row["sequence_mask"][t] != 0]
    mean = sum(constant(lp[t][0]) - row["old_logprobs"][t] for t in masked) / max(len(masked), 1)
    for t in range(length):
        first, q, a = lp[t][0], float(row["old_logprobs"][t]), float(row["advantages"][t])
        low, high = float(row["clip_low"][t]), float(row["clip_high"][t])
        ratio = exp(first - q)
        match LOSS_NAMES[row["loss_id"]]:
            case "cross_entropy":
                total -= sum(float(row["weights"][t][k]) * lp[t][k] for k in range(K))
            case "importance_sampling":
                total -= ratio * a
            case "ppo":
                total -= smaller(ratio * a, clip(ratio, low, high) * a)
            case "cispo":
                total -= constant(clip(ratio, low, high)) * first * a
            case "dro":
                total -= first * a - 0.5 * float(row["beta"]) * (first - q) ** 2
            case "gspo":
                ratio = exp(mean) * exp(first - constant(first))
                total -= smaller(ratio * a, clip(ratio, low, high) * a)
    return total


def oracle_gradient(row: dict[str, Any], lp: np.ndarray) -> np.ndarray:
    """By complex steps: stop-gradient keeps the real part, comparisons look at it alone."""
    gradient = np.zeros((T, K))
    for t in range(T):
        for k in range(K):
            shifted = [[complex(x) for x in position] for position in lp.tolist()]
            shifted[t][k] += STEP * 1j
            gradient[t, k] = oracle(row, shifted).imag / STEP
    return gradient


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


def array(shape: tuple[int, ...], elements: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.float32, shape, elements=elements)


signed = floats(-4, 4) | st.sampled_from([0.0, 1.0, -1.0, 0.5])
batches = st.fixed_dictionaries({
    "lp": array((B, T, K), floats(-6, 0)),
    "lengths": st.lists(st.integers(0, T), min_size=B, max_size=B),
    "weights": array((B, T, K), signed),
    "old_logprobs": array((B, T), floats(-6, 0)),
    "advantages": array((B, T), signed),
    "clip_low": array((B, T), floats(0, 1)),
    "clip_high": array((B, T), floats(1, 4)),
    "sequence_mask": array((B, T), st.sampled_from([0.0, 1.0, -2.5])),
    "beta": array((B,), floats(0, 1)),
    "loss_id": st.lists(st.integers(0, len(LOSS_NAMES) - 1), min_size=B, max_size=B),
})  # fmt: skip


def rows_of(drawn: dict[str, Any]) -> dict[str, np.ndarray]:
    valid = np.arange(T)[None, :] < np.array(drawn["lengths"])[:, None]
    return drawn | {
        "valid": valid.astype(np.float32),
        "loss_id": np.array(drawn["loss_id"], np.int32),
    }


def row_of(data: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: data[name][row] for name in LossInputs._fields}


def near_a_bound(row: dict[str, Any], lp: np.ndarray) -> bool:
    """Whether rounding alone may decide between a ratio and its bound."""
    differences = (lp[:, 0] - row["old_logprobs"]).astype(np.float64)
    masked = (row["sequence_mask"] != 0) & (row["valid"] != 0)
    mean = differences[masked].mean() if masked.any() else 0.0
    ratios = np.exp(np.append(differences, mean))
    bounds = np.concatenate([row["clip_low"], row["clip_high"]])
    distance = np.abs(ratios[:, None] - bounds[None, :].astype(np.float64))
    return bool(((distance < 1e-4) & (distance > 0)).any())


def test_the_registry_names_the_losses_in_the_order_of_their_ids():
    assert tuple(LOSSES) == LOSS_NAMES


@settings(max_examples=150, deadline=None)
@given(batches)
def test_losses_and_gradients_equal_the_oracle_in_mixed_batches(drawn: dict[str, Any]):
    data = rows_of(drawn)
    lp = data["lp"]
    assume(not any(near_a_bound(row_of(data, b), lp[b]) for b in range(B)))
    padding = data["valid"] == 0
    unread = np.where(padding[:, :, None], np.nan, lp).astype(np.float32)
    inputs = LossInputs(**{name: data[name] for name in LossInputs._fields})

    loss, gradient = run(unread, inputs)

    for b in range(B):
        row = row_of(data, b)
        terms = [[complex(x) for x in position] for position in lp[b].tolist()]
        expected = oracle_gradient(row, lp[b])
        scale = max(1.0, float(np.abs(expected).max()) * 6 * T)
        np.testing.assert_allclose(loss[b], oracle(row, terms).real, rtol=1e-5, atol=1e-6 * scale)
        np.testing.assert_allclose(gradient[b], expected, rtol=1e-5, atol=1e-5)


def inputs_of(loss: str, **given: Any) -> LossInputs:
    """One row of one position, benign but for what is given."""
    values = dict(
        valid=1.0, old_logprobs=0.0, advantages=1.0, clip_low=0.8, clip_high=1.2, sequence_mask=1.0
    )
    values |= {name: x for name, x in given.items() if name in values}
    per_token = {name: np.full((1, 1), value, np.float32) for name, value in values.items()}
    return LossInputs(
        weights=np.full((1, 1, 1), given.get("weights", 0.0), np.float32),
        beta=np.full(1, given.get("beta", 0.0), np.float32),
        loss_id=np.array([LOSS_NAMES.index(loss)], np.int32),
        **per_token,
    )


@pytest.mark.parametrize("loss", LOSS_NAMES[1:])
def test_a_token_without_advantage_costs_nothing_even_if_its_ratio_overflows(loss: str):
    value, gradient = run(
        np.full((1, 1, 1), -1, np.float32),
        inputs_of(loss, advantages=0.0, old_logprobs=-1e4),
    )
    assert value[0] == 0 and gradient[0, 0, 0] == 0


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_losses_that_were_not_chosen_leave_no_nan_behind(loss: str):
    """An old logprob and advantage that overflow every policy loss do not reach cross_entropy, and
    NaN weights reach nothing else."""
    poison = (
        {"old_logprobs": -1e4, "advantages": math.nan, "beta": math.nan, "weights": 2.0}
        if loss == "cross_entropy"
        else {"weights": math.nan}
    )
    value, gradient = run(np.full((1, 1, 1), -1, np.float32), inputs_of(loss, **poison))
    assert np.isfinite(value[0]) and np.isfinite(gradient[0, 0, 0])


@pytest.mark.parametrize("loss", LOSS_NAMES[1:])
def test_a_nan_input_makes_the_loss_nan(loss: str):
    value, _ = run(np.full((1, 1, 1), -1, np.float32), inputs_of(loss, advantages=math.nan))
    assert np.isnan(value[0])
