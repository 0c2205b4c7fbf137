"""The results as a table, as numbers and as a chart."""

import json
from pathlib import Path

import chart
from contenders import CONTENDERS, QUICK
from lessons import KNOWN, TASKS

PHASES = ["at first", *(f"after {task}" for task in TASKS)]
_SETS = [*TASKS, KNOWN]
Losses = dict[str, float]


def table(results: dict[str, list[Losses]]) -> str:
    """In Markdown: nats per token."""
    head = ["adapter", "numbers trained", "", *_SETS]
    lines = [head, ["---", "--:", "---", *("--:" for _ in _SETS)]]
    numbers = {each.name: f"{each.parameters:,}" for each in [*CONTENDERS, *QUICK]}
    for name, found in results.items():
        for n, (phase, losses) in enumerate(zip(PHASES, found, strict=True)):
            of_it = [name, numbers[name]] if n == 0 else ["", ""]
            lines.append([*of_it, phase, *(f"{losses[each]:.2f}" for each in _SETS)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(folder: Path, results: dict[str, list[Losses]]) -> None:
    """The numbers, the table and the chart."""
    panels = {
        name: {each: [losses[name] for losses in of_it] for each, of_it in results.items()}
        for name in _SETS
    }
    learnt = {task: n for n, task in enumerate(TASKS, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text(table(results))
    (folder / "results.svg").write_text(chart.svg(panels, PHASES, learnt))
