"""Reports of a run: a real TensorBoard file, and the calls that the other packages get.

The calls were tried with wandb 0.31, trackio 0.43 and mlflow 3.17.
"""

import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tensorboardX.proto import event_pb2
from typer.testing import CliRunner

from tuneserve_server.cli import main as cli
from tuneserve_server.cli.reporting import ReportedView, Reports
from tuneserve_server.cli.train_options import Tracker
from tuneserve_server.cli.train_view import Evaluated, Lines, Step

CONFIG = {"learning_rate": 0.5, "data": "rows.jsonl"}
STEP = Step(3, 8, 1, 1.5, 0.25, 0.5, 40, 20.0)
FIGURES = {
    "train/loss": 1.5,
    "train/grad_norm": 0.25,
    "train/learning_rate": 0.5,
    "train/epoch": 1,
    "train/tokens_per_s": 20.0,
}


def play(reports: Reports) -> None:
    """Report an evaluation and a step."""
    view = ReportedView(Lines(as_json=False), reports)
    with reports, view:
        view.show_evaluation(Evaluated(2, 8, 1.75, True))
        view.show(STEP)


def scalars(file: Path) -> dict[str, tuple[int, float]]:
    """Read an event file: records of a length, its checksum, an event and its checksum."""
    data, found, at = file.read_bytes(), {}, 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size
        for value in event.summary.value:
            found[value.tag] = event.step, value.simple_value
    return found


def test_tensorboard_gets_the_figures_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(Reports.begin([Tracker.TENSORBOARD], "train ../rows.jsonl", CONFIG))
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("train-..-rows.jsonl-2")  # and the rest of the time
    (file,) = folder.iterdir()
    found = scalars(file)
    assert found.pop("config/text_summary") == (0, 0.0)
    assert found == {"eval/loss": (2, 1.75), **{name: (3, of) for name, of in FIGURES.items()}}


class Calls:
    """A package, or a run of it, that remembers the calls."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.made.append((name, *args, options))
            return self

        return call


@pytest.mark.parametrize(
    ("tracker", "calls"),
    [
        (
            Tracker.TRACKIO,
            [
                ("init", "tuneserve", {"name": "mine", "config": CONFIG}),
                ("log", {"eval/loss": 1.75}, {"step": 2}),
                ("log", FIGURES, {"step": 3}),
                ("finish", {}),
            ],
        ),
        (
            Tracker.WANDB,
            [
                ("init", {"project": "tuneserve", "name": "mine", "config": CONFIG}),
                ("log", {"eval/loss": 1.75}, {"step": 2}),
                ("log", FIGURES, {"step": 3}),
                ("finish", {"exit_code": 0}),
            ],
        ),
        (
            Tracker.MLFLOW,
            [
                ("set_experiment", "tuneserve", {}),
                ("start_run", {"run_name": "mine"}),
                ("log_params", CONFIG, {}),
                ("log_metrics", {"eval/loss": 1.75}, {"step": 2}),
                ("log_metrics", FIGURES, {"step": 3}),
                ("end_run", "FINISHED", {}),
            ],
        ),
    ],
)
def test_each_package_gets_the_run_its_figures_and_its_end(
    tracker: Tracker, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = Calls()
    monkeypatch.setitem(sys.modules, tracker.package, package)
    play(Reports.begin([tracker], "mine", CONFIG))
    assert package.made == calls


@pytest.mark.parametrize(
    ("tracker", "error", "last"),
    [
        (Tracker.WANDB, KeyboardInterrupt(), ("finish", {"exit_code": 1})),
        (Tracker.MLFLOW, KeyboardInterrupt(), ("end_run", "KILLED", {})),
        (Tracker.MLFLOW, typer.Exit(130), ("end_run", "KILLED", {})),
        (Tracker.MLFLOW, typer.Exit(1), ("end_run", "FAILED", {})),
    ],
)
def test_a_run_that_does_not_finish_is_no_success_there(
    tracker: Tracker,
    error: BaseException,
    last: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package: Any = Calls()
    monkeypatch.setitem(sys.modules, tracker.package, package)
    with pytest.raises(type(error)), Reports.begin([tracker], "mine", CONFIG):
        raise error
    assert package.made[-1] == last


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_tracker_that_fails_is_left_out_and_training_goes_on(
    fails: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\nnetwork")

    run = SimpleNamespace(log=refuse)
    package = SimpleNamespace(init=refuse if fails == "init" else lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    other: Any = Calls()
    monkeypatch.setitem(sys.modules, "mlflow", other)
    play(Reports.begin([Tracker.WANDB, Tracker.MLFLOW], "mine", CONFIG))
    said = capsys.readouterr()
    assert said.err.count("wandb takes no more reports: no network; training goes on") == 1
    assert "step 3/8" in said.out
    assert other.made[-1] == ("end_run", "FINISHED", {})


def test_a_missing_package_is_named_before_anything_is_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    options = ["train", str(rows), "--report-to", "wandb"]
    ran = CliRunner().invoke(cli.app, options)
    assert ran.exit_code == 2
    assert "--report-to wandb needs the package wandb" in ran.stderr
    assert "pip install '.[wandb]'" in ran.stderr
