"""Sums of usage, the points that a curve keeps, and days in UTC."""

import pytest

from tuneserve_engine.core.usage import MOST_POINTS, TenantUsage, Totals, Usage, day_of, stride

ONE = Usage(2.5, 10, 20, 30, 40, 5e6, queued_s=1.0, ran_s=2.0, others=3)


def test_totals_count_requests_and_add_what_they_cost() -> None:
    one = Totals.from_usage(ONE)
    assert one == Totals(1, 2.5, 10, 20, 30, 40, 5e6)
    assert one + one + Totals() == Totals(2, 5.0, 20, 40, 60, 80, 1e7)


def test_a_tenants_total_is_the_total_of_its_models() -> None:
    one = Totals.from_usage(ONE)
    assert TenantUsage("t", {"a": one, "b": one}).total == Totals(2, 5.0, 20, 40, 60, 80, 1e7)
    assert TenantUsage("t").total == Totals()


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, 1), (2047, 1), (2048, 2), (4095, 2), (4096, 4), (8191, 4), (8192, 8), (10**6, 512)],
)
def test_the_stride_doubles_before_there_are_too_many_points(n: int, expected: int) -> None:
    assert stride(n) == expected
    assert n // expected + 1 <= MOST_POINTS
    assert expected == 1 or 2 * (n // expected + 1) > MOST_POINTS


def test_a_day_starts_at_midnight_in_utc() -> None:
    assert [day_of(s) for s in (0.0, 86_399.9, 86_400.0, 1_700_000_000.0)] == [0, 0, 1, 19_675]
