"""Every loss and its gradient equal a float64 oracle that loops over tokens."""

import math
from typing import Any

import hypothesis.extra.numpy as arrays
import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import Array

from tests.engine.backend.jax.training import loss_oracle
from tuneserve_engine.backend.base import LOSS_NAMES
from tuneserve_engine.backend.jax.training.losses import (
    LOSSES,
    LossInputs,
    loss_and_gradient,
    sequence_log_ratios,
)

B, T, K = 3, 5, 2  # datums, their maximum length, targets
BLOCKS, S = 4, 4  # blocks of the micro-batch in which they follow one another


@jax.jit
def run(lp: Array, inputs: LossInputs) -> tuple[Array, Array]:
    return loss_and_gradient(lp, sequence_log_ratios(lp[..., 0], inputs), inputs)


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


def datum_of(drawn: dict[str, Any], number: int) -> dict[str, Any]:
    length = drawn["lengths"][number]
    scalars = {name: drawn[name][number] for name in ("beta", "loss_id")}
    return scalars | {
        name: drawn[name][number][:length] for name in drawn if name not in ("lengths", *scalars)
    }


def laid_out(drawn: dict[str, Any]) -> dict[str, np.ndarray]:
    """The fields as [BLOCKS, S, ...]. Padding holds NaN wherever it can."""
    lengths = drawn["lengths"]
    datum = np.full(BLOCKS * S, -1, np.int32)
    datum[: sum(lengths)] = np.repeat(np.arange(B), lengths)
    shape = (BLOCKS, S)
    fields: dict[str, np.ndarray] = {
        "segment_ids": datum.reshape(shape),
        "valid": datum.reshape(shape) >= 0,
    }
    for name in (*LossInputs._fields[1:-1], "lp"):
        values = [np.asarray(datum_of(drawn, number)[name]) for number in range(B)]
        per_token = [
            np.broadcast_to(x, (n, *x.shape[1:])) for x, n in zip(values, lengths, strict=True)
        ]
        whole = np.concatenate(per_token)
        padding = np.full((BLOCKS * S - len(whole), *whole.shape[1:]), np.nan)
        if name == "loss_id":
            stream = np.concatenate([whole, np.zeros(len(padding))]).astype(np.int32)
        else:
            stream = np.concatenate([whole, padding]).astype(np.float32)
        fields[name] = stream.reshape(*shape, *whole.shape[1:])
    return fields


def near_a_bound(row: dict[str, Any]) -> bool:
    """Whether rounding alone may decide between a ratio and its bound."""
    differences = (row["lp"][:, 0] - row["old_logprobs"]).astype(np.float64)
    masked = row["sequence_mask"] != 0
    mean = differences[masked].mean() if masked.any() else 0.0
    ratios = np.exp(np.append(differences, mean))
    bounds = np.concatenate([row["clip_low"], row["clip_high"]])
    distance = np.abs(ratios[:, None] - bounds[None, :].astype(np.float64))
    return bool(((distance < 1e-4) & (distance > 0)).any())


def test_the_registry_names_the_losses_in_the_order_of_their_ids():
    assert tuple(LOSSES) == LOSS_NAMES


@settings(max_examples=150, deadline=None)
@given(batches)
def test_losses_and_gradients_equal_the_oracle_in_mixed_micro_batches(drawn: dict[str, Any]):
    datums = [datum_of(drawn, number) for number in range(B)]
    assume(not any(near_a_bound(datum) for datum in datums))
    fields = laid_out(drawn)

    loss, gradient = run(fields.pop("lp"), LossInputs(**fields))

    end = 0
    for datum, length in zip(datums, drawn["lengths"], strict=True):
        value, expected = loss_oracle.value_and_gradient(datum, datum["lp"])
        tokens = slice(end, end + length)
        end += length
        scale = max(1.0, float(np.abs(expected).max(initial=0)) * 6 * T)
        total = loss.reshape(-1)[tokens].sum()
        np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-6 * scale)
        mine = gradient.reshape(-1, K)[tokens]
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
    assert not np.any(loss.reshape(-1)[end:]) and not np.any(gradient.reshape(-1, K)[end:])


