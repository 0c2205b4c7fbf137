"""The steps of a training run; a few of them are always in flight."""

import threading
import time
from collections import deque
from dataclasses import dataclass

from tuneserve_client import Datum, Future, Model, RequestFailed, StepOutput, TrainOutput
from tuneserve_server.cli.evaluation import Evaluation, metadata_of
from tuneserve_server.cli.held_out import weight_of
from tuneserve_server.cli.train_recipe import Recipe
from tuneserve_server.cli.train_view import Step, View
from tuneserve_server.cli.verdict import Diverged, DivergenceWatch, HeldOut, has_no_loss

_AHEAD = 2
"""The number of steps that are sent before the result of an earlier step is read.

The server works on them while results travel.
"""
_RATE_STEPS = 10


@dataclass(frozen=True)
class _Sent:
    """A step whose results have not arrived."""

    number: int
    tokens: int
    weight: float
    rate: float
    gradient: Future[TrainOutput]
    applied: Future[StepOutput]


class TrainingLoop:
    """The steps of a run from ``first`` on, with evaluations between them.

    An evaluation waits for all steps in flight. It changes no weights, so a run with evaluations
    has the same steps as one without.
    """

    def __init__(
        self, model: Model, recipe: Recipe, data: list[Datum], first: int, watch: DivergenceWatch
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.next = first
        self.steps = recipe.steps(len(data))
        self.evaluation: Evaluation | None = None
        self.losses: list[float] = []
        self.is_early = False
        """Whether the run ended because the held-out loss stopped improving."""
        self._data = data
        self._watch = watch
        self._sent: deque[_Sent] = deque()
        self._landed: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS + 1)
        self._first_landed: tuple[float, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the run has come to its end, rather than being interrupted."""
        return self.is_early or self.next == self.steps

    @property
    def steps_per_epoch(self) -> int:
        return self.recipe.steps_per_epoch(len(self._data))

    @property
    def held_out(self) -> HeldOut | None:
        return self.evaluation.losses if self.evaluation else None

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a checkpoint from which the run can go on."""
        return self.recipe.metadata(self.next) | metadata_of(self.held_out)

    def go(self, view: View, stop: threading.Event) -> None:
        """Train until the last step or until ``stop`` is set, then wait for the steps sent.

        Raises ``Diverged``.
        """
        self._landed.append((time.monotonic(), 0))
        self._evaluate(view)
        while self.next < self.steps and not stop.is_set() and not self.is_early:
            self._send()
            if len(self._sent) > _AHEAD:
                self._show_landed(view)
            self._evaluate(view)
        self._land_all(view)
        if self.is_whole:
            self._watch.finish()

    def _evaluate(self, view: View) -> None:
        if self.evaluation is None or not self.evaluation.is_due(self.next, self.steps):
            return
        self._land_all(view)
        view.show_evaluation(self.evaluation.evaluate(self.next, self.steps, self._watch))
        self.is_early = self.evaluation.is_over and self.next < self.steps

    def _land_all(self, view: View) -> None:
        while self._sent:
            self._show_landed(view)

    def _show_landed(self, view: View) -> None:
        step = self._land()
        view.show(step)
        self.losses.append(step.loss)
        self._watch.see_step(step.step, step.loss, step.grad_norm)

    def _send(self) -> None:
        batch = self.recipe.batch(self.next, self._data)
        rate = self.recipe.rate(self.next, len(self._data))
        gradient = self.model.forward_backward(batch)
        applied = self.model.optim_step(rate)  # queued behind the gradient
        tokens = sum(map(len, batch))
        self._sent.append(_Sent(self.next, tokens, weight_of(batch), rate, gradient, applied))
        self.next += 1

    def _land(self) -> Step:
        sent = self._sent.popleft()
        number = sent.number + 1
        try:
            loss = sent.gradient.result().loss / sent.weight
        except RequestFailed as error:
            if has_no_loss(error):
                raise Diverged(number, "the loss or its gradient is not finite") from None
            raise
        grad_norm = sent.applied.result().metrics.get("grad_norm")
        now_s = time.monotonic()
        self._landed.append((now_s, sent.tokens))
        self._first_landed = self._first_landed or (now_s, number)
        took_s = now_s - self._landed[0][0]
        tokens = sum(count for _, count in list(self._landed)[1:])
        return Step(
            step=number,
            steps=self.steps,
            epoch=self.recipe.epoch(sent.number, len(self._data)),
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=sent.rate,
            tokens=sent.tokens,
            tokens_per_s=tokens / max(took_s, 1e-6),
            left_s=self._left_s(now_s, number),
        )

    def _left_s(self, now_s: float, number: int) -> float | None:
        """Estimate the time for the steps that are left, from all but the first, which compiles."""
        if self._first_landed is None or number == self._first_landed[1]:
            return None
        began_s, first = self._first_landed
        return (now_s - began_s) / (number - first) * (self.steps - number)
