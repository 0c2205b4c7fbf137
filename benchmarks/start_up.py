"""Measure the start of commands that need no server, and the size of an install of the client.

The start is CPU time, the least of several runs: help and errors of arguments must not wait for
imports. The size on disk is that of the base install's packages, without compiled bytecode.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the closure is in the tests

from results import publish, table

from tests.client.test_packaging import ROOT, closure

COMMANDS = (
    ["--version"],
    ["--help"],
    ["up", "--help"],
    ["up", "--prot", "1"],
    ["train", "--help"],
    ["train", "missing.jsonl"],
    ["chat", "--help"],
    ["keys", "--help"],
)


def cpu_s(arguments: list[str]) -> float:
    """Return the CPU time of one run of ``tuneserve`` with the arguments, in seconds."""
    before = os.times()
    command = [sys.executable, "-m", "tuneserve_server", *arguments]
    subprocess.run(command, capture_output=True)
    after = os.times()
    spent = after.children_user - before.children_user
    return spent + after.children_system - before.children_system


def installed_bytes(package: str) -> int:
    """Return the size of a package's files as they were installed."""
    return sum(file.size or 0 for file in importlib.metadata.files(package) or ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="Do not store the tables.")
    asked = parser.parse_args()
    starts = {" ".join(each): min(cpu_s(each) for _ in range(asked.runs)) for each in COMMANDS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sizes = {name: installed_bytes(name) / 1e6 for name in closure(project["dependencies"])}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    about = f"`benchmarks/start_up.py`: CPU time, the least of {asked.runs} runs."
    rows = [[f"tuneserve {name}", seconds] for name, seconds in starts.items()]
    tables = table("Start of commands", about, ["command", "CPU time, s"], rows)
    about = "`benchmarks/start_up.py`: the base install on disk, without compiled bytecode."
    rows = [[name, sizes[name]] for name in largest]
    rows += [["others", sum(sizes.values()) - sum(sizes[name] for name in largest)]]
    rows += [["all", sum(sizes.values())]]
    tables += table("Size of the client's install", about, ["package", "MB"], rows)
    publish({"start_cpu_s": starts, "installed_mb": sizes}, tables, dry_run=asked.dry_run)


if __name__ == "__main__":
    main()
