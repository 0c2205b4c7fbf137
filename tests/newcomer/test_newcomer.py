"""``make newcomer``: the README's three commands in a fresh clone, without our environment.

It installs everything from the package index, which takes a minute or two and 1 GB.
``tests/guides/test_readme.py`` always runs the same commands without the installation.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.newcomer import readme
from tuneserve_server.cli.local_server import free_port

_OF_THE_MACHINE = re.compile(r"PIP_\w+|SSL_\w+|REQUESTS_CA_BUNDLE|\w+_proxy", re.I)
"""Variables of this machine that reach a package index: the only ones that a newcomer inherits."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "tuneserve"
    subprocess.run(["git", "clone", "--quiet", str(readme.ROOT), str(folder)], check=True)
    assert not (folder / ".venv").exists()
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    machine = {name: value for name, value in os.environ.items() if _OF_THE_MACHINE.fullmatch(name)}
    port = str(free_port())  # the README's port may be in use here
    return machine | {
        "HOME": str(tmp_path),
        "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin",
        "TUNESERVE_PORT": port,
        "TUNESERVE_URL": f"http://127.0.0.1:{port}",
    }


@pytest.fixture
def service(clone: Path, environment: dict[str, str]) -> Iterator[None]:
    """The first command in a separate terminal, from the time when it says that it is ready."""
    log = clone.parent / "service.log"
    with log.open("wb") as file:
        running = subprocess.Popen(
            readme.commands()[0],
            cwd=clone,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while "tuneserve: ready" not in log.read_text():
            assert running.poll() is None, log.read_text()
            time.sleep(0.5)
        yield
    finally:
        os.killpg(running.pid, signal.SIGINT)  # Ctrl-C in its terminal
        running.wait(timeout=90)


@pytest.mark.timeout(1800)
def test_three_commands_lead_from_a_clone_to_an_adapter_that_peft_loads(
    clone: Path, environment: dict[str, str], service: None
) -> None:
    def run(command: list[str]) -> str:
        ran = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    (clone / "my-rows.jsonl").write_text(readme.rows())
    _, train, chat = readme.commands()
    said = run(train)
    path = readme.trained_path(said)
    assert f"talk to it with: .venv/bin/tuneserve chat {path}" in said
    assert run([path if word == readme.PATH else word for word in chat]) == "Arr, green!\n"
    assert readme.answer_in_peft(clone / "my-adapter") == "Arr, green!"
