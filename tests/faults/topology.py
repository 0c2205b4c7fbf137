"""The services of ``docker/compose.yaml`` as plain processes of this machine.

Commands, variables, health checks and stopping times come from the container files. Only hosts,
ports and folders are replaced by existing ones.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.containers import compose, image_of
from tuneserve_server.cli.local_server import free_port

PASSWORD = "4f3c2b1a"
_HEALTHY_S = 60.0


class Process:
    """One service in a separate folder, with the volume that it shares with others."""

    def __init__(
        self, service: dict[str, Any], folder: Path, replaced: dict[str, str], **more: str
    ) -> None:
        image = image_of(service) if "build" in service else None
        self._replaced = replaced
        self._folder = folder
        self._command = service.get("command") or (image.command if image else [])
        self._health = image.health if image else service["healthcheck"]["test"]
        self._grace_s = int(service["stop_grace_period"].removesuffix("s"))
        variables = {**(image.environment if image else {}), **service["environment"]}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # No other variable of the test process is passed, as in a container.
        self._environment = {
            **{name: self._here(value) for name, value in variables.items()},
            **more,
            "PATH": programs,
        }
        folder.mkdir(parents=True)
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def _here(self, text: str) -> str:
        theirs = "|".join(map(re.escape, self._replaced))
        return re.sub(theirs, lambda match: self._replaced[match[0]], text)

    def start(self, *arguments: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*map(self._here, self._command), *arguments],
                env=self._environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def is_healthy(self) -> bool:
        """The result of the service's own health check."""
        kind, *command = self._health
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        else:
            command = self._health
        checked = subprocess.run(
            [self._here(each) for each in command],
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            timeout=30,
        )
        return checked.returncode == 0

    def output_of(self, *command: str) -> str:
        """The output of a command that is run in the container."""
        ran = subprocess.run(
            command, env=self._environment, cwd=self._folder, capture_output=True, timeout=30
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.decode().strip()

    def wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + _HEALTHY_S
        while not self.is_healthy():
            assert self._process is not None and self._process.poll() is None, self.log[-4000:]
            assert time.monotonic() < deadline_s, f"not healthy in time: {self.log[-4000:]}"
            time.sleep(0.5)

    def kill(self) -> None:
        """End the process as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> int | None:
        """Stop the process as Docker does. Returns its exit status, or None if it was not
        running.
        """
        if self._process is None:
            return None
        self._process.terminate()
        try:
            return self._process.wait(self._grace_s)
        finally:
            self._process.kill()


class Topology:
    """Redis, and several processes of the other services. ``urls`` are those of the APIs."""

    def __init__(self, folder: Path, *, apis: int, workers: int, **settings: str) -> None:
        services = compose("compose.yaml", REDIS_PASSWORD=PASSWORD)["services"]
        self._redis_port = free_port()
        self._folder = folder
        (folder / "data").mkdir()
        self.redis = Process(
            services["redis"],
            folder / "redis",
            {"redis-cli": f"redis-cli -p {self._redis_port}"},
        )
        self.apis: list[Process] = []
        self.urls: list[str] = []
        for number in range(apis):
            port = str(free_port())
            # The port is published on this address, and only there.
            replaced = {"8410": port, "0.0.0.0": "127.0.0.1"}
            process = self._ours(
                services["api"], f"api{number}", replaced, TUNESERVE_PORT=port, **settings
            )
            self.apis.append(process)
            self.urls.append(f"http://127.0.0.1:{port}")
        self.workers = [
            self._ours(services["worker"], f"worker{number}", {}, **settings)
            for number in range(workers)
        ]

    def _ours(
        self, service: dict[str, Any], name: str, replaced: dict[str, str], **more: str
    ) -> Process:
        own = self._folder / name
        replaced = {
            **replaced,
            "redis:6379": f"127.0.0.1:{self._redis_port}",
            "/tmp/": f"{own}/",
            "/data": str(self._folder / "data"),
        }
        return Process(service, own, replaced, **more)

    def __enter__(self) -> "Topology":
        assert shutil.which("redis-server"), "redis-server is not installed; run: make redis-server"
        try:
            here = ["--bind", "127.0.0.1", "--port", str(self._redis_port)]
            self.redis.start(*here, "--dir", str(self._folder / "redis"))
            self.redis.wait_until_healthy()
            for process in self._after_redis():
                assert not process.is_healthy()
                process.start()
            for process in self._after_redis():
                process.wait_until_healthy()
        except BaseException:
            self._end()
            raise
        return self

    def _after_redis(self) -> Iterable[Process]:
        return [*self.apis, *self.workers]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in (*self._after_redis(), self.redis):
            process.stop()
