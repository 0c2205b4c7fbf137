"""The names of commands in their output."""

import sys
from pathlib import Path

import pytest

from tuneserve_server.cli.output import this_command


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
