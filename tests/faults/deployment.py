"""A deployment of real processes whose store is lost, wiped or copied while its files stay."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from tests.faults.killed_worker import Life
from tests.server.conftest import create_model
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.ownership import DISPUTE, LEASE_S, OWNER
from tuneserve_server.cli.local_server import free_port

IMPATIENT = str(Path(__file__).with_name("impatient.py"))
SWEEP_S = 0.2
SWEPT_S = 1.5
"""Seconds after a start or another event: enough for the clean-up to do its worst."""
_START_S = 60.0


class Deployment:
    """An API process that cleans up at once, a worker, and a client of both."""

    def __init__(self, data_dir: Path, **settings: object) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.settings = CommonSettings(data_dir=data_dir, **settings)  # type: ignore[arg-type]
        self.log = data_dir.with_name(f"{data_dir.name}.log")
        self._given = {
            "data_dir": data_dir,
            "port": self.url.rpartition(":")[2],
            "base_model_name": FAKE_INFO.name,
            "sweep_s": SWEEP_S,
            **settings,
        }
        self._api: subprocess.Popen[bytes] | None = None
        self._worker: BaseProcess | None = None
        self._session = ""
        self._seqs = 0
        self.paths: list[str] = []  # paths of its checkpoints

    # --- processes ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes, and return when the API answers."""
        self._api = self._run("api")
        deadline_s = time.monotonic() + _START_S
        while self.health()[0] != 200:
            assert self._api.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.02)

    def start_worker(self) -> None:
        log = self.log.with_suffix(".worker.log")
        self._worker = Life(self.settings, "worker", log=log).start()

    def is_worker_alive(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def refusal(self) -> str:
        """The message of a start that must be refused."""
        before = len(self.log.read_text()) if self.log.exists() else 0
        starting = self._run("api")
        try:
            assert starting.wait(_START_S) == 2, self.log.read_text()
        finally:
            starting.kill()
        return self.log.read_text()[before:]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run an operator's command, which may fail."""
        return subprocess.run(
            [sys.executable, IMPATIENT, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_START_S,
        )

    def _run(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, IMPATIENT, *arguments],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    @property
    def _environment(self) -> dict[str, str]:
        given = {f"TUNESERVE_{name.upper()}": str(value) for name, value in self._given.items()}
        return {**os.environ, **given}

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.join()
            self._worker = None
        if self._api is not None:
            self._api.terminate()
            self._api.wait()
            self._api = None

    # --- a client -------------------------------------------------------------------------------

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of the health check, or 0 while the API does not answer."""
        try:
            answer = httpx.get(f"{self.url}/api/v1/healthz", timeout=10, trust_env=False)
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def post(self, route: str, body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/api/v1/{route}",
            json=body,
            headers={"X-API-Key": "tml-a"},
            timeout=60,
            trust_env=False,
        )

    def _done(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        accepted = self.post(route, body)
        assert accepted.status_code == 200, accepted.text
        poll = {"request_id": accepted.json()["request_id"]}
        while (answer := self.post("retrieve_future", poll)).status_code == 408:
            pass
        result: dict[str, Any] = answer.json()
        assert answer.status_code == 200 and "error" not in result, answer.text
        return result

    def create(self) -> None:
        self._session = self.post("create_session", {}).json()["session_id"]
        self._done("create_model", create_model(self._session))

    def save(self, count: int) -> None:
        """Save ``count`` more checkpoints of the model."""
        for _ in range(count):
            self._seqs += 1
            name = f"c{self._seqs}"
            model = {"model_id": f"{self._session}:train:0", "seq_id": self._seqs}
            saved = self._done("save_weights", {**model, "path": name})
            self.paths.append(saved["path"])

    def load_all(self) -> None:
        """Load every checkpoint in turn. Fails if a file is not whole."""
        for path in self.paths:
            self._seqs += 1
            model = {"model_id": f"{self._session}:train:0", "seq_id": self._seqs}
            self._done("load_weights", {**model, "path": path, "optimizer": True})

    def delete(self, path: str) -> None:
        """Delete one of its checkpoints."""
        run, _, rest = path.removeprefix("tinker://").partition("/")
        answer = httpx.delete(
            f"{self.url}/api/v1/training_runs/{run}/checkpoints/{rest}",
            headers={"X-API-Key": "tml-a"},
            timeout=60,
            trust_env=False,
        )
        assert answer.is_success, answer.text
        self.paths.remove(path)

    def stopped_copy(self, data_dir: Path) -> "Deployment":
        """Another deployment with a copy of the store on the same files directory.

        This deployment has been stopped. The client of both continues from the same point.
        """
        copy = Deployment(data_dir, files_dir=self.settings.files_dir)
        data_dir.mkdir()
        shutil.copy(self.settings.store_file, copy.settings.store_file)
        copy._session, copy._seqs, copy.paths = self._session, self._seqs, list(self.paths)
        return copy

    # --- files ----------------------------------------------------------------------------------

    def age_files(self) -> None:
        """Make every file an hour older: old enough for the clean-up."""
        for path in self.settings.files_dir.iterdir():
            if not path.name.startswith("."):
                then_s = path.stat().st_mtime - 3600
                os.utime(path, (then_s, then_s))

    def silence(self) -> None:
        """Make all stores look as if their last sign of life was two minutes ago."""
        for prefix in (OWNER, DISPUTE):
            for path in self.settings.files_dir.glob(f"{prefix}*"):
                then_s = path.stat().st_mtime - LEASE_S
                os.utime(path, (then_s, then_s))

    def files(self) -> dict[str, bytes]:
        """The contents of the directory, without marks and quarantine."""
        return {
            f"{path.parent.name}/{path.name}": path.read_bytes()
            for path in sorted(self.settings.files_dir.glob("[0-9a-f]*/*"))
            if len(path.parent.name) == 32
        }


@contextmanager
def deployed(data_dir: Path, **settings: object) -> Iterator[Deployment]:
    """A deployment with a model and six checkpoints, an hour old."""
    deployment = Deployment(data_dir, **settings)
    try:
        deployment.start()
        deployment.start_worker()
        deployment.create()
        deployment.save(6)
        deployment.age_files()
        yield deployment
    finally:
        deployment.stop()
