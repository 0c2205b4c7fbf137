"""The client commands, as far as they can be tested without a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tests.server.cli.test_train_rows import file_of
from tuneserve_server.cli import main as cli


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["runs", "--url", "localhost:8410"], "must begin with http"),
        (["checkpoints", "ttl", "tinker://a/weights/b", "soon"], "it must be like 7200, 2h or 30d"),
        (["train", "rows.jsonl", "--resume", "tinker://a/weights/b", "--rank", "4"], "--resume"),
        (["train", "rows.jsonl", "--resume", "tinker://a/weights/b", "--form", "core"], "--resume"),
        (["train", "rows.jsonl", "--export", "."], "is not empty"),
        (["train", "rows.jsonl", "--learning-rate", "-1"], "--learning-rate is -1; it must be 0"),
        (["train", "rows.jsonl", "--learning-rate", "nan"], "--learning-rate is nan"),
    ],
)
def test_a_wrong_argument_is_explained_in_one_line(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, {"prompt": "a", "completion": "b"})
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli.app, arguments)
    assert ran.exit_code == 2
    assert reason in ran.stderr
    assert ran.stderr.startswith("tuneserve: ") and ran.stderr.count("\n") == 1


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli.app, ["train", str(tmp_path / "none.jsonl")])
    assert ran.exit_code == 2
    assert "does not exist" in ran.stderr


def leaves(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command without subcommands."""
    if hasattr(command, "commands"):
        for name in command.commands:
            yield from leaves(command.get_command(typer.Context(command), name), *names, name)
    else:
        yield names, command


def test_every_command_but_those_that_print_a_log_can_print_json() -> None:
    without = {
        names
        for names, command in leaves(typer.main.get_command(cli.app))
        if "--json" not in [option for each in command.params for option in each.opts]
    }
    assert without == {("up",), ("api",), ("worker",)}
