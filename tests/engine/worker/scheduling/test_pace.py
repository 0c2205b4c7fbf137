"""The pace of training: the tokens of a time slice, learned from past passes."""

import pytest

from tuneserve_engine.worker.scheduling.pace import Pace


def test_the_pace_is_learned_and_forgets_slices_that_had_to_compile() -> None:
    pace = Pace(0.1)
    assert pace.tokens(False, 900) is None
    pace.learn(False, 900, 1000, 60.0)
    for _ in range(2):
        pace.learn(False, 900, 1000, 0.2)
    assert pace.tokens(False, 900) == 500
    assert pace.tokens(True, 900) is None


def test_a_slice_has_a_token_at_least_and_a_pass_without_tokens_teaches_nothing() -> None:
    pace = Pace(0.1)
    pace.learn(True, 10, 0, 1.0)
    pace.learn(True, 10, 10, 0.0)
    assert pace.tokens(True, 10) is None
    pace.learn(True, 10, 1, 60.0)
    assert pace.tokens(True, 10) == 1


def test_many_passes_of_short_datums_do_not_lengthen_the_slices_of_long_ones() -> None:
    """A flood of 5,000 tokens beside many small steps once ran in slices of twice the length."""
    pace = Pace(0.1)
    pace.learn(False, 1000, 1024, 0.1024)
    for _ in range(20):
        pace.learn(False, 128, 256, 0.0128)
    assert pace.tokens(False, 1000) == 1000
    assert pace.tokens(False, 128) == 2000


@pytest.mark.parametrize(
    ("length", "tokens"),
    [(20, 2000), (300, 1000), (900, 1000), (4000, 500), (10_000, 250), (40_000, 62)],
)
def test_datums_unlike_any_before_have_the_pace_of_the_nearest_length(
    length: int, tokens: int
) -> None:
    """Of two that are as near, the longer one; beyond all, twice the time for twice the length."""
    pace = Pace(0.1)
    for known, rate in ((100, 5e-5), (1100, 1e-4), (5000, 2e-4)):
        pace.learn(False, known, 1000, 1000 * rate)
    assert pace.tokens(False, length) == tokens
