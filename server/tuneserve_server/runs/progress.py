"""The progress of a run, from the points of its curve."""

from collections.abc import Iterable

from tuneserve_engine.core.usage import CurvePoint, loss_count


class MeanLoss:
    """The mean loss of some requests: see ``loss_count``."""

    def __init__(self) -> None:
        self._loss_sum = self._count = 0.0

    @property
    def value(self) -> float | None:
        return self._loss_sum / self._count if self._count else None

    def add_loss(self, point: CurvePoint) -> None:
        self._loss_sum += point.loss_sum or 0.0
        self._count += loss_count(point.loss_sum, point.weight, point.tokens)


class Progress:
    """The newest step and losses of a model, from points in the order of its requests.

    The forward passes without gradients between two optimizer steps are one evaluation;
    ``held_out_loss`` is the mean loss of the newest. Of equal evaluations the first is the best.
    Steps only grow: an optimizer whose state was loaded or reset counts from an earlier one again.
    """

    def __init__(self) -> None:
        self.position = -1  # of the newest point
        self.step: int | None = None
        self.loss: float | None = None
        self._gradients, self._evaluation = MeanLoss(), MeanLoss()
        self._held_out: tuple[float, int] | None = None  # the newest, and its step
        self._best: tuple[float, int] | None = None

    @property
    def held_out_loss(self) -> float | None:
        return self._held_out[0] if self._held_out else None

    @property
    def best(self) -> tuple[float, int] | None:
        """The best held-out loss, and its step."""
        # Tuples compare by loss, then by step.
        return min((each for each in (self._best, self._held_out) if each), default=None)

    def add_points(self, points: Iterable[CurvePoint]) -> None:
        """Add the points after the newest known point; the others are known."""
        for point in points:
            if point.position <= self.position:
                continue
            self.position = point.position
            if point.kind == "optim_step":
                self._step(point)
            elif point.kind == "forward_backward":
                self._gradients.add_loss(point)
            else:
                self._evaluation.add_loss(point)
                if (loss := self._evaluation.value) is not None:
                    self._held_out = loss, self.step or 0

    def _step(self, point: CurvePoint) -> None:
        step = max(point.step or 0, (self.step or 0) + 1)
        if self.step is None and self._held_out:  # before the first step, which may be any
            self._held_out = self._held_out[0], step - 1
        self._best = self.best
        self.loss = self._gradients.value
        self.step = step
        self._gradients, self._evaluation = MeanLoss(), MeanLoss()
