"""The losses that tuneserve runs shows."""

from datetime import UTC, datetime

import pytest

from tuneserve_client.wire import types
from tuneserve_server.cli.runs import _loss


@pytest.mark.parametrize(
    ("loss_sum", "weight", "tokens", "mean"),
    [(200.0, 100.0, 400, 2.0), (-30.0, 0.0, 1000, -0.03), (-30.0, None, 1000, -0.03)],
)
def test_a_runs_loss_is_the_mean_over_weights_or_else_over_tokens(
    loss_sum: float, weight: float | None, tokens: int, mean: float
) -> None:
    point = types.CurvePointResponse(
        kind="forward_backward",
        seq_id=1,
        time=datetime.now(UTC),
        loss_sum=loss_sum,
        weight=weight,
        tokens=tokens,
    )
    assert _loss(point) == mean
