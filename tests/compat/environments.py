"""Temporary virtual environments under ``.compat/``, one for each list of requirements."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPAT = ROOT / ".compat"
OLD_SDKS = ("0.25.0", "0.30.4", "0.36.0")
TORCH = "torch==2.13.0"
INSTALL_LIMIT_S = 1800


def environment(name: str, *, torch: bool = False) -> Path:
    """The interpreter of a complete environment made from ``requirements-<name>.txt``.

    A complete environment made from the same requirements is reused.
    """
    folder = COMPAT / name
    python = folder / "bin" / "python"
    stamp = folder / "complete.txt"
    wanted = _fingerprint(name, torch=torch)
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    COMPAT.mkdir(exist_ok=True)
    _run(sys.executable, "-m", "venv", str(folder))
    if torch:
        # First and alone: a plain install takes a CPU wheel where one is offered, and later
        # installs may not replace it.
        _pip(python, TORCH)
    # The lists name everything, so nothing is resolved. The cookbook asks for a tml-renderers that
    # not every index has, and imports it for models of other families only.
    _pip(python, "--no-deps", "-r", str(_requirements(name)))
    stamp.write_text(wanted)  # last, so that an interrupted install is started again
    return python


def _requirements(name: str) -> Path:
    return HERE / f"requirements-{name}.txt"


def _fingerprint(name: str, *, torch: bool) -> str:
    """A hash of the interpreter and of every line from which the environment is made."""
    text = sys.version + (TORCH if torch else "")
    for file in (HERE / "requirements-sdk.txt", _requirements(name)):
        text += file.read_text()
    return hashlib.sha256(text.encode()).hexdigest()


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "install", "--quiet", *arguments)


def _run(*command: str) -> None:
    """Run a command. If it fails, the error contains its output."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
