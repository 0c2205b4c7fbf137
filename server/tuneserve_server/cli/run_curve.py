"""The curve of a run as rows of optimizer steps, for tables, comparisons and CSV files."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from tuneserve_engine.core.usage import loss_count

if TYPE_CHECKING:
    from tuneserve_client.wire import run_types


@dataclass(frozen=True)
class StepRow:
    """An optimizer step; ``tokens`` counts the trained tokens up to it.

    ``held_out_loss`` is the mean loss of the forward passes between this step and the next. Forward
    passes before the first step have a row of their own. Steps only grow, as in ``Progress``. A
    long curve keeps only some of its points, and ``tokens`` counts only theirs.
    """

    step: int
    time: str
    tokens: int
    loss: float | None = None
    held_out_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None


def step_rows(points: Iterable["run_types.CurvePointResponse"]) -> list[StepRow]:
    """Return the rows of a curve, in order."""
    rows: list[StepRow] = []
    gradients: list[run_types.CurvePointResponse] = []
    forwards: list[run_types.CurvePointResponse] = []
    tokens = 0
    for point in points:
        if point.kind == "forward_backward":
            gradients.append(point)
            tokens += point.tokens or 0
        elif point.kind == "forward":
            forwards.append(point)
            last = rows.pop() if rows else StepRow(0, point.time.isoformat(), tokens)
            rows.append(replace(last, held_out_loss=mean_loss(forwards)))
        else:
            before = rows[-1].step if rows else 0
            step = max(point.step or 0, before + 1)
            if len(rows) == 1 and before == 0:  # the evaluation before the first step
                rows = [replace(rows[0], step=step - 1)]
            rows.append(
                StepRow(
                    step=step,
                    time=point.time.isoformat(),
                    tokens=tokens,
                    loss=mean_loss(gradients),
                    learning_rate=point.learning_rate,
                    grad_norm=point.grad_norm,
                )
            )
            gradients, forwards = [], []
    return rows


def mean_loss(points: Sequence["run_types.CurvePointResponse"]) -> float | None:
    """Return the mean loss of the requests: see ``loss_count``."""
    count = sum(loss_count(each.loss_sum, each.weight, each.tokens) for each in points)
    return sum(each.loss_sum or 0.0 for each in points) / count if count else None


def as_csv(rows: Sequence[StepRow]) -> str:
    """Return the rows as CSV under a head; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [each.name for each in fields(StepRow)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue()
