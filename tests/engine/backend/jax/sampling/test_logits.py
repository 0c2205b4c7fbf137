"""Drawing tokens without a model: exact truncation, exact distributions, seeds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from tuneserve_engine.backend.jax.sampling.logits import (
    RowParams,
    at_temperature,
    draw,
    draw_alternatives,
    drawn_logprobs,
    nucleus,
    seed_halves,
    token_logprobs,
    top_logprobs,
)

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
VOCAB = 300  # two blocks of the inverse CDF, the last one short
LOGITS = np.random.default_rng(0).normal(scale=2.0, size=VOCAB).astype(np.float32)
DRAWS = 4096


def rows(
    count: int = 1,
    *,
    seed: int = 1,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
) -> RowParams:
    """Parameters of the samples 0, 1, ... of one request."""
    return RowParams(
        seed=np.tile(seed_halves(seed), (count, 1)),
        sample=np.arange(count, dtype=np.int32),
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
    )


@partial(jax.jit, static_argnames="count")
def _draw_many(logits: Any, step: Any, params: RowParams, *, count: int) -> Any:
    return _drawn(jnp.tile(logits[None], (count, 1)), jnp.full(count, step, jnp.int32), params)


def _drawn(logits: Any, step: Any, params: RowParams) -> Any:
    tokens = draw(logits, step, params)
    return tokens, drawn_logprobs(logits, jnp.asarray(params.temperature), tokens)


def draw_many(params: RowParams, *, logits: Any = LOGITS, step: int = 0) -> tuple[Any, Any]:
    tokens, logprobs = _draw_many(logits, step, params, count=len(params.sample))
    return np.asarray(tokens), np.asarray(logprobs)


def softmax(logits: Any, temperature: float = 1.0) -> Any:
    """Softmax in float64."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    return np.exp(scaled) / np.exp(scaled).sum()


def kept(logits: Any, top_k: int, top_p: float) -> Any:
    """The truncated set by sorting: top-k, then top-p of the rest. Ties go to the lowest id."""
    order = np.argsort(-logits, kind="stable")[: top_k if top_k > 0 else None]
    weights = softmax(logits)[order]
    reached = np.cumsum(weights) >= top_p * weights.sum()
    count = int(np.argmax(reached)) + 1 if top_p < 1 else len(order)
    mask = np.zeros(len(logits), bool)
    mask[order[:count]] = True
    return mask


_nucleus = jax.jit(nucleus)


def nucleus_of(logits: Any, top_k: int, top_p: float) -> Any:
    weights = np.exp(logits - logits.max())
    limits = np.array([top_k], np.int32), np.array([top_p], np.float32)
    return np.asarray(_nucleus(logits[None], weights[None], *limits))[0] > 0


@pytest.mark.parametrize("top_k", [-1, 1, 2, 17, VOCAB - 1, VOCAB, VOCAB + 9])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])
def test_truncation_selects_the_same_ids_as_sorting(top_k: int, top_p: float) -> None:
    np.testing.assert_array_equal(nucleus_of(LOGITS, top_k, top_p), kept(LOGITS, top_k, top_p))


@settings(max_examples=60, deadline=None)
@given(
    logits=hnp.arrays(np.float32, 24, elements=st.floats(-30, 30, width=32, allow_subnormal=False)),
    top_k=st.integers(-1, 26),
)
def test_top_k_is_exact_on_any_logits(logits: Any, top_k: int) -> None:
    np.testing.assert_array_equal(nucleus_of(logits, top_k, 1.0), kept(logits, top_k, 1.0))


def test_tied_logits_are_selected_from_the_lowest_id() -> None:
    tied = np.array([0.0, 1.0, 1.0, -2.0, 1.0, 1.0], np.float32)
    assert nucleus_of(tied, 2, 1.0).tolist() == [False, True, True, False, False, False]
    # Each 1.0 has 0.2239 of the mass: three are needed for 0.6, two for 0.4.
    assert nucleus_of(tied, -1, 0.6).tolist() == [False, True, True, False, True, False]
    assert nucleus_of(tied, -1, 0.4).tolist() == [False, True, True, False, False, False]


def test_zero_and_negative_zero_are_equal_logits() -> None:
    zeros = np.array([-0.0, 0.0, -0.0, -9.0], np.float32)
    assert nucleus_of(zeros, 1, 1.0).tolist() == [True, False, False, False]


