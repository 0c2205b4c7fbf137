"""``tuneserve up`` restarts its children when they die, and no child outlives it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import PROTOBUF, create_model, forward_backward
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_server.cli.supervisor import ChildSpec, RestartPolicy, Supervisor, is_from_outside
from tuneserve_server.serve import REFUSED

SCRIPT = str(Path(__file__).with_name("supervised.py"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def until(condition: Callable[[], Any], timeout_s: float = 20) -> Any:
    """The first true value of ``condition``."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s")


def children(pid: int) -> dict[str, int]:
    """The pids of the process's children by name: api or worker."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found["worker" if "fake_worker" in command else "api"] = int(stat.parent.name)
    return found


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


class Running:
    def __init__(self, data_dir: Path) -> None:
        self.port = free_port()
        self.log = data_dir / "log"
        environment = {
            **os.environ,
            "TUNESERVE_DATA_DIR": str(data_dir),
            "TUNESERVE_PORT": str(self.port),
            "TUNESERVE_BASE_MODEL_NAME": "tuneserve/fake",
            "NO_PROXY": "127.0.0.1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT], env=environment, stdout=log, stderr=log
            )

    def health(self) -> dict[str, Any]:
        try:
            url = f"http://127.0.0.1:{self.port}/api/v1/healthz"
            with urllib.request.urlopen(url, timeout=5) as answer:
                health: dict[str, Any] = json.load(answer)
        except OSError:
            health = {}
        return health

    def is_ready(self) -> bool:
        return self.health().get("worker") == "ready"


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = Running(tmp_path)
    until(running.is_ready)
    yield running
    left = children(running.process.pid)
    running.process.kill()
    running.process.wait()
    for pid in left.values():
        until(lambda pid=pid: is_gone(pid))


@pytest.mark.parametrize("victim", ["worker", "api"])
def test_a_killed_child_is_restarted(running: Running, victim: str) -> None:
    before = children(running.process.pid)
    assert set(before) == {"api", "worker"}
    os.kill(before[victim], signal.SIGKILL)
    after = until(
        lambda: (
            (found := children(running.process.pid)).get(victim) not in (None, before[victim])
            and found
        )
    )
    other = {"worker": "api", "api": "worker"}[victim]
    assert after[other] == before[other]
    until(running.is_ready)
    assert f"{victim} ended with signal SIGKILL; restarting in 0.1 s" in running.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_successfully(running: Running, number: int) -> None:
    log = until(lambda: "ready: TINKER_BASE_URL" in (text := running.log.read_text()) and text)
    assert f"listening on http://127.0.0.1:{running.port}" in log
    pids = children(running.process.pid)
    running.process.send_signal(number)
    assert running.process.wait(timeout=20) == 0
    assert all(is_gone(pid) for pid in pids.values())
    assert "killing" not in running.log.read_text()


def test_a_stop_ends_parked_polls_without_failing_them(running: Running) -> None:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.port}/api/v1{path}",
            data=json.dumps(body).encode(),
            headers={"X-API-Key": "tml-a", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=40) as answer:
            content: dict[str, Any] = json.load(answer)
            return content

    session = post("/create_session", {})["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": "tuneserve/fake"}
    post("/create_model", create)
    held = {"model_id": f"{session}:train:0", "seq_id": 2, "adam_params": {}}
    request_id = post("/optim_step", held)["request_id"]  # waits for seq_id 1
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(post, "/retrieve_future", {"request_id": request_id})
        time.sleep(0.5)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(urllib.error.HTTPError) as answer:
            poll.result(timeout=10)
    with answer.value as response:
        assert (response.code, "queue_state" in json.load(response)) == (408, True)
    assert running.process.wait(timeout=20) == 0


def test_a_request_that_is_killed_from_outside_four_times_still_runs(
    running: Running, tmp_path: Path
) -> None:
    """Three workers that die of a request end it. Deaths by an outside signal do not count."""

    def post(path: str, body: Any, kind: str = "application/json") -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.port}/api/v1{path}",
            data=body if isinstance(body, bytes) else json.dumps(body).encode(),
            headers={"X-API-Key": "tml-a", "Content-Type": kind},
        )
        with urllib.request.urlopen(request, timeout=40) as answer:
            content: bytes = answer.read()
            return content

    session = json.loads(post("/create_session", {}))["session_id"]
    post("/create_model", create_model(session))
    begun = tmp_path / "begun"
    begun.touch()
    gradient = forward_backward(f"{session}:train:0", 1)
    request_id = json.loads(post("/forward_backward", gradient, PROTOBUF))["request_id"]
    for count in range(1, 5):
        until(lambda count=count: len(begun.read_text()) == count, 40)
        os.kill(children(running.process.pid)["worker"], signal.SIGKILL)
    answer = wire.ForwardBackwardOutput.FromString(
        post("/retrieve_future", {"request_id": request_id})
    )
    assert answer.metrics["loss:sum"] > 0
    assert len(begun.read_text()) == 5


@pytest.mark.parametrize(
    ("status", "is_outside"),
    [
        (-signal.SIGKILL, True),
        (-signal.SIGTERM, True),
        (-signal.SIGSEGV, False),
        (-signal.SIGABRT, False),
        (-signal.SIGBUS, False),
        (1, False),
        (0, False),
    ],
)
def test_deaths_from_outside_are_distinguished_from_other_deaths(
    status: int, is_outside: bool
) -> None:
    assert is_from_outside(status) is is_outside


def test_no_child_outlives_a_supervisor_that_is_killed(running: Running) -> None:
    pids = children(running.process.pid)
    running.process.kill()
    running.process.wait()
    for pid in pids.values():
        until(lambda pid=pid: is_gone(pid))


def supervise(*statuses: int) -> tuple[int, list[str]]:
    """The return value and the messages of a supervisor whose children exit with these statuses."""
    said: list[str] = []
    specs = [
        ChildSpec(f"child{i}", [sys.executable, "-c", f"exit({status})"], os.environ)
        for i, status in enumerate(statuses)
    ]
    policy = RestartPolicy(most_young_deaths=3, first_delay_s=0.01)
    return asyncio.run(Supervisor(specs, said.append, policy).supervise()), said


def test_a_child_that_keeps_dying_ends_the_supervisor_with_its_status() -> None:
    status, said = supervise(3)
    assert status == 3
    assert [text for text in said if "restarting" in text] == [
        "child0 ended with exit status 3; restarting in 0.01 s",
        "child0 ended with exit status 3; restarting in 0.02 s",
    ]
    assert said[-1].startswith("child0 died 3 times in a row within 20 s of its start")


def test_children_that_were_ready_once_are_restarted_forever() -> None:
    """Two requests that kill the worker three times each must not end the service for everyone."""
    said: list[str] = []

    async def main() -> None:
        dying = ChildSpec("worker", [sys.executable, "-c", "exit(3)"], os.environ)
        policy = RestartPolicy(most_young_deaths=3, first_delay_s=0.01, longest_delay_s=0.01)
        supervisor = Supervisor([dying], said.append, policy)
        was_ready = asyncio.sleep(0)
        running = asyncio.create_task(supervisor.supervise(lambda: asyncio.create_task(was_ready)))
        async with asyncio.timeout(20):
            while len(said) < 6:
                await asyncio.sleep(0.01)
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0

    asyncio.run(main())
    assert {*said} == {"worker ended with exit status 3; restarting in 0.01 s"}


def test_a_child_that_refuses_to_start_is_not_restarted() -> None:
    status, said = supervise(REFUSED)
    assert (status, said) == (REFUSED, ["child0 refused to start; its message above says why"])


def test_the_wait_before_a_restart_doubles_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, longest_delay_s=30)
    assert [policy.delay_s(n) for n in (0, 1, 2, 3, 7, 20)] == [0.5, 0.5, 1, 2, 30, 30]
