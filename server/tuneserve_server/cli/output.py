"""The output of commands, as text or as JSON, and their exit."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from tuneserve_engine.core.errors import REFUSED

if TYPE_CHECKING:
    from tuneserve_engine.settings.common import CommonSettings


FAILED = 1
INTERRUPTED = 130
"""A shell's status of a command that Ctrl-C ended."""
"""The exit status of a command that was called correctly but failed."""

_BARS = "▁▂▃▄▅▆▇█"


def application(**given: Any) -> typer.Typer:
    """Return a group of commands whose help is plain text."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **given)


def this_command() -> str:
    """Return the command that calls this program in the same shell: the name or a path."""
    called, found = Path(sys.argv[0]), shutil.which("tuneserve")
    if called.name != "tuneserve" or (found and called.samefile(found)):
        return "tuneserve"
    return sys.argv[0]


def settings_here(data_dir: Path | None = None, **given: Any) -> "CommonSettings":
    """Return the settings of this machine, from the environment and the settings file.

    Settings in ``given`` replace these. Ends the command if the settings are wrong.
    """
    from pydantic import ValidationError  # commands that need no settings start without these

    from tuneserve_engine.settings.common import SETTINGS_FILE, CommonSettings

    given |= {} if data_dir is None else {"data_dir": data_dir}
    try:
        return CommonSettings(**given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        end("; ".join(problems), REFUSED)
    except (OSError, ValueError) as error:
        end(f"{SETTINGS_FILE} cannot be read: {error}; correct it or remove it", REFUSED)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    """Print one of several values on its own line, and flush it."""
    print(json.dumps(value), flush=True)


def print_table(head: list[str], rows: list[list[str]], *, empty: str = "") -> None:
    """Print the rows under a head. Without rows, say ``empty`` on standard error instead."""
    if not rows and empty:
        typer.echo(empty, err=True)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def print_facts(facts: Mapping[str, str | Sequence[str]]) -> None:
    """Print the facts, each after its name; the lines of a list under each other."""
    width = max(map(len, facts))
    for name, found in facts.items():
        for number, text in enumerate([found] if isinstance(found, str) else found):
            typer.echo(f"{'' if number else name:<{width}}  {text}")


def day(unix_s: float | None) -> str:
    return "-" if unix_s is None else minute(datetime.fromtimestamp(unix_s, UTC))


def minute(time: datetime | None) -> str:
    """Return the time in UTC, to the minute."""
    return "-" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M}"


def duration(seconds: float | None) -> str:
    """Return a time in readable units: 12 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def size(count: float | None) -> str:
    """Return a number of bytes in a readable unit."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the curve in up to ``width`` characters; more values are averaged."""
    count = min(len(values), width)
    edges = [len(values) * each // count for each in range(count + 1)] if count else [0]
    means = [sum(values[first:end]) / (end - first) for first, end in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((each - low) / step)] for each in means)


def end(text: str, status: int, *, keep_lines: bool = False) -> NoReturn:
    """End the command with a reason of one line, or of those that the text has."""
    lines = text.splitlines() if keep_lines else [text]
    print("tuneserve:", "\n".join(" ".join(line.split()) for line in lines), file=sys.stderr)
    raise typer.Exit(status)
