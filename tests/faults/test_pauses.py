"""An API process is stopped for longer than its clients may be silent. Living clients lose nothing,
and departed ones are noticed afterwards.
"""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.impatient_api import TTL_S
from tests.faults.processes import Service
from tests.server.conftest import asample

IMPATIENT = str(Path(__file__).with_name("impatient_api.py"))
STOPPED_S = TTL_S + 2


class Impatient(Service):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        super()._start([sys.executable, IMPATIENT], environment)

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v1{path}",
            data=json.dumps(body).encode(),
            headers={"X-API-Key": "tml-a", "Content-Type": "application/json"},
        )
        with self.opener.open(request, timeout=60) as answer:
            return json.load(answer)

    def queued_sample(self) -> tuple[str, str]:
        """A session, and its sample that waits for a missing worker."""
        session = self.post("/create_session", {})["session_id"]
        asked = {
            "session_id": session,
            "sampling_session_seq_id": 0,
            "base_model": "tuneserve/fake",
        }
        sampler = self.post("/create_sampling_session", asked)["sampling_session_id"]
        return session, self.post("/asample", asample(sampler, 0))["request_id"]

    def has_samplers(self, session: str) -> bool:
        """Whether the session lives. The question is not a sign of life."""
        url = f"http://127.0.0.1:{self.port}/api/v1/sessions/{session}"
        request = urllib.request.Request(url, headers={"X-API-Key": "tml-a"})
        with self.opener.open(request, timeout=60) as answer:
            return bool(json.load(answer)["sampler_ids"])

    def outcome(self, request_id: str) -> Any:
        """The outcome of the request, or None while it waits."""
        try:
            return self.post("/retrieve_future", {"request_id": request_id})
        except urllib.error.HTTPError as error:
            assert error.code == 408, error
            return None


def test_a_stop_longer_than_the_limits_of_silence_ends_nothing_of_a_live_client(
    tmp_path: Path,
) -> None:
    """The client is stopped too, as on a paused machine, so none of its heartbeats is waiting."""
    service = Impatient(tmp_path, {"sweep_s": 0.25, "poll_s": 0.2})
    service.start_api()
    try:
        gone, _ = service.queued_sample()
        live, sample = service.queued_sample()
        service.post("/session_heartbeat", {"session_id": live})
        os.kill(service.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(service.pid, signal.SIGCONT)
        time.sleep(0.5)
        deadline_s = time.monotonic() + 30
        while service.has_samplers(gone):
            service.post("/session_heartbeat", {"session_id": live})
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        assert service.has_samplers(live)
        assert service.outcome(sample) is None
    finally:
        service.stop()
