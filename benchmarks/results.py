"""Where the benchmarks write what they measured."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).with_name("results.md")


def commit_name() -> str:
    """The day and the commit that a table belongs to."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}"


def append(table: str, *, dry_run: bool) -> None:
    """Prints the table, and keeps it unless this is a dry run."""
    print(table)
    if not dry_run:
        RESULTS.write_text(RESULTS.read_text() + table)
