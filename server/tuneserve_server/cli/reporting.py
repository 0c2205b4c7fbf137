"""Reports of a training run to Trackio, Weights & Biases, TensorBoard or MLflow.

Each has a sink, which calls the tracker's own package: figures at a step, and an end.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import typer

from tuneserve_server.cli.output import INTERRUPTED
from tuneserve_server.cli.train_options import Tracker
from tuneserve_server.cli.train_view import Evaluated, Step, View

PROJECT = "tuneserve"


class Sink(Protocol):
    """A tracker of one run."""

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None: ...

    def end_run(self, error: BaseException | None) -> None: ...


class _Trackio:
    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._run = import_module("trackio").init(PROJECT, name=name, config=dict(config))

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def end_run(self, error: BaseException | None) -> None:
        self._run.finish()


class _Wandb:
    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(project=PROJECT, name=name, config=dict(config))

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def end_run(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class _TensorBoard:
    """Event files in ``runs/NAME-TIME``, where ``tensorboard --logdir runs`` finds them."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
        folder = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._writer = import_module("tensorboardX").SummaryWriter(str(folder))
        table = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        self._writer.add_text("config", f"| | |\n|---|---|\n{table}")

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def end_run(self, error: BaseException | None) -> None:
        self._writer.close()


class _MLflow:
    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(config))

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def end_run(self, error: BaseException | None) -> None:
        failed = "KILLED" if _is_interrupted(error) else "FAILED"
        self._mlflow.end_run("FINISHED" if error is None else failed)


def _is_interrupted(error: BaseException | None) -> bool:
    return isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", None) == INTERRUPTED


_SINKS: dict[Tracker, Callable[[str, Mapping[str, Any]], Sink]] = {
    Tracker.TRACKIO: _Trackio,
    Tracker.WANDB: _Wandb,
    Tracker.TENSORBOARD: _TensorBoard,
    Tracker.MLFLOW: _MLflow,
}


class Reports:
    """The sinks of a run. One that fails is named and left out; training goes on."""

    def __init__(self, sinks: Mapping[Tracker, Sink]) -> None:
        self._sinks = dict(sinks)

    @classmethod
    def begin(cls, wanted: Sequence[Tracker], name: str, config: Mapping[str, Any]) -> Self:
        """Begin a run at each of the trackers."""
        reports = cls({})
        for tracker in wanted:
            try:
                reports._sinks[tracker] = _SINKS[tracker](name, config)
            except Exception as error:  # any, because the tracker's package raises it
                _say_lost(tracker, error)
        return reports

    def log_figures(self, step: int, figures: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in figures.items() if value is not None}
        self._each(lambda sink: sink.log_figures(step, known))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the run at each of the trackers."""
        self._each(lambda sink: sink.end_run(error))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for tracker, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                _say_lost(tracker, error)
                del self._sinks[tracker]


class ReportedView:
    """A view that also reports what it shows."""

    def __init__(self, view: View, reports: Reports) -> None:
        self._view = view
        self._reports = reports

    def __enter__(self) -> Self:
        self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._view.__exit__(kind, error, trace)

    def show(self, step: Step) -> None:
        self._view.show(step)
        figures = {
            "train/loss": step.loss,
            "train/grad_norm": step.grad_norm,
            "train/learning_rate": step.learning_rate,
            "train/epoch": step.epoch,
            "train/tokens_per_s": step.tokens_per_s,
        }
        self._reports.log_figures(step.step, figures)

    def show_evaluation(self, evaluated: Evaluated) -> None:
        self._view.show_evaluation(evaluated)
        self._reports.log_figures(evaluated.step, {"eval/loss": evaluated.held_out_loss})


def _say_lost(tracker: Tracker, error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    typer.echo(f"{tracker} takes no more reports: {reason}; training goes on", err=True)
