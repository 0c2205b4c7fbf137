"""docs/guides/operating.md works: its commands run in order, and a restored backup continues with
the same bits as an uninterrupted service.
"""

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.quick_service import QUICK
from tests.server.conftest import PROTOBUF, create_model, forward_backward
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_server.cli.local_server import LocalServer, free_port
from tuneserve_server.settings import ApiSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/operating.md").read_text()
PORT = "8499"  # port of the page's second service


class Guide:
    """An operator who follows the page, with a service in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = LocalServer(folder, **QUICK)
        self.second_port = str(free_port())
        self.environment = {
            **os.environ,
            **{f"TUNESERVE_{name.upper()}": value for name, value in QUICK.items()},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TUNESERVE_URL": self.server.url,
            "TUNESERVE_PORT": self.server.url.rpartition(":")[2],
            "TUNESERVE_API_KEY": "tml-operator",
            "NO_PROXY": "127.0.0.1",
        }

    def run(self, heading: str) -> Iterator[str]:
        """The output of each block of the section that can run here. Each block must succeed."""
        section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        found = re.findall(r"(?:<!-- (.*?) -->\n)?```sh\n(.*?)^```", section, re.M | re.S)
        for note, block in found:
            if not note or "guides/test_operating" in note:
                yield self._sh(block.replace(PORT, self.second_port))

    def _sh(self, block: str) -> str:
        ran = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", block + 'echo "$TUNESERVE_API_KEY"'],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, (block, ran.stdout, ran.stderr)
        *said, key = ran.stdout.splitlines()
        self.environment["TUNESERVE_API_KEY"] = key
        return "\n".join(said)


class Tenant:
    """A model's requests over HTTP, by their numbers, on any server that has the model."""

    def __init__(self, url: str, key: str, number: int) -> None:
        self.url = url
        self._key = key
        session = self._post("create_session", {}).json()["session_id"]
        request = create_model(session, number, base_model="tuneserve/tiny")
        self._result(self._post("create_model", request))
        self.model_id = f"{session}:train:{number}"

    def _post(self, route: str, body: Any, kind: str = "application/json") -> httpx.Response:
        headers = {"X-API-Key": self._key, "Content-Type": kind}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/api/v1/{route}"
        answer = httpx.post(url, content=raw, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code in {200, 408}, answer.text
        return answer

    def _result(self, accepted: httpx.Response) -> bytes:
        body = {"request_id": accepted.json()["request_id"]}
        while (answer := self._post("retrieve_future", body)).status_code == 408:
            pass
        assert b'"error"' not in answer.content
        return answer.content

    def gradient(self, seq: int) -> bytes:
        body = forward_backward(self.model_id, seq, (5, 6, 7))
        return self._result(self._post("forward_backward", body, PROTOBUF))

    def step(self, seq: int) -> bytes:
        request = {"model_id": self.model_id, "seq_id": seq, "adam_params": {"learning_rate": 0.01}}
        return self._result(self._post("optim_step", request))

    def begin(self) -> None:
        """Leave a gradient without a step."""
        self.gradient(1)
        self.step(2)
        self.gradient(3)

    def go_on(self) -> list[bytes]:
        return [self.step(4), self.gradient(5), self.step(6)]


def test_every_command_runs_and_a_restored_model_continues_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """Of two equal models, one continues at once, the other after the backup was restored."""
    guide = Guide(tmp_path)
    with guide.server as server:
        (doctor,) = guide.run("Install")
        assert "OK    store" in doctor and "FAIL" not in doctor
        plan, of_two = guide.run("Size it")
        assert "kept free" in plan and "rank 32" in plan
        assert "on gpu, 2 devices; sizes are those of each" in of_two
        (watched,) = guide.run("Watch it")
        assert '"worker":"ready"' in watched and "tuneserve_workers{" in watched
        (keys,) = guide.run("Let people in")
        assert "alice" in keys and guide.environment["TUNESERVE_API_KEY"] != "tml-operator"
        key = guide.environment["TUNESERVE_API_KEY"]
        undisturbed, moved = Tenant(server.url, key, 0), Tenant(server.url, key, 1)
        undisturbed.begin()
        moved.begin()
        wanted = undisturbed.go_on()
        backing_up = guide.run("Back up")
        next(backing_up)
    assert next(backing_up) == "ok"
    restoring = guide.run("Restore")
    next(restoring)
    assert moved.model_id in next(restoring)
    moved.url = f"http://127.0.0.1:{guide.second_port}"
    try:
        assert moved.go_on() == wanted
    finally:
        next(restoring)
    for name in ("backup", "backup/store.db", "restored", "restored/store.db"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_settings_in_the_examples_are_settings() -> None:
    (toml,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    given = tomllib.loads(toml)
    known = {*ApiSettings.model_fields, *WorkerSettings.model_fields}
    assert set(given) <= known
    ApiSettings(**given)
    WorkerSettings(**given)
    for section in ("## Size it", "## Tune the limits", "## Troubleshooting"):
        text = PAGE.split(section)[1].split("\n## ")[0]
        named = set(re.findall(r"`([a-z]+_[a-z_]+?)(?: = [^`]*)?`", text))
        assert named - known <= {"disk_full", "body_too_large", "body_too_slow", "request_id"}, (
            section
        )


def test_the_systemd_unit_runs_an_existing_command_and_stops_it_in_time() -> None:
    (text,) = re.findall(r"^```ini\n(.*?)^```", PAGE, re.M | re.S)
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    program, command = shlex.split(service["ExecStart"])
    assert Path(program).name == "tuneserve" and command == "up"
    assert float(service["TimeoutStopSec"]) > 30  # docs/reliability.md promises this
    assert service["ReadWritePaths"] == service["WorkingDirectory"]
    assert service["Environment"].startswith(f"HF_HOME={service['WorkingDirectory']}/")
