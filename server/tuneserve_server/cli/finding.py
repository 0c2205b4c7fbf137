"""Results of checks, and the separate processes that checks run in."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "WARN", "FAIL"]
Environment = dict[str, str]
Ran = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Finding:
    """The result of one check; its text names the remedy if one is needed."""

    name: str
    level: Level
    text: str


def run_python(arguments: list[str], environment: Environment, limit_s: float) -> Ran:
    """Run Python with these arguments. Raises ``subprocess.TimeoutExpired``."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
    )


def last_line(ran: Ran) -> str:
    """Return the last line of the error that the process printed."""
    return (ran.stderr.strip().splitlines() or ["it printed no error"])[-1]
