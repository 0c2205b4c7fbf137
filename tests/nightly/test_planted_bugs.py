"""T14: bugs that tests must notice, planted one at a time into a copy of the code.

Each bug is a small edit of one file. The named tests run on the copy and must fail there: a test
that passes with the bug in place guards nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly.planted_bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
COPIED = ("clients", "server", "engine", "tests", "scripts", "examples", "pyproject.toml")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "compat")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    paths = [str(copy / each) for each in ("engine", "server", "clients")]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not nightly",
            *tests,
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tests", sorted({bug.tests for bug in BUGS}), ids=" ".join)
def test_the_tests_pass_on_a_copy_without_a_bug(copy: Path, tests: tuple[str, ...]) -> None:
    ran = run(copy, tests)
    assert ran.returncode == 0, ran.stdout[-3000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, copy: Path) -> None:
    path = copy / bug.file
    sound = path.read_text()
    path.write_text(sound.replace(bug.was, bug.becomes))
    try:
        ran = run(copy, bug.tests)
    finally:
        path.write_text(sound)
    assert ran.returncode == 1, f"no test noticed {bug.name!r}:\n{ran.stdout[-3000:]}"
