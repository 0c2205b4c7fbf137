"""The contents of the dashboard: curves, rates and recent errors."""

from collections.abc import Iterator, Sequence

from tuneserve_engine.core.usage import CurvePoint
from tuneserve_server.dashboard.curves import MOST_ROWS, Curve


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
