"""Processes of one worker start, stop and refuse each other as operators expect."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TINY, write_base_model
from tests.faults.test_kills_hosts import KEY, LOST, free_ports
from tests.faults.test_kills_jax import SMALL_PROGRAMS
from tuneserve_server.cli.local_server import free_port

_WORKER = "-m", "tuneserve_engine.worker"
WAIT_S = 60.0
NAMES = "localhost,127.0.0.1"


class Processes:
    """Worker processes of one test, on a store of their own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._settings: dict[str, object] = {
            "data_dir": folder / "data",
            "base_model": model,
            "hosts": NAMES,
            "hosts_key": KEY,
            "hosts_port": free_ports(),
            "lease_ttl_s": 1,
        }
        self.code = ""  # in place of the worker's own
        self._api: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []

    def start(self, number: int, **settings: object) -> "subprocess.Popen[bytes]":
        given = self._settings | {"host_number": number} | settings
        variables = {f"TUNESERVE_{name.upper()}": str(value) for name, value in given.items()}
        log = self._folder / f"{len(self.logs)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *(("-c", self.code) if self.code else _WORKER)],
                env=os.environ | SMALL_PROGRAMS | variables,
                stderr=file,
                stdout=file,
            )
        self.started.append(process)
        self.logs.append(log)
        return process

    def start_api(self) -> None:
        log = self._folder / "api.log"
        variables = {"TUNESERVE_DATA_DIR": str(self._folder / "data")}
        with log.open("wb") as file:
            self._api = subprocess.Popen(
                [sys.executable, "-m", "tuneserve_server", "api"],
                env=os.environ | variables | {"TUNESERVE_PORT": str(free_port())},
                stderr=file,
            )

    def kill(self) -> None:
        for each in [*self.started, *([self._api] if self._api else [])]:
            each.kill()
            each.wait()

    def until(self, number: int, said: str) -> str:
        """Wait until the log of the process has these words; return the log."""
        deadline_s = time.monotonic() + WAIT_S
        while said not in (text := self.logs[number].read_text()):
            assert time.monotonic() < deadline_s, text
            time.sleep(0.05)
        return text


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "data").mkdir()
    found = Processes(tmp_path, write_base_model(tmp_path / "model", TINY))
    yield found
    found.kill()


def ended(processes: Processes) -> list[int]:
    return [each.wait(WAIT_S) for each in processes.started]


def start(processes: Processes, **of_follower: Any) -> None:
    """Start a worker without an API process, and so without a store."""
    processes.start(0)
    processes.start(1, **of_follower)
    processes.until(0, "waiting for the API process")


@pytest.mark.parametrize("asked", [0, 1])
def test_the_worker_stops_whichever_process_is_asked_to(
    processes: Processes, tmp_path: Path, asked: int
) -> None:
    """The follower reads neither store nor files, and its health file shows that it lived."""
    alive = tmp_path / "alive"
    processes.start_api()
    start(processes, alive_file=alive, data_dir=tmp_path / "other", store="redis://nowhere:1")
    processes.until(0, "ready: serving")
    until_exists(alive)
    processes.started[asked].send_signal(signal.SIGTERM)
    assert ended(processes) == [0, 0]
    for number in (0, 1):
        assert processes.logs[number].read_text().rstrip().endswith("INFO stopped")


def until_exists(file: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_one_process_ends_the_other(processes: Processes, killed: int) -> None:
    start(processes)
    killed_s = time.monotonic()
    processes.started[killed].kill()
    statuses = ended(processes)
    assert time.monotonic() - killed_s < 10  # 2 s are promised; the machine is busy
    assert statuses[killed] == -signal.SIGKILL and statuses[1 - killed] in LOST
    if statuses[1 - killed] == 1:
        said = processes.logs[1 - killed].read_text()
        assert f"ERROR stopped: {NAMES.split(',')[killed]}: " in said
        assert "the worker starts again once all its hosts do" in said


def test_a_stopped_process_counts_as_lost(processes: Processes) -> None:
    """After 2 seconds here, so that the test need not wait for 30."""
    processes.code = (
        "from functools import partial; from tuneserve_engine.worker import __main__ as worker; "
        "worker.Hosts = partial(worker.Hosts, silence_s=2.0); raise SystemExit(worker.main())"
    )
    start(processes)
    processes.started[1].send_signal(signal.SIGSTOP)
    assert processes.started[0].wait(WAIT_S) == 1
    assert "127.0.0.1: it has been silent for too long" in processes.logs[0].read_text()
    processes.started[1].send_signal(signal.SIGCONT)
    assert processes.started[1].wait(WAIT_S) in LOST


def test_hosts_with_other_files_are_refused(processes: Processes, tmp_path: Path) -> None:
    other = write_base_model(tmp_path / "other", TINY | {"rope_theta": 5000.0})
    processes.start(0)
    processes.start(1, base_model=other)
    leader, follower = ended(processes)
    assert leader == 2 and follower in LOST
    said = processes.logs[0].read_text()
    assert "127.0.0.1 would compute other bits than the leader; of the numerics ids differ:" in said
    assert "base=" in said


def test_a_host_with_another_key_is_refused_and_the_leader_waits_on(processes: Processes) -> None:
    processes.start(0)
    processes.start(1, hosts_key="another sixteen characters")
    assert processes.started[1].wait(WAIT_S) == 2
    assert "has another hosts_key; give all hosts of a worker the same" in processes.until(1, "key")
    processes.until(0, "127.0.0.1 has another hosts_key; it is not let in")
    assert processes.started[0].poll() is None