def test_top_p_applies_to_the_distribution_after_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the top two, 0.4 is 0.57 of the mass. This is enough for 0.5, though 0.4 alone is not.
    assert nucleus_of(logits, 2, 0.5).tolist() == [True, False, False, False]
    assert nucleus_of(logits, -1, 0.5).tolist() == [True, True, False, False]


def test_rows_without_truncation_keep_everything_beside_truncated_rows() -> None:
    both = np.stack([LOGITS, LOGITS])
    limits = np.array([5, -1], np.int32), np.array([0.5, 1.0], np.float32)
    left = np.asarray(_nucleus(both, np.exp(both), *limits))
    np.testing.assert_array_equal(left[0] > 0, kept(LOGITS, 5, 0.5))
    np.testing.assert_array_equal(left[1], np.exp(LOGITS))


@pytest.mark.parametrize(
    "temperature,top_k,top_p",
    [
        (1.0, -1, 1.0),
        (0.5, -1, 1.0),
        (2.0, -1, 1.0),
        (1.0, 12, 1.0),
        (1.3, -1, 0.8),
        (0.9, 40, 0.7),
    ],
)
@pytest.mark.parametrize("step", [0, 5])
def test_draws_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, step: int
) -> None:
    params = [
        rows(DRAWS, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
        for seed in range(42, 50)
    ]
    tokens = np.concatenate([draw_many(one, step=step)[0] for one in params])
    scaled = LOGITS / np.float32(temperature)
    exact = np.where(kept(scaled, top_k, top_p), softmax(LOGITS, temperature), 0.0)
    exact /= exact.sum()
    assert (exact[tokens] > 0).all()
    assert chi_square(tokens, exact) > 0.01


def chi_square(tokens: Any, exact: Any) -> float:
    """The p-value of the draws. Tokens expected less than 8 times are counted together."""
    seen, expected = np.bincount(tokens, minlength=len(exact)), exact * len(tokens)
    rare = expected < 8
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    return float(stats.chisquare(seen[used], expected[used]).pvalue)


def test_successive_tokens_of_a_sample_are_independent() -> None:
    params = rows(DRAWS, seed=3)
    coin = np.array([0.0, 0.0], np.float32)
    first, _ = draw_many(params, logits=coin, step=0)
    second, _ = draw_many(params, logits=coin, step=1)
    table = np.zeros((2, 2), int)
    np.add.at(table, (first, second), 1)
    assert stats.chi2_contingency(table).pvalue > 0.01


def test_a_row_draws_the_same_token_in_any_place_among_any_others() -> None:
    """The token and the bits of its logprob are a function of the row."""
    others = rows(8, seed=99, temperature=0.3, top_k=7, top_p=0.4)
    mine = rows(8, seed=5, temperature=0.8)
    alone = draw_many(RowParams(*(np.repeat(x[3:4], 8, axis=0) for x in mine)), step=2)
    for place in (0, 3, 7):
        mixed = RowParams(*(x.copy() for x in others))
        for x, y in zip(mixed, mine, strict=True):
            x[place] = y[3]
        tokens, logprobs = draw_many(mixed, step=2)
        assert tokens[place] == alone[0][0]
        assert logprobs[place] == alone[1][0]


def test_seed_sample_and_step_each_change_the_draw() -> None:
    flat = np.zeros(100_000, np.float32)
    base = draw_many(rows(2, seed=1), logits=flat)[0]
    assert base[0] != base[1]
    assert draw_many(rows(2, seed=2), logits=flat)[0][0] != base[0]
    assert draw_many(rows(2, seed=1), logits=flat, step=1)[0][0] != base[0]
    assert draw_many(rows(2, seed=1), logits=flat)[0].tolist() == base.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1, -1, -(2**62)])
def test_all_64_bits_of_a_seed_count(seed: int) -> None:
    high, low = seed_halves(seed).tolist()
    assert (high << 32 | low) == seed % 2**64


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_logprobs_use_the_whole_distribution_at_the_temperature(temperature: float) -> None:
    params = rows(64, temperature=temperature, top_k=20, top_p=0.5)
    tokens, logprobs = draw_many(params)
    want = np.log(softmax(LOGITS, temperature))[tokens]
    np.testing.assert_allclose(logprobs, want, atol=1e-5)


