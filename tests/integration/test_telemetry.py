"""The JSON logs and the traces of the real processes, for successful and failed requests."""

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from tests.quick_service import QUICK
from tuneserve_client import Client, Datum, RequestFailed, next_token_datum
from tuneserve_server.cli.local_server import LocalServer

KEY = "tml-canary5d0c91"
SETTINGS = {
    "log_format": "json",
    "log_level": "debug",
    "access_log": "true",
    **QUICK,
}
PROMPT = [71, 72, 73, 74, 75]
MARKS = (KEY, "canary5d0c91", "71, 72, 73", "71,72,73", "secret prompt")


@dataclass(frozen=True)
class Span:
    """One exported span, with the process that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    about: dict[str, Any]
    start_ns: int
    end_ns: int


class Collector(ThreadingHTTPServer):
    """OTLP over HTTP on a free port."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(of_process.resource.attributes)["service.name"]
            for scope in of_process.scope_spans:
                self.spans += [_read(service, span) for span in scope.spans]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.take(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing: the test checks the received spans."""


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _read(service: str, span: Any) -> Span:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Span(service, span.name, *ids, _plain(span.attributes), *times)


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@dataclass(frozen=True)
class Used:
    model_id: str
    good: str  # the successful request
    wrong: str  # the request that failed on the worker
    trace_id: str  # of the script


def use(url: str) -> Used:
    """Train as a traced script does, and send values that must never appear again."""
    tracer = TracerProvider().get_tracer("script")
    with Client(url, KEY) as client, tracer.start_as_current_span("script") as script:
        model = client.create_model(rank=4)
        good = model.forward_backward([next_token_datum(PROMPT)])
        good.result()
        wrong = model.forward_backward([Datum([1, 2], targets=[2, 10**6])])
        with pytest.raises(RequestFailed):
            wrong.result()
        trace_id = f"{script.get_span_context().trace_id:032x}"
        used = Used(model.id, good.request_id, wrong.request_id, trace_id)
    bearer = {"Authorization": f"Bearer {KEY}"}
    asked = {"model": "tuneserve/tiny", "prompt": "secret prompt", "max_tokens": 2}
    httpx.post(f"{url}/v1/completions", json=asked, headers=bearer, timeout=60).raise_for_status()
    httpx.get(f"{url}/api/v1/files/x/y?signature={KEY}")
    return used


def logged(path: Path) -> list[dict[str, Any]]:
    """Every line of the processes, each of which must be an object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_objects_with_their_owner_and_a_request_is_one_trace_to_the_device(
    tmp_path: Path,
) -> None:
    with collecting() as collector:
        with LocalServer(tmp_path, **SETTINGS, otel=collector.url) as server:
            used = use(server.url)
            time.sleep(0.2)  # a worker learns that a result is stored after its client has it
        check_logs(logged(server.log), used)
        check_traces(collector.spans, used)
    text = server.log.read_text()
    assert not [mark for mark in MARKS if mark in text]
    assert not [mark for mark in MARKS for body in collector.bodies if mark.encode() in body]


def check_logs(lines: list[dict[str, Any]], used: Used) -> None:
    assert {line["process"] for line in lines} == {"up", "api", "worker"}
    batch = next(line for line in lines if used.good in line.get("request_ids", []))
    (tenant,) = batch["tenants"]
    failed = [line for line in lines if line.get("request_id") == used.wrong and "batch_id" in line]
    assert [(line["tenant"], line["model_id"]) for line in failed] == [(tenant, used.model_id)]
    answered = [line for line in lines if line.get("route") == "/api/v1/forward_backward"]
    names = ("request_id", "model_id", "tenant", "trace_id")
    assert [tuple(each[name] for name in names) for each in answered] == [
        (used.good, used.model_id, tenant, used.trace_id),
        (used.wrong, used.model_id, tenant, used.trace_id),
    ]
    assert all(each["status"] == 200 and each["duration_ms"] > 0 for each in answered)


def check_traces(spans: list[Span], used: Used) -> None:
    of_script = [span for span in spans if span.trace_id == used.trace_id]
    of_good = [each for each in of_script if each.about.get("tuneserve.request_id") == used.good]
    (accepted,) = [span for span in of_good if span.service == "tuneserve-api"]
    assert accepted.name == "POST /api/v1/forward_backward"
    assert accepted.about["http.response.status_code"] == 200
    on_worker = sorted(
        (span for span in of_good if span.service == "tuneserve-worker"),
        key=lambda span: (span.start_ns, span.end_ns),
    )
    assert [span.name for span in on_worker] == [
        "queued",
        "packed",
        "device batch",
        "result written",
    ]
    assert {span.parent_id for span in on_worker} == {accepted.span_id}
    for before, after in itertools.pairwise(on_worker):
        assert accepted.start_ns <= before.start_ns <= before.end_ns == after.start_ns
    batch, written = on_worker[2:]
    assert batch.about["tuneserve.batch_id"].startswith("1-")
    assert batch.end_ns - batch.start_ns >= written.about["tuneserve.device_ms"] * 1e6 > 0
    assert written.about["tuneserve.trained_tokens"] == len(PROMPT) - 1
    failed = [each for each in of_script if each.about.get("tuneserve.request_id") == used.wrong]
    assert [each.about["tuneserve.failed"] for each in failed if each.name == "result written"] == [
        True
    ]
    # Requests of clients that name no span are separate traces, without their polls.
    by_trace = defaultdict(set)
    for span in spans:
        by_trace[span.trace_id].add(span.name)
    (completion,) = [names for names in by_trace.values() if "POST /v1/completions" in names]
    assert {"queued", "device batch", "result written"} < completion
    assert not [span for span in spans if span.name.endswith("retrieve_future")]


def test_a_process_that_cannot_start_says_why_in_an_object(tmp_path: Path) -> None:
    server = LocalServer(tmp_path, **SETTINGS, host="192.0.2.1")
    with pytest.raises(RuntimeError):
        server.start(timeout_s=30)
    lines = logged(server.log)
    assert "192.0.2.1" in lines[-1]["message"] and lines[-1]["process"] == "up"
