"""The tables of results.md, to which the benchmarks append their figures."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.md")


def commit_name() -> str:
    """Return the day and the commit of a table."""
    git = ["git", "describe", "--always", "--dirty"]
    shown = subprocess.run(git, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {shown.stdout.strip()}"


def machine(*libraries: str, threads: int) -> str:
    """Return the machine and the library versions behind a table's figures."""
    named = ", ".join(f"{name} {version(name)}" for name in libraries)
    return f"{threads} threads on {os.cpu_count()} cores ({_processor()}), {named}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(title: str, about: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a section of results.md. Numbers below 100 have two decimals, larger ones none."""
    lines = [f"## {title}, {commit_name()}", "", about, ""]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_shown, row))} |" for row in rows]
    return "\n".join([*lines, "", ""])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def publish(figures: dict[str, Any], tables: str, *, dry_run: bool) -> None:
    """Print the figures as JSON, then the tables, and store the tables unless ``dry_run``."""
    print(json.dumps(figures))
    append(tables, dry_run=dry_run)


def append(table: str, *, dry_run: bool) -> None:
    """Print the table, and store it unless ``dry_run``."""
    print(table)
    if not dry_run:
        RESULTS.write_text(RESULTS.read_text() + table)
