"""The verdict on a training run: whether its loss improved, rose, or diverged."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from tuneserve_client.defaults import LEARNING_RATE
from tuneserve_client.errors import RequestFailed
from tuneserve_client.runs import RunOutcome

_SAME = 0.01
"""The relative change of a loss that counts as none."""
_HIGH_START = 1.5
_WINDOW, _LONG_WINDOW = 3, 10
_FEW_STEPS = 20
_ROUNDING = 0.999
_NOT_FINITE = "not finite"  # in the server's refusal


class Diverged(Exception):
    """The end of a run whose numbers are of no use: the step, and the reason."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"diverged at step {step}: {reason}")
        self.step = step


def has_no_loss(error: RequestFailed) -> bool:
    """Return whether the server refused a request because its loss or gradient is not finite."""
    return error.category == "user" and _NOT_FINITE in str(error)


class DivergenceWatch:
    """The rule by which a run has diverged.

    A run has diverged if a loss or a gradient norm is not finite. It has also diverged if the
    held-out loss, or the mean training loss of three steps, reaches that of a uniform guess,
    ln(vocabulary), or 1.5 times the first loss if this is more. With weights that are far too
    large, many base models give the same logit to all tokens, which is exactly a uniform guess,
    and then no gradient is left: a step with that loss and no gradient has diverged, too. So has a
    run whose mean loss of ten steps reaches twice that of its first three, and 4 more.
    """

    def __init__(self, vocabulary: int) -> None:
        self._uniform = math.log(vocabulary)
        self._first: float | None = None
        self._begun: list[float] = []
        self._last: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._longer: deque[float] = deque(maxlen=_LONG_WINDOW)

    def see_step(self, step: int, loss: float, grad_norm: float | None) -> None:
        """Check the training loss before a step, and its gradient. Raises ``Diverged``."""
        if not math.isfinite(loss):
            raise Diverged(step, f"loss {loss}")
        if grad_norm is not None and not math.isfinite(grad_norm):
            raise Diverged(step, f"gradient norm {grad_norm}")
        if grad_norm == 0 and math.isclose(loss, self._uniform, rel_tol=1 - _ROUNDING):
            raise Diverged(step, f"loss {loss:.4g}, that of a uniform guess, without a gradient")
        self._see_rise(step, loss)
        if self._first is None:
            self._first = loss
            return
        self._last.append((step, loss))
        if len(self._last) == _WINDOW:
            self.finish()

    def _see_rise(self, step: int, loss: float) -> None:
        if len(self._begun) < _WINDOW:
            self._begun.append(loss)
            return
        self._longer.append(loss)
        begun, mean = _mean(self._begun), _mean(self._longer)
        if len(self._longer) == _LONG_WINDOW and mean >= 2 * begun + 4:
            raise Diverged(step, f"loss {mean:.4g} in ten steps, after {begun:.4g} at the start")

    def see_held_out(self, step: int, loss: float, first: float) -> None:
        """Check the held-out loss after ``step`` steps. Raises ``Diverged``."""
        if not math.isfinite(loss):
            raise Diverged(step, f"held-out loss {loss}")
        if step and loss >= _ROUNDING * self.limit(first):
            raise Diverged(step, f"held-out loss {loss:.4g}, {self._compared(first)}")

    def finish(self) -> None:
        """Check the last steps, however few they are. Raises ``Diverged``."""
        if self._first is None or not self._last:
            return
        mean = _mean([loss for _, loss in self._last])
        if mean >= _ROUNDING * self.limit(self._first):
            raise Diverged(self._last[-1][0], f"loss {mean:.4g}, {self._compared(self._first)}")

    def limit(self, first: float) -> float:
        """Return the loss from which a run that began with the loss ``first`` has diverged."""
        return max(self._uniform, _HIGH_START * first)

    def _compared(self, first: float) -> str:
        return f"after {first:.4g} at the start; a uniform guess has {self._uniform:.4g}"