def test_temperature_zero_takes_the_best_token_with_its_logprob_at_one() -> None:
    tokens, logprobs = draw_many(rows(8, temperature=0.0))
    assert tokens.tolist() == [int(LOGITS.argmax())] * 8
    np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS).max()), atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-40])
def test_a_temperature_near_zero_is_greedy_and_finite(temperature: float) -> None:
    tokens, logprobs = draw_many(rows(8, temperature=temperature))
    assert tokens.tolist() == [int(LOGITS.argmax())] * 8
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_still_draw_an_id_of_the_vocabulary(value: float) -> None:
    tokens, _ = draw_many(rows(8, top_k=5, top_p=0.5), logits=np.full(VOCAB, value, np.float32))
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_a_row_of_nan_changes_no_bit_of_its_neighbours() -> None:
    params = rows(8, seed=8, top_k=9, top_p=0.9)
    clean = np.tile(LOGITS, (8, 1))
    spoilt = clean.copy()
    spoilt[2] = np.nan
    step = jnp.zeros(8, jnp.int32)
    run = jax.jit(_drawn)
    keep = np.arange(8) != 2
    for want, got in zip(run(clean, step, params), run(spoilt, step, params), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[keep], np.asarray(want)[keep])


def test_token_logprobs_are_the_log_softmax_and_zero_at_negative_ids() -> None:
    ids = np.array([[5, -1, 299]], np.int32)
    got = np.asarray(jax.jit(token_logprobs)(LOGITS[None], ids))
    want = np.log(softmax(LOGITS))
    np.testing.assert_allclose(got[0], [want[5], 0.0, want[299]], atol=1e-5)


def test_the_top_k_are_ordered_with_their_logprobs() -> None:
    temperature = np.array([0.5], np.float32)
    ids, logprobs = jax.jit(partial(top_logprobs, k=6))(LOGITS[None], temperature)
    want = np.argsort(-LOGITS)[:6]
    np.testing.assert_array_equal(ids[0], want)
    np.testing.assert_allclose(logprobs[0], np.log(softmax(LOGITS, 0.5))[want], atol=1e-5)


def test_scaling_leaves_the_largest_logit_at_zero() -> None:
    scaled = jax.jit(at_temperature)(np.stack([LOGITS, LOGITS]), np.array([0.5, 0.0], np.float32))
    np.testing.assert_array_equal(np.asarray(scaled).max(axis=1), 0)
    np.testing.assert_allclose(scaled[0], (LOGITS - LOGITS.max()) * 2, atol=1e-5)
    np.testing.assert_allclose(scaled[1], LOGITS - LOGITS.max(), atol=1e-6)


def alternatives(k: int) -> Callable[..., Any]:
    return jax.jit(partial(draw_alternatives, k=k))


def test_alternatives_follow_the_distribution_at_the_temperature() -> None:
    positions = np.arange(512, dtype=np.int32)
    temperature = np.full(512, 1.5, np.float32)
    ids, logprobs = alternatives(8)(
        np.tile(LOGITS, (512, 1)), seed_halves(4), positions, temperature
    )
    exact = softmax(LOGITS, 1.5)
    assert chi_square(np.asarray(ids).ravel(), exact) > 0.01
    np.testing.assert_allclose(logprobs, np.log(exact)[np.asarray(ids)], atol=1e-5)


def test_an_alternative_depends_only_on_its_own_number_and_position() -> None:
    args = (seed_halves(4), np.arange(16, dtype=np.int32), np.ones(16, np.float32))
    few, _ = alternatives(2)(np.tile(LOGITS, (16, 1)), *args)
    many, _ = alternatives(8)(np.tile(LOGITS, (16, 1)), *args)
    np.testing.assert_array_equal(few, many[:, :2])
    assert len({tuple(row) for row in np.asarray(many).tolist()}) == 16


def test_alternatives_at_temperature_zero_are_the_best_token() -> None:
    positions = np.arange(4, dtype=np.int32)
    ids, _ = alternatives(4)(
        np.tile(LOGITS, (4, 1)), seed_halves(0), positions, np.zeros(4, np.float32)
    )
    np.testing.assert_array_equal(ids, LOGITS.argmax())
