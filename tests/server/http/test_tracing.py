"""Spans of HTTP requests: their tenant, their parent, and the contents they never have."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tuneserve_engine.telemetry import logs
from tuneserve_engine.telemetry.tracing import Tracer
from tuneserve_server.http.metrics import CountRequests, HttpMetrics, named
from tuneserve_server.http.tracing import TraceRequests, traceparent

pytestmark = pytest.mark.anyio

PREFIX = "/api/v1"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "canary77"


class Traced:
    """An application with one route that returns the trace context for its jobs, and its spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        app = FastAPI()

        @app.post(f"{PREFIX}/models/{{model_id}}")
        @app.post(f"{PREFIX}/retrieve_future")
        async def work(request: Request) -> str:
            logs.add_fields(tenant="alice", request_id="r")
            await request.body()
            return traceparent.get()

        app.add_middleware(
            TraceRequests, tracer=Tracer(provider), named=partial(named, prefix=PREFIX)
        )
        app.add_middleware(CountRequests, metrics=HttpMetrics(), prefix=PREFIX)
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    app = Traced()
    async with app.http:
        yield app


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_span_is_a_child_of_the_clients_and_is_passed_to_jobs(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    answer = await traced.http.post(f"{PREFIX}/models/m", headers=headers)
    (span,) = traced.spans()
    assert span.context is not None and span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN
    assert answer.json() == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert span.name == f"POST {PREFIX}/models/{{model_id}}"


async def test_a_span_names_its_tenant_and_nothing_that_the_client_wrote(traced: Traced) -> None:
    url = f"{PREFIX}/models/{SECRET}?signature={SECRET}"
    await traced.http.post(url, content=SECRET, headers={"X-API-Key": SECRET})
    await traced.http.get(f"/{SECRET}")
    found, missing = traced.spans()
    assert about(found) == {
        "http.request.method": "POST",
        "http.route": f"{PREFIX}/models/{{model_id}}",
        "http.response.status_code": 200,
        "tuneserve.tenant": "alice",
        "tuneserve.request_id": "r",
    }
    assert missing.name == "none none"
    assert about(missing)["http.response.status_code"] == 404
    assert SECRET not in found.to_json() + missing.to_json()


async def test_polls_have_spans_only_if_the_client_asks(traced: Traced) -> None:
    path = f"{PREFIX}/retrieve_future"
    assert (await traced.http.post(path)).json() == ""
    assert traced.spans() == []
    await traced.http.post(path, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert [span.name for span in traced.spans()] == [f"POST {path}"]


async def test_a_trace_that_the_client_does_not_sample_is_not_recorded(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    answer = await traced.http.post(f"{PREFIX}/models/m", headers=headers)
    assert answer.json() == "" and traced.spans() == []
