"""The service as separate processes: one API, and a worker that needs no model."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.cli.test_supervisor import free_port

WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"
SEES_TESTS = {"PYTHONPATH": str(Path(__file__).parents[2])}
"""Workers without a model import from the tests."""
BASE_MODEL = "tuneserve/fake"


def memory_bytes(pid: int) -> int:
    """The main memory that the process holds now."""
    return _of_status(pid, "VmRSS:")


def peak_bytes(pid: int) -> int:
    """The maximum memory that the process has held, since its start or ``forget_peak``."""
    return _of_status(pid, "VmHWM:")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _of_status(pid: int, field: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(field)[2].split()[0]) * 1024


class Service:
    """The running service: the API's ``port`` on 127.0.0.1, and the ``log`` of its processes."""

    def __init__(self, data_dir: Path, settings: dict[str, object]) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.log = data_dir / "log"
        self._settings = settings
        self._processes: list[subprocess.Popen[bytes]] = []

    def start_api(self) -> None:
        own = {"data_dir": self.data_dir, "port": self.port, "base_model_name": BASE_MODEL}
        variables = {**own, **self._settings}
        environment = {f"TUNESERVE_{name.upper()}": str(value) for name, value in variables.items()}
        self._start([sys.executable, "-m", "tuneserve_server", "api"], environment)
        self._until({"absent", "ready"})

    def restart_api(self) -> None:
        """Kill the API process. Its successor listens on the same port."""
        self._processes[0].kill()
        self._processes.pop(0).wait()
        self.start_api()
        self._processes.insert(0, self._processes.pop())

    def change(self, **settings: object) -> None:
        """Change settings for the next start of the API."""
        self._settings |= settings

    def stop_last(self) -> None:
        """Stop the process that was started last, as an operator does."""
        process = self._processes.pop()
        process.terminate()
        process.wait(timeout=30)

    def start_worker(self, script: Path = WORKER) -> None:
        self._start([sys.executable, str(script), str(self.data_dir)], {})
        self._until({"ready"})

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **SEES_TESTS, **environment}, stdout=log, stderr=log
            )
        self._processes.append(process)

    def _until(self, states: set[str]) -> None:
        deadline_s = time.monotonic() + 30
        while self.health() not in states:
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.05)

    def health(self) -> str:
        """``ready``, ``absent``, or ``unreachable``."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url = f"http://127.0.0.1:{self.port}/api/v1/healthz"
        try:
            with opener.open(url, timeout=5) as answer:
                worker: str = json.load(answer)["worker"]
        except OSError:
            worker = "unreachable"
        return worker

    def api_memory_bytes(self) -> int:
        return memory_bytes(self._processes[0].pid)

    def api_peak_bytes(self) -> int:
        """The maximum since ``forget_api_peak``."""
        return peak_bytes(self._processes[0].pid)

    def forget_api_peak(self) -> None:
        forget_peak(self._processes[0].pid)

    def stop(self) -> None:
        """Stop all processes like an operator, the last first. None may have ended in a
        traceback.
        """
        for process in reversed(self._processes):
            process.terminate()
            process.wait(timeout=30)
        text = self.log.read_text(errors="replace")
        assert "Traceback" not in text and " ERROR " not in text, text[-4000:]


@contextmanager
def running_service(
    data_dir: Path, *, worker: bool = True, **settings: object
) -> Iterator[Service]:
    """Run the service with these settings of its API until the block ends."""
    service = Service(data_dir, settings)
    try:
        service.start_api()
        if worker:
            service.start_worker()
        yield service
    finally:
        service.stop()
