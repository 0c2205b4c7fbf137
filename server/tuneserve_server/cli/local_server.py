"""A local service for demos, notebooks, benchmarks and tests."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tuneserve_engine.process.permissions import open_new
from tuneserve_server.cli.readiness import health_of


class LocalServer:
    """``tuneserve up`` on a free loopback port for as long as a ``with`` block lasts.

    ``folder`` holds its data and ``server.log``. Keyword arguments are settings by their names.
    Inside the block ``url`` answers, ``base_model`` is the served name and the worker is ready.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.base_model = ""
        self.log = folder / "server.log"
        self.data_dir = folder / "data"
        self.program = Path(sys.executable).with_name("tuneserve")
        self._environment = {
            **os.environ,
            "TUNESERVE_DATA_DIR": str(self.data_dir),
            "TUNESERVE_PORT": self.url.rsplit(":", 1)[1],
            **{f"TUNESERVE_{name.upper()}": value for name, value in settings.items()},
        }

    def __enter__(self) -> "LocalServer":
        # A proxy in the environment must not catch the SDK's loopback traffic.
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = 180) -> None:
        """Start the processes and wait until the worker is ready.

        Raises ``RuntimeError`` with the end of the log if it does not become ready.
        """
        with open_new(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [str(self.program), "up"],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready(time.monotonic() + timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process id of the supervisor, whose children are the API process and the worker."""
        return self._process.pid

    def stop(self) -> None:
        """Stop the processes and wait for them; processes that do not stop in time are killed."""
        self._process.terminate()
        try:
            self._process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()

    def _wait_until_ready(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s and self._process.poll() is None:
            health = health_of(self.url)
            if health.get("worker") == "ready":
                self.base_model = health["base_model"]
                return
            time.sleep(0.1)
        raise RuntimeError(f"the service did not become ready; its log ends:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
