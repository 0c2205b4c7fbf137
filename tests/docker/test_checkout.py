"""The files for editors and commits run the commands and the Python that the project uses."""

import json
import re
import tomllib

import yaml

from tests.containers import ROOT
from tuneserve_server.settings import ApiSettings

MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_hooks_of_a_commit_are_commands_of_make_lint() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"  # the pinned tools of .venv, and no others
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert lint is not None
    commands = {
        line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" $(PATHS)")
        for line in lint[1].splitlines()
    }
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert len(entries) == 3 and set(entries) <= commands


def test_the_development_container_has_the_oldest_python_and_the_port_of_the_api() -> None:
    found = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f"/python:{oldest}-" in found["image"]
    assert found["forwardPorts"] == [ApiSettings.model_fields["port"].default]
    program, target = found["postCreateCommand"].split()
    assert program == "make" and re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
