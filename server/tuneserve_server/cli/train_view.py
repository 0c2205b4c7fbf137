"""The display of the steps of ``tuneserve train``: a progress bar and curve, lines, or JSON."""

from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Protocol, Self

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from tuneserve_server.cli.output import print_json_line, sparkline

_CURVE = 60
_PROMPT = 48


@dataclass(frozen=True)
class Step:
    """One optimizer step, once its results have arrived."""

    step: int
    steps: int
    epoch: int
    loss: float
    """The mean loss over the trained tokens, before the step."""
    grad_norm: float | None
    learning_rate: float
    tokens: int
    tokens_per_s: float
    left_s: float | None = None
    """The estimated time until the last step; None before there is an estimate."""

    @property
    def text(self) -> str:
        is_last = self.step == self.steps
        left = "" if self.left_s is None or is_last else f"  {time_text(self.left_s)} left"
        return (
            f"loss {self.loss:.4f}  lr {self.learning_rate:.2e}  "
            f"{self.tokens_per_s:,.0f} tokens/s{left}"
        )


@dataclass(frozen=True)
class Evaluated:
    """One evaluation, after ``step`` steps."""

    step: int
    steps: int
    held_out_loss: float
    """The mean loss over the trained tokens of the held-out rows."""
    is_best: bool
    samples: list[dict[str, str]] = field(default_factory=list)
    """Prompts and their completions."""

    @property
    def lines(self) -> list[str]:
        best = "  (best)" if self.is_best else ""
        said = [
            f"  {_ending(each['prompt'])} → {each['completion'].strip()!r}" for each in self.samples
        ]
        loss = f"held-out loss {self.held_out_loss:.4f}{best}"
        return [f"step {self.step}/{self.steps}  {loss}", *said]


def time_text(estimated_s: float) -> str:
    """Return an estimated time as words."""
    minutes = round(estimated_s / 60)
    if estimated_s < 60:
        return "less than a minute"
    if minutes < 90:
        return f"about {minutes} minute{'' if minutes == 1 else 's'}"
    return f"about {estimated_s / 3600:.1f} hours"


def _ending(text: str) -> str:
    """Return the end of a prompt in quotes, on one line."""
    return repr(text if len(text) <= _PROMPT else f"…{text[-_PROMPT:]}")


class View(Protocol):
    """The place where steps are shown, for as long as a ``with`` block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, step: Step) -> None: ...

    def show_evaluation(self, evaluated: Evaluated) -> None: ...


class Lines:
    """One line for each step, of text or of JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, step: Step) -> None:
        if self._as_json:
            print_json_line(asdict(step))
        else:
            typer.echo(f"step {step.step}/{step.steps}  epoch {step.epoch}  {step.text}")

    def show_evaluation(self, evaluated: Evaluated) -> None:
        if self._as_json:
            print_json_line(asdict(evaluated))
        else:
            typer.echo("\n".join(evaluated.lines))


class Bar:
    """A progress bar with the last step beside it, and the curve of all losses below."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._progress.add_task("waiting", total=steps, completed=done, epoch=1)
        self._losses: list[float] = []
        self._live = Live(self._progress, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, step: Step) -> None:
        self._losses.append(step.loss)
        self._progress.update(
            self._task, completed=step.step, description=step.text, epoch=step.epoch
        )
        curve = Text(
            f"{sparkline(self._losses, _CURVE)}  {self._losses[0]:.3f} → {step.loss:.3f}",
            style="cyan",
        )
        self._live.update(Group(self._progress, curve))

    def show_evaluation(self, evaluated: Evaluated) -> None:
        self._live.console.print(Text("\n".join(evaluated.lines)), soft_wrap=True)


def view_of(console: Console, *, steps: int, done: int, as_json: bool) -> View:
    if as_json or not console.is_terminal:
        return Lines(as_json=as_json)
    return Bar(console, steps, done)
