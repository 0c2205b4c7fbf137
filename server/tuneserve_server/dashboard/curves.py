"""The curves that the dashboard draws: a row for each optimizer step of a model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.core.usage import CurvePoint, loss_count
from tuneserve_engine.store.base import Store

MOST_ROWS = 512
"""The number of rows kept of a curve; a screen cannot show more."""
_LATE, _LATEST_S = 0.1, 30.0
"""The delay of a point: this share of the time without a new point before it, and its maximum."""


class CurveRow(msgspec.Struct, array_like=True, frozen=True):
    """An optimizer step as a row of a curve.

    ``x`` is its place on the axis, which only grows; ``time_s`` is when the step ended; ``loss`` is
    the mean loss of the gradients before the step, or None without any.
    """

    x: int
    time_s: float
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None


class Curve:
    """The rows of one model, from points in the order of its requests."""

    def __init__(self) -> None:
        self.rows: list[CurveRow] = []
        self.position = -1  # of the newest point
        self._stride = 1
        self._steps = 0  # steps seen; every ``_stride``-th step is a row
        self._loss_sum = self._count = 0.0  # of gradients since the last step

    @classmethod
    def from_points(cls, points: Iterable[CurvePoint]) -> Self:
        curve = cls()
        curve.add_points(points)
        return curve

    def add_points(self, points: Iterable[CurvePoint]) -> None:
        """Add the points after the newest known point; the others are known."""
        for point in points:
            if point.position <= self.position:
                continue
            self.position = point.position
            if point.kind == "forward_backward":
                self._loss_sum += point.loss_sum or 0.0
                self._count += loss_count(point.loss_sum, point.weight, point.tokens)
            elif point.kind == "optim_step":
                self._step(point)

    def after(self, x: int, since_s: float = 0.0) -> Sequence[CurveRow]:
        """Return the rows after ``x`` that are not older than ``since_s``."""
        return [each for each in self.rows if each.x > x and each.time_s >= since_s]

    def _step(self, point: CurvePoint) -> None:
        loss = self._loss_sum / self._count if self._count else None
        self._loss_sum = self._count = 0.0
        self._steps += 1
        if (self._steps - 1) % self._stride:
            return
        # The step counts from 1 again when the optimizer's state was loaded or reset.
        x = max(point.step or self._steps, self.rows[-1].x + 1 if self.rows else 0)
        self.rows.append(CurveRow(x, point.time_s, loss, point.learning_rate, point.grad_norm))
        if len(self.rows) > MOST_ROWS:
            self.rows = self.rows[::2]
            self._stride *= 2


class Points(Protocol):
    """A summary of a curve that grows point by point; ``position`` is that of the newest."""

    position: int

    def add_points(self, points: Iterable[CurvePoint]) -> None:
        """Add the points after the newest known point; the others are known."""
        ...


P = TypeVar("P", bound=Points)


class CurveReader(Generic[P]):
    """The reader of a model's curve into ``curve``; it knows when the store may have more.

    There may be more from the time a request was accepted, which the model's record holds, until a
    later moment at which the model's tenant had nothing unfinished. Meanwhile, the longer nothing
    new came, the less often the curve is read: the unfinished request may be another model's, or
    wait behind a gap.
    """

    def __init__(self, curve: P, clock: Callable[[], float]) -> None:
        self.curve = curve
        self._clock = clock
        self._last_request_s: float | None = None  # by the store's clock
        self._is_whole = False
        self._news_s = self._read_s = 0.0

    async def go_on(self, store: Store, model: ModelRecord, idle_s: float) -> P:
        """Return the curve, after reading on if there may be more of it.

        At ``idle_s`` the model's tenant had nothing unfinished.
        """
        now_s = self._clock()
        was_asked = model.last_request_s != self._last_request_s
        is_last = not was_asked and idle_s > self._news_s
        if was_asked or (not self._is_whole and (is_last or self._is_due(now_s))):
            points = await store.curve(model.key, after=self.curve.position)
            self.curve.add_points(points)
            self._last_request_s, self._is_whole, self._read_s = (
                model.last_request_s,
                is_last,
                now_s,
            )
            if was_asked or points:
                self._news_s = now_s
        return self.curve

    def _is_due(self, now_s: float) -> bool:
        return now_s - self._read_s >= min(_LATE * (now_s - self._news_s), _LATEST_S)