def inputs_of(loss: str, blocks: int = 1, size: int = 1, **given: Any) -> LossInputs:
    """One datum with harmless values, except for the given ones."""
    values = dict(
        old_logprobs=0.0, advantages=1.0, clip_low=0.8, clip_high=1.2, sequence_mask=1.0, beta=0.0
    )
    values |= {name: x for name, x in given.items() if name in values}
    shape = (blocks, size)
    return LossInputs(
        valid=np.ones(shape, bool),
        weights=np.full((*shape, 1), given.get("weights", 0.0), np.float32),
        loss_id=np.full(shape, LOSS_NAMES.index(loss), np.int32),
        segment_ids=np.zeros(shape, np.int32),
        **{name: np.full(shape, value, np.float32) for name, value in values.items()},
    )


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_without_advantage_costs_nothing_even_if_its_ratio_overflows(loss: str):
    value, gradient = run(
        np.full((1, 1, 1), -1, np.float32),
        inputs_of(loss, advantages=0.0, old_logprobs=-1e4),
    )
    assert value[0, 0] == 0 and gradient[0, 0, 0] == 0


def test_without_an_advantage_dro_still_pulls_towards_the_old_logprob():
    """½·beta·(lp - q)² and its derivative, by hand. dro has no ratio that could overflow."""
    value, gradient = run(
        np.full((1, 1, 1), -1, np.float32),
        inputs_of("dro", advantages=0.0, old_logprobs=-5.0, beta=0.25),
    )
    assert (value[0, 0], gradient[0, 0, 0]) == (2.0, 1.0)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_other_losses_leave_no_nan_in_the_chosen_one(loss: str):
    """An old logprob and advantage that overflow every policy loss do not reach cross_entropy, and
    NaN weights reach no other loss.
    """
    poison = (
        {"old_logprobs": -1e4, "advantages": math.nan, "beta": math.nan, "weights": 2.0}
        if loss == "cross_entropy"
        else {"weights": math.nan}
    )
    value, gradient = run(np.full((1, 1, 1), -1, np.float32), inputs_of(loss, **poison))
    assert np.isfinite(value[0, 0]) and np.isfinite(gradient[0, 0, 0])


@pytest.mark.parametrize("loss", LOSS_NAMES[1:])
def test_a_nan_input_makes_the_loss_nan(loss: str):
    value, _ = run(np.full((1, 1, 1), -1, np.float32), inputs_of(loss, advantages=math.nan))
    assert np.isnan(value[0, 0])


ratios = jax.jit(sequence_log_ratios)


def test_a_sequence_over_many_blocks_has_one_ratio_at_all_its_tokens():
    random = np.random.default_rng(1)
    lp, old = random.normal(-3, 1, (2, 7, 64)).astype(np.float32)
    mask = random.integers(0, 2, (7, 64)).astype(np.float32)
    inputs = inputs_of("gspo", 7, 64)._replace(old_logprobs=old, sequence_mask=mask)
    datum = np.zeros(7 * 64, np.int32)
    datum[70:400], datum[400:] = (
        1,
        2,
    )  # from the middle of one block to that of another, and to the end
    inputs = inputs._replace(segment_ids=datum.reshape(7, 64))

    found = np.asarray(ratios(lp, inputs)).reshape(-1)

    for tokens in (slice(0, 70), slice(70, 400), slice(400, None)):
        counted = mask.reshape(-1)[tokens] != 0
        difference = (lp.astype(np.float64) - old).reshape(-1)[tokens]
        np.testing.assert_allclose(found[tokens], difference[counted].mean(), rtol=1e-5)


def test_a_sequences_ratio_has_the_same_bits_elsewhere_and_beside_nan():
    random = np.random.default_rng(2)
    lp, old = random.normal(-3, 1, (2, 3, 64)).astype(np.float32)
    alone = inputs_of("gspo", 3, 64)._replace(old_logprobs=old)
    beside = inputs_of("gspo", 8, 64, old_logprobs=math.nan)._replace(
        segment_ids=np.repeat(np.int32([4, 5, 6, 6, 6, 7, 7, 8]), 64).reshape(8, 64)
    )
    beside.old_logprobs[2:5] = old
    values = np.pad(lp, [(2, 3), (0, 0)], constant_values=np.nan)

    np.testing.assert_array_equal(ratios(values, beside)[2:5], ratios(lp, alone))
