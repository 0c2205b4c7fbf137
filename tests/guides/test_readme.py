"""The three commands of README.md, in the tests' environment and against a running service."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.newcomer import readme

ROOT = Path(__file__).parents[2]
TUNESERVE = ".venv/bin/tuneserve"
OLD = """#!/bin/sh
exec python3 -c "import sys; sys.version_info = (3, 9, 1); exec(sys.argv[1])" "$2"
"""


def test_the_three_commands_train_export_and_chat(
    environment: dict[str, str], tmp_path: Path
) -> None:
    def run(command: list[str]) -> str:
        assert command[0] == TUNESERVE
        here = [str(Path(sys.executable).with_name("tuneserve")), *command[1:]]
        ran = subprocess.run(here, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    (tmp_path / "my-rows.jsonl").write_text(readme.rows())
    start, train, chat = readme.commands()
    assert start == ["make", "run"]
    said = run(train)
    path = readme.trained_path(said)
    assert f"talk to it with: tuneserve chat {path}" in said
    assert run([path if word == readme.PATH else word for word in chat]) == "Arr, green!\n"
    assert readme.answer_in_peft(tmp_path / "my-adapter") == "Arr, green!"


def test_an_old_python_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(OLD)
    (tmp_path / "old").chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    made = subprocess.run(
        ["make", "run", "PYTHON=./old"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode != 0
    assert made.stderr.startswith("./old is 3.9, and 3.11 or newer is needed")
    assert "make run PYTHON=python3.11" in made.stderr
    assert not (tmp_path / ".venv").exists()