@dataclass(frozen=True)
class HeldOut:
    """The held-out losses of a run so far; a checkpoint keeps them for a resumed run."""

    first_loss: float
    best_loss: float
    best_step: int
    last_loss: float
    last_step: int
    since_best: int = 0
    """The number of evaluations since the best one."""
    best_checkpoint: str | None = None

    @classmethod
    def began(cls, step: int, loss: float) -> Self:
        return cls(loss, loss, step, loss, step)

    def with_loss(self, step: int, loss: float) -> Self:
        """Return the losses with one more evaluation."""
        if loss < self.best_loss:
            return replace(
                self, best_loss=loss, best_step=step, last_loss=loss, last_step=step, since_best=0
            )
        return replace(self, last_loss=loss, last_step=step, since_best=self.since_best + 1)

    @property
    def text(self) -> str:
        """The verdict in plain words."""
        first, best, last = self.first_loss, self.best_loss, self.last_loss
        if self.last_step == self.best_step and first == best:
            return f"held-out loss was {first:.4g} in the only evaluation, at step {self.last_step}"
        if best >= first * (1 - _SAME):
            if last > first * (1 + _SAME):
                return (
                    f"held-out loss rose from {first:.4g} to {last:.4g} and never fell: lower "
                    "--learning-rate, or train on more rows"
                )
            return (
                f"held-out loss stayed at {last:.4g}, {first:.4g} at the start: raise "
                "--learning-rate or --epochs, or look at the rows with --dry-run"
            )
        if last > best * (1 + _SAME):
            kept = self.best_checkpoint or "not saved"
            return (
                f"held-out loss improved from {first:.4g} to {best:.4g} at step {self.best_step}, "
                f"then rose from {best:.4g} to {last:.4g}: over-fitting; the best checkpoint is "
                f"{kept}"
            )
        return (
            f"held-out loss improved from {first:.4g} to {best:.4g}, best at step {self.best_step}"
        )


@dataclass(frozen=True)
class Verdict:
    """The end of a run, and the verdict on it."""

    outcome: RunOutcome
    verdict: str
    best_step: int | None = None
    best_loss: float | None = None
    best_checkpoint: str | None = None

    @classmethod
    def on(
        cls,
        outcome: RunOutcome,
        losses: Sequence[float],
        held_out: HeldOut | None,
        steps_per_epoch: int,
    ) -> Self:
        """Judge a run by its held-out losses or, if it has none, by its training losses."""
        text = held_out.text if held_out else training_text(losses, steps_per_epoch)
        return cls(outcome, text).with_best(held_out)

    @classmethod
    def on_diverged(cls, error: Diverged, learning_rate: float, held_out: HeldOut | None) -> Self:
        lower = LEARNING_RATE if learning_rate > 3 * LEARNING_RATE else learning_rate / 3
        text = f"{error}; lower the learning rate, for example --learning-rate {lower:.1g}"
        return cls("diverged", text).with_best(held_out)

    def with_best(self, held_out: HeldOut | None) -> Self:
        if held_out is None:
            return self
        return replace(
            self,
            best_step=held_out.best_step,
            best_loss=held_out.best_loss,
            best_checkpoint=held_out.best_checkpoint,
        )

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


def training_text(losses: Sequence[float], steps_per_epoch: int) -> str:
    """Compare the mean training loss of the first epoch with that of the last whole one.

    They have the same rows. In less than two epochs, compare the first tenth of the steps with the
    last; fewer than 20 steps say more about their rows than about the model.
    """
    epochs = len(losses) // steps_per_epoch
    if epochs >= 2:
        count, end = steps_per_epoch, epochs * steps_per_epoch
        parts = f"epochs 1 and {epochs}"
    elif len(losses) >= _FEW_STEPS:
        count, end = len(losses) // 10, len(losses)
        parts = "first and last tenth of the steps"
    else:
        return "too few steps for a verdict; hold rows out with --eval-split 0.05"
    first, last = _mean(losses[:count]), _mean(losses[end - count : end])
    compared = f"from {first:.4g} to {last:.4g}, {parts}"
    if last < first * (1 - _SAME):
        return f"training loss fell {compared}; see other rows' loss with --eval-split 0.05"
    if last > first * (1 + _SAME):
        return f"training loss rose {compared}: lower --learning-rate"
    return f"training loss stayed {compared}: raise --learning-rate or --epochs"


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
