"""Where the benchmarks write what they measured."""

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
    """The day and the commit that a table belongs to."""
    git = ["git", "describe", "--always", "--dirty"]
    shown = subprocess.run(git, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {shown.stdout.strip()}"


def machine(*libraries: str, threads: int) -> str:
    """What a table's figures belong to, beside the commit."""
    named = ", ".join(f"{name} {version(name)}" for name in libraries)
    return f"{threads} threads on {os.cpu_count()} cores ({_processor()}), {named}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(title: str, about: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A section of results.md. Fractions are shown with two digits, larger numbers with none."""
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
    """Prints the figures as JSON; then the tables, which it keeps unless this is a dry run."""
    print(json.dumps(figures))
    append(tables, dry_run=dry_run)


def append(table: str, *, dry_run: bool) -> None:
    """Prints the table, and keeps it unless this is a dry run."""
    print(table)
    if not dry_run:
        RESULTS.write_text(RESULTS.read_text() + table)
