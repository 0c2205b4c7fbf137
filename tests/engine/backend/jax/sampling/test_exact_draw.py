"""The sampler's exact arithmetic: the id that each of the 2^64 pairs of words draws."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuneserve_engine.backend.jax.sampling.exact_draw import _halves, inverse_cdf
from tuneserve_engine.backend.jax.sampling.logits import at_temperature

VOCAB = 300  # two blocks, the last one short
WORDS = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)

_draw = jax.jit(inverse_cdf)
_fixed = jax.jit(lambda weights: _halves(weights))


def drawn(weights: np.ndarray, random: int) -> int:
    high, low = (np.array([random >> shift & 0xFFFFFFFF], np.uint32) for shift in (32, 0))
    return int(_draw(jnp.asarray(weights[None]), high, low)[0])


def whole_numbers(weights: np.ndarray) -> list[int]:
    """The weights in multiples of 2^-44, as Python integers."""
    lower, upper = (np.asarray(half, object) for half in _fixed(jnp.asarray(weights)))
    return list(lower + (1 << 22) * upper)


@pytest.mark.parametrize("seed", range(3))
def test_the_drawn_id_is_where_the_exact_running_sum_exceeds_the_share(seed: int) -> None:
    """The reference uses integers of any length."""
    random = np.random.default_rng(seed)
    weights = np.exp(np.minimum(random.normal(-8, 6, VOCAB), 0)).astype(np.float32)
    running = np.cumsum(np.array(whole_numbers(weights), object))
    picks = [0, 2**64 - 1, *(int(x) for x in random.integers(0, 2**64, 40, dtype=np.uint64))]
    for number in picks:
        goal = number * running[-1] >> 64
        assert drawn(weights, number) == next(i for i, x in enumerate(running) if x > goal)


def test_the_border_between_two_ids_is_exact() -> None:
    """Among all 2^64 numbers, the last that draws an id and the first that draws the next one."""
    random = np.random.default_rng(5)
    weights = random.random(VOCAB).astype(np.float32)
    running = np.cumsum(np.array(whole_numbers(weights), object))
    for index in (0, 126, 127, 128, 255, VOCAB - 2):
        first = -(-(int(running[index]) << 64) // int(running[-1]))  # share >= running[index]
        assert (drawn(weights, first - 1), drawn(weights, first)) == (index, index + 1)


def test_weights_are_exact_to_44_bits_and_never_lost() -> None:
    weights = np.float32([1.0, 0.75, 2.0**-44, 3 * 2.0**-45, 1e-30, 0.0, np.nan, 1 / 3])
    want = [2**44, 3 * 2**42, 1, 1, 1, 0, 0, int(np.float64(np.float32(1 / 3)) * 2**44)]
    assert whole_numbers(weights) == want


LOGITS = {
    "normal, 3": lambda random: random.normal(0, 3, 151_936),
    "normal, 1": lambda random: random.normal(0, 1, 151_936),
    "all alike": lambda random: np.zeros(151_936),
}


@pytest.mark.parametrize("name", LOGITS)
def test_the_distribution_over_a_large_vocabulary_is_exact_to_a_millionth(name: str) -> None:
    """The test draws nothing: an id's probability is its integer weight over their sum, to 2^-64,
    as the tests above show.

    Only the exponential in float32 remains to be checked.
    """
    make: Callable[[Any], np.ndarray] = LOGITS[name]
    logits = make(np.random.default_rng(0)).astype(np.float32)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    scaled = at_temperature(jnp.asarray(logits[None]), jnp.ones(1))
    lower, upper = (np.asarray(half, np.float64) for half in _fixed(jnp.exp(scaled)[0]))
    found = lower + 2.0**22 * upper
    assert (found > 0).all()  # every id can be drawn
    found /= found.sum()
    assert np.abs(found - exact).sum() / 2 <= 1e-6
    likely = exact > 1e-6
    np.testing.assert_allclose(found[likely], exact[likely], rtol=1e-5)


def test_ids_of_a_large_vocabulary_that_24_bits_cannot_reach_are_drawn() -> None:
    """The words that should draw an id, computed from the exact sums, do draw it."""
    logits = np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32)
    weights = np.array(jnp.exp(at_temperature(jnp.asarray(logits[None]), jnp.ones(1))))[0]
    whole = np.array(whole_numbers(weights), object)
    running = np.cumsum(whole)
    rare = np.argsort(weights)[:: 151_936 // 12]
    for index in (int(i) for i in rare):
        below = int(running[index]) - int(whole[index])
        number = -(-(below << 64) // int(running[-1]))
        assert drawn(weights, number) == index


@pytest.mark.parametrize("only", [0, 127, 128, VOCAB - 1])
@pytest.mark.parametrize("high", WORDS)
@pytest.mark.parametrize("low", WORDS)
def test_an_id_of_weight_zero_is_never_drawn(only: int, high: int, low: int) -> None:
    weights = np.zeros(VOCAB, np.float32)
    weights[only] = 1e-20
    assert drawn(weights, int(high) << 32 | int(low)) == only
