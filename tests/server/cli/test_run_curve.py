"""The rows of a run's curve."""

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tuneserve_client.wire import run_types
from tuneserve_server.cli.run_curve import as_csv, mean_loss, step_rows

START = datetime(2026, 1, 31, 12, tzinfo=UTC)


def point(kind: Any, seq_id: int, **fields: Any) -> run_types.CurvePointResponse:
    time = START + timedelta(seconds=seq_id)
    return run_types.CurvePointResponse(kind=kind, seq_id=seq_id, time=time, **fields)


POINTS = [
    point("forward", 1, loss_sum=6.0, tokens=9, weight=2.0),
    point("forward", 2, loss_sum=3.0, tokens=9, weight=1.0),
    point("forward_backward", 3, loss_sum=6.0, tokens=10, weight=3.0),
    point("forward_backward", 4, loss_sum=2.0, tokens=20, weight=1.0),
    point("optim_step", 5, step=1, learning_rate=0.5, grad_norm=0.25),
    point("forward_backward", 6, loss_sum=1.0, tokens=5, weight=2.0),
    point("optim_step", 7, step=2, learning_rate=0.25, grad_norm=0.125),
    point("forward", 8, loss_sum=2.0, tokens=9, weight=4.0),
]


def test_a_row_has_a_steps_losses_and_the_evaluation_behind_it() -> None:
    rows = step_rows(POINTS)
    assert [(each.step, each.tokens) for each in rows] == [(0, 0), (1, 30), (2, 35)]
    assert [each.loss for each in rows] == [None, 2.0, 0.5]
    assert [each.held_out_loss for each in rows] == [3.0, None, 0.5]
    assert [each.learning_rate for each in rows] == [None, 0.5, 0.25]
    assert rows[2].time == "2026-01-31T12:00:07+00:00"


def test_the_csv_has_a_head_and_empty_cells_for_the_unknown() -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(step_rows(POINTS)))))
    assert [each["held_out_loss"] for each in read] == ["3.0", "", "0.5"]
    assert read[1]["grad_norm"] == "0.25"
    assert as_csv([]).count("\n") == 1


@pytest.mark.parametrize(
    ("loss_sum", "weight", "tokens", "mean"),
    [(200.0, 100.0, 400, 2.0), (-30.0, 0.0, 1000, -0.03), (-30.0, None, 1000, -0.03)],
)
def test_a_runs_loss_is_the_mean_over_weights_or_else_over_tokens(
    loss_sum: float, weight: float | None, tokens: int, mean: float
) -> None:
    found = point("forward_backward", 1, loss_sum=loss_sum, weight=weight, tokens=tokens)
    assert mean_loss([found]) == mean
    assert mean_loss([]) is None


def test_a_resumed_runs_first_evaluation_is_of_the_checkpoints_step() -> None:
    rows = step_rows([POINTS[0], point("optim_step", 2, step=51), point("optim_step", 3, step=1)])
    assert [each.step for each in rows] == [50, 51, 52]
