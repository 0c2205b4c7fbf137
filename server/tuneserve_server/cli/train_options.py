"""The options of ``tuneserve train``."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.options import HERE
from tuneserve_server.cli.output import end

SAVED_AS = "final"


class Tracker(StrEnum):
    """A place, besides the server, that gets the curves of a run."""

    TRACKIO = "trackio"
    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"

    @property
    def package(self) -> str:
        return "tensorboardX" if self is Tracker.TENSORBOARD else self.value


@dataclass(frozen=True)
class TrainOptions:
    """The options of a training run, as they were given."""

    data: str
    name: str
    is_named: bool
    """Whether the user gave the name, rather than the file."""
    base_model: str | None
    adapter: dict[str, Any]
    """The fields of an adapter that were given; empty for the default."""
    train_unembed: bool
    resume: str | None
    recipe: dict[str, Any]
    """The fields of the recipe; None for those of the resumed run, or the defaults."""
    save: str
    export: Path | None
    force: bool
    """Whether the export may replace files."""
    columns: str | None
    skip_bad: bool
    report_to: Sequence[Tracker]
    dry_run: bool
    url: str
    api_key: str | None
    as_json: bool
    config: str | None = None
    """The configuration of a dataset; None if it has only one."""
    split: str | None = None
    """The split of a dataset to train on; None for ``train``."""

    @property
    def part(self) -> list[str]:
        """The options with which another command reads the same part of a dataset."""
        given = {"--config": self.config, "--split": self.split}
        return [each for name, value in given.items() if value for each in (name, value)]

    @property
    def server(self) -> list[str]:
        """The options with which another command reaches the same server, without the key."""
        return [] if self.url == HERE else ["--url", self.url]

    @property
    def renamed(self) -> dict[str, str]:
        """The column for each expected name, from ``name=column,name=column``."""
        pairs = [pair.partition("=") for pair in (self.columns or "").split(",") if self.columns]
        if not all(name and column for name, _, column in pairs):
            shape = "prompt=question,completion=answer"
            end(f"--map is {self.columns!r}; it must be like {shape}", REFUSED)
        return {name.strip(): column.strip() for name, _, column in pairs}


def check_trackers(wanted: Sequence[Tracker]) -> None:
    """End the command if the package of a tracker is not installed."""
    for name in wanted:
        if find_spec(name.package) is None:
            end(
                f"--report-to {name} needs the package {name.package}, which is not installed: "
                f"pip install '.[{name}]' in a clone",
                REFUSED,
            )
