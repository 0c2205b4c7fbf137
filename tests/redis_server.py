"""A Redis server for the tests, with the settings that a store needs. Tests may kill it."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

_START_S = 10.0


class RedisServer:
    """A server on a free port of this machine with its data in ``folder``.

    ``settings`` override the settings that a store needs. Call ``stop``, or use the server as a
    context manager.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = _free_port()
        self.settings = {
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "save": "",
            "bind": "127.0.0.1",
        }
        self.settings |= {name.replace("_", "-"): value for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and return when it has read its data and answers."""
        program = shutil.which("redis-server")
        assert program, "redis-server is not installed; run: make redis-server"
        command = [program, "--port", str(self.port), "--dir", str(self.folder)]
        for name, value in self.settings.items():
            command += [f"--{name}", value]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < deadline_s, f"Redis did not start within {_START_S} s"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                answer = connection.recv(100)
        except OSError:
            return False
        return answer.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))

    def command(self, line: str) -> bytes:
        """The answer to an inline command: up to a few bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(f"{line}\r\n".encode())
            return connection.recv(100)

    def kill(self) -> None:
        """End the server as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, how)
            self._process.wait()
            self._process = None

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
