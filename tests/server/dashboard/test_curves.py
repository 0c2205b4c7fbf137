"""The contents of the dashboard: curves, rates and recent errors."""

from collections.abc import Iterator, Sequence
from typing import Any

from tuneserve_engine.core.usage import CurvePoint
from tuneserve_server.dashboard.curves import MOST_ROWS, Curve
from tuneserve_server.dashboard.recent_errors import MOST_OF_TENANT, RecentErrors
from tuneserve_server.dashboard.state import Rates


def steps(numbers: Sequence[int], start: int = 0) -> Iterator[CurvePoint]:
    for number in numbers:
        position = start + 2 * number
        yield CurvePoint("forward_backward", position, loss_sum=3.0 * number, tokens=3, weight=1.5)
        yield CurvePoint("optim_step", position + 1, step=number, learning_rate=0.1)


def test_a_long_curve_has_its_ends_and_every_nth_row() -> None:
    curve = Curve.from_points(steps(range(1, 3 * MOST_ROWS + 1)))
    places = [row.x for row in curve.rows]
    assert MOST_ROWS / 2 <= len(places) <= MOST_ROWS
    assert places == list(range(1, 3 * MOST_ROWS + 1, 4))
    assert [row.loss for row in curve.rows] == [2.0 * x for x in places]


def test_points_are_taken_once_and_the_axis_only_grows() -> None:
    curve = Curve()
    for _ in range(2):
        curve.add_points(steps([1, 2, 3]))
    assert [row.x for row in curve.rows] == [1, 2, 3]
    # this state was loaded with an optimizer without steps
    curve.add_points(steps([1, 2], start=100))
    assert [row.x for row in curve.rows] == [1, 2, 3, 4, 5]


def test_unweighted_losses_are_per_token_and_steps_without_gradients_have_none() -> None:
    points = [
        CurvePoint("forward_backward", 1, loss_sum=4.0, tokens=3, weight=0.0),
        CurvePoint("forward_backward", 2, loss_sum=4.0, tokens=5, weight=0.0),
        CurvePoint("forward", 3, loss_sum=100.0, tokens=5, weight=5.0),
        CurvePoint("optim_step", 4, step=1),
        CurvePoint("optim_step", 5, step=2),
    ]
    assert [row.loss for row in Curve.from_points(points).rows] == [1.0, None]


def test_each_gradient_counts_by_its_weights_or_else_by_its_tokens() -> None:
    points = [
        CurvePoint("forward_backward", 1, loss_sum=200.0, tokens=100, weight=100.0),
        CurvePoint("forward_backward", 2, loss_sum=-30.0, tokens=1000, weight=0.0),
        CurvePoint("optim_step", 3, step=1),
    ]
    assert [row.loss for row in Curve.from_points(points).rows] == [170 / 1100]


def test_rates_cover_the_last_seconds() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    rates.add_counters({"a": {"n": 0.0}})
    assert rates.rates_of("a") == {}
    for count in range(1, 61):
        now_s = float(count)
        rates.add_counters({"a": {"n": 2.0 * count if count <= 30 else 60.0 + 5 * (count - 30)}})
        assert count > 30 or rates.rates_of("a") == {"n": 2.0}
    assert rates.rates_of("a") == {"n": 5.0}
    now_s += 60  # no viewer looked in the meantime
    rates.add_counters({"a": {"n": 300.0}})
    assert rates.rates_of("a") == {}


def test_a_new_or_restarted_counter_has_a_rate_from_its_second_reading() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    seen: list[Any] = [{"a": 10.0}, {}, {"a": 20.0}, {"a": 21.0}, {"a": 3.0, "b": 5.0}]
    for values in [*seen, {"a": 5.0, "b": 9.0}]:
        now_s += 1
        rates.add_counters({key: {"n": value} for key, value in values.items()})
        if values == {"a": 21.0}:
            assert rates.rates_of("a") == {"n": 1.0}
        if values == {"a": 3.0, "b": 5.0}:
            assert rates.rates_of("a") == rates.rates_of("b") == {}
    assert (rates.rates_of("a"), rates.rates_of("b")) == ({"n": 2.0}, {"n": 4.0})


def test_one_tenants_errors_push_out_only_its_own() -> None:
    now_s = iter(range(1000))
    recent = RecentErrors(lambda: float(next(now_s)))
    recent.record_error("quiet", "code", "text", "/route")
    for number in range(2 * MOST_OF_TENANT):
        recent.record_error("loud", "code", f"text {number} {'x' * 1000}", "/route")
    assert len(recent.newest("loud", 100)) == MOST_OF_TENANT
    assert [each.tenant for each in recent.newest("quiet", 100)] == ["quiet"]
    newest = recent.newest(None, 2)
    assert [each.text[:7] for each in newest] == ["text 39", "text 38"]
    assert len(newest[0].text) < 700
