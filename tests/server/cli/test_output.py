"""The names of commands, curves and sizes in the output of commands."""

import sys
from pathlib import Path

import pytest
import typer

from tuneserve_server.cli.output import duration, end, size, sparkline, this_command


@pytest.mark.parametrize("name", ["tuneserve", "pytest"])
def test_a_command_is_named_as_it_was_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / name
    command.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(command), "train"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert this_command() == (str(command) if name == "tuneserve" else "tuneserve")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_command() == "tuneserve"


def test_a_sparkline_shows_means_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 8, 8, 1, 1], 3) == "▁█▁"
    assert sparkline([5, 5], 4) == "▁▁"
    assert sparkline([], 4) == ""


def test_sizes_are_shown_in_units_of_1024() -> None:
    assert [size(each) for each in (None, 5, 2048, 3 * 2**20, 5 * 2**29)] == [
        "-",
        "5 B",
        "2 KiB",
        "3 MiB",
        "2.5 GiB",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(None, "-"), (0.0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185.0, "3 min 05 s")],
        *[(7620.0, "2 h 07 min"), (86_400.0, "1 d 00 h"), (273_600.0, "3 d 04 h")],
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("keep_lines", "said"),
    [(False, "tuneserve: one two three\n"), (True, "tuneserve: one two\nthree\n")],
)
def test_a_command_ends_with_one_line_unless_the_reason_needs_more(
    capsys: pytest.CaptureFixture[str], keep_lines: bool, said: str
) -> None:
    with pytest.raises(typer.Exit) as ended:
        end("one  two\nthree\n", 7, keep_lines=keep_lines)
    assert ended.value.exit_code == 7
    assert capsys.readouterr().err == said
