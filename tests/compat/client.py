"""Runs programs as a user of the service would."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tuneserve_server.cli.local_server import LocalServer

API_KEY = "tml-local"
CLIENT_LIMIT_S = 600


@dataclass(frozen=True)
class Client:
    """Runs programs that know nothing of this project, from the prepared folder."""

    server: LocalServer
    folder: Path

    def run(self, python: Path, *arguments: str, stdin: str = "") -> str:
        """The program's output. If the program fails, the error shows the end of its output."""
        done = subprocess.run(
            [str(python), *arguments],
            cwd=self.folder,
            env=self._environment(),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CLIENT_LIMIT_S,
            check=False,
        )
        if done.returncode:
            pytest.fail(
                f"{' '.join(arguments)} ended with status {done.returncode}:\n"
                f"{done.stdout[-6000:]}\nthe server's log ends:\n{self._log_tail()}"
            )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        """The search path only: no credentials, no cache and no network of the caller."""
        home = self.folder / "home"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "HF_HOME": str(home / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": API_KEY,
            "TINKER_BASE_URL": self.server.url,
        }

    def _log_tail(self) -> str:
        return self.server.log.read_text(errors="replace")[-4000:]
