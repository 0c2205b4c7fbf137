"""The service as processes of its own: one API, one worker that needs no model."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.server.test_supervisor import free_port

WORKER = Path(__file__).parents[1] / "server" / "fake_worker.py"
BASE_MODEL = "tuneserve/fake"


@dataclass(frozen=True)
class Service:
    """``port`` of the API on 127.0.0.1, its process, and the log of both processes."""

    port: int
    api_pid: int
    log: Path

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
        """What the API process holds of main memory now."""
        status = Path(f"/proc/{self.api_pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@contextmanager
def running_service(
    data_dir: Path, *, worker: Path = WORKER, **settings: object
) -> Iterator[Service]:
    """The service with these settings of its API, until the block ends; stopped as by an operator.
    Nothing may have ended in a traceback."""
    port, log = free_port(), data_dir / "log"
    variables = {"data_dir": data_dir, "port": port, "base_model_name": BASE_MODEL, **settings}
    environment = {f"TUNESERVE_{name.upper()}": str(value) for name, value in variables.items()}
    commands = [
        [sys.executable, "-m", "tuneserve_server", "api"],
        [sys.executable, str(worker), str(data_dir)],
    ]
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(each, env={**os.environ, **environment}, stdout=output, stderr=output)
            for each in commands
        ]
    service = Service(port, processes[0].pid, log)
    try:
        deadline_s = time.monotonic() + 30
        while service.health() != "ready":
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        yield service
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)
    text = log.read_text(errors="replace")
    assert "Traceback" not in text and " ERROR " not in text, text[-4000:]
