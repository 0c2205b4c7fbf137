"""On a disk that is full to the last byte, work ends, checkpoints can be deleted, and the service
starts and makes room.

The test uses a file system of 300 MB, real processes, and a foreign file that takes the remaining
space.
"""

import contextlib
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.processes import Service
from tests.server.conftest import create_model, forward_backward

MB = 10**6
MIN_FREE = 60 * MB
OLD_RESULTS = 120
REQUESTS = 30
TOKENS = tuple(range(1, 60))
JOB = """INSERT INTO jobs (request_id, tenant, kind, scope, seq, base_model, state, release,
    attempts, size, created_s, finished_s, content_type, body)
    VALUES (?, 'old', 'sample', 'old', ?, 'b', 'done', 1, 0, 0, ?1, ?1, '', zeroblob(1000000))"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 300 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300m", "tuneserve-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system can be mounted by root only: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Client:
    """A tenant that calls the service. The test looks at every answer."""

    def __init__(self, service: Service) -> None:
        url = f"http://127.0.0.1:{service.port}/api/v1"
        headers = {"X-API-Key": "tml-a"}
        self.http = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=40)

    def ok(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self) -> httpx.Response:
        return self.http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"})

    def train(self, model: str, seq_id: int) -> httpx.Response:
        body = forward_backward(model, seq_id, TOKENS)
        headers = {"Content-Type": "application/x-protobuf"}
        return self.http.post("/forward_backward", content=body, headers=headers)

    def save(self, model: str, seq_id: int, name: str) -> Any:
        request = {"model_id": model, "seq_id": seq_id, "path": name}
        return self.result(self.ok("POST", "/save_weights", json=request)["request_id"]).json()

    def finish(self, session: str) -> None:
        reason = {"reason": {"type": "success"}}
        self.ok("POST", f"/sessions/{session}/finish", json=reason)

    def result(self, request_id: str, within_s: float = 30.0) -> httpx.Response:
        deadline_s = time.monotonic() + within_s
        while True:
            body = {"request_id": request_id, "allow_metadata_only": True}
            answer = self.http.post("/retrieve_future", json=body)
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer
            assert time.monotonic() < deadline_s, "no result"

    def disk(self) -> str:
        state: str = self.ok("GET", "/healthz")["disk"]
        return state


def eventually(found: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def fill(ballast: Path) -> None:
    """Take every block that is left."""
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (MB, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def add_old_results(store: Path) -> None:
    """Add 120 MB of results that a departed client requested 20 minutes ago."""
    with contextlib.closing(sqlite3.connect(store)) as file, file:
        for n in range(OLD_RESULTS):
            file.execute(JOB.replace("?1", str(time.time() - 1200)), (f"req_old{n}", n))


def test_a_disk_full_to_the_last_byte_loses_nothing_and_can_be_emptied(
    small_disk: Path, tmp_path: Path
) -> None:
    data = small_disk / "data"
    data.mkdir()
    limits = {"min_free_bytes": MIN_FREE, "store_reserve_bytes": 32 * MB, "sweep_s": 0.2}
    service = Service(data, {**limits, "poll_s": 2})
    service.log = tmp_path / "log"
    client = Client(service)
    try:
        service.start_api()
        service.start_worker()
        session, spare = (client.session().json()["session_id"] for _ in range(2))
        created = client.ok("POST", "/create_model", json=create_model(session))
        model = client.result(created["request_id"]).json()["model_id"]
        kept, unwanted = (client.save(model, seq, f"at-{seq}")["path"] for seq in (1, 2))
        service.stop_last()  # the worker, then the API
        service.stop_last()
        add_old_results(data / "store.db")
        service.start_api()
        accepted = []
        for seq in range(3, 3 + REQUESTS):
            answer = client.train(model, seq)
            assert answer.status_code == 200, answer.text
            accepted.append(answer.json()["request_id"])

        # The disk fills up. New requests are refused, but work ends and deletions make room.
        fill(small_disk / "ballast")
        eventually(lambda: client.disk() == "full")
        for refused in (client.session(), client.train(model, 99)):
            assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
        client.ok("POST", "/session_heartbeat", json={"session_id": session})
        client.finish(spare)
        client.ok(
            "DELETE",
            "/training_runs/"
            + unwanted.removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/"),
        )
        service.start_worker()
        results = {each: client.result(each).content for each in accepted}
        assert len(set(results.values())) >= 1 and all(results.values())

        # After a kill, the service starts on the full disk and knows everything that it
        # acknowledged.
        fill(small_disk / "ballast")
        service.restart_api()
        assert client.disk() == "full"
        assert {each: client.result(each).content for each in accepted} == results
        sessions = client.ok("GET", "/sessions")["sessions"]
        assert set(sessions) == {session, spare}
        listed = client.ok("GET", "/checkpoints")["checkpoints"]
        assert [each["tinker_path"] for each in listed] == [kept]

        # With a lower result_ttl_s it makes room by itself, though it starts with none.
        fill(small_disk / "ballast")
        before = (data / "store.db").stat().st_size
        assert before > 100 * MB
        service.change(result_ttl_s=600)
        service.restart_api()
        eventually(lambda: client.disk() == "ok")
        eventually(lambda: (data / "store.db").stat().st_size < before / 4)  # it shrinks in steps
        assert {each: client.result(each).content for each in accepted} == results
        answer = client.train(model, 3 + REQUESTS)
        assert answer.status_code == 200, answer.text
        assert client.result(answer.json()["request_id"]).content
        assert client.session().status_code == 200
    finally:
        client.http.close()
        service.stop()
