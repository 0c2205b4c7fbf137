"""Runs the cookbook's recipes and reads their results."""

import json
import math
from pathlib import Path
from typing import Any

from .client import Client

SCRIPTS = Path(__file__).parent / "scripts"


class Recipes:
    """Runs recipes in the cookbook's environment, each with a log folder."""

    def __init__(self, client: Client, python: Path) -> None:
        self.client = client
        self.python = python

    def run(self, module: str, log: Path, *arguments: str) -> str:
        return self.module(module, *arguments, f"log_path={log}")

    def module(self, module: str, *arguments: str, stdin: str = "") -> str:
        name = f"tinker_cookbook.recipes.{module}"
        return self.client.run(self.python, "-m", name, *arguments, stdin=stdin)

    def script(self, name: str, *arguments: str) -> Any:
        """The last line that one of our scripts printed, decoded."""
        printed = self.client.run(self.python, str(SCRIPTS / name), *arguments)
        return json.loads(printed.splitlines()[-1])


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def finite_metrics(log: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``. Every number must be finite."""
    rows = records(log / "metrics.jsonl")
    assert rows
    for row in rows:
        bad = {k: v for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        assert not bad, f"step {row.get('step')} of {log} has {bad}"
    return rows


def saved_names(log: Path) -> list[str]:
    """Names of the checkpoints in ``checkpoints.jsonl``. The last one must be complete."""
    saved = records(log / "checkpoints.jsonl")
    assert "/weights/" in saved[-1]["state_path"]
    assert "/sampler_weights/" in saved[-1]["sampler_path"]
    return [record["name"] for record in saved]
