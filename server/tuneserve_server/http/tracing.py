"""A span for each HTTP request, under the client's span if it sends a ``traceparent`` (W3C)."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneserve_engine.telemetry import logs
from tuneserve_engine.telemetry.tracing import Tracer

_ABOUT = ("tenant", "request_id", "model_id")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The ``traceparent`` of this request's span; empty without tracing."""

POLLED = (
    "/retrieve_future",
    "/retrieve_futures",
    "/session_heartbeat",
    "/client/dynamic_config",
    "/healthz",
    "/metrics",
)
"""The endings of polled paths, which have spans only if the client sends a ``traceparent``."""


class TraceRequests:
    """A middleware that makes the spans.

    A span holds the route, the status, and the tenant and ids that log lines hold. It holds no
    path, which may contain a signature, no header and no body.
    """

    def __init__(
        self, app: ASGIApp, tracer: Tracer, named: Callable[[Scope], tuple[str, str]]
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _header(scope)
        is_wanted = scope["type"] == "http" and (given or not scope["path"].endswith(POLLED))
        if not is_wanted:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = self._tracer.context(given)
        span = self._tracer.start(scope["method"], context=context, kind=SpanKind.SERVER)
        mine = set_span_in_context(span, context)
        logs.add_fields(trace_id=f"{span.get_span_context().trace_id:032x}")

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        token = traceparent.set(self._tracer.traceparent(mine))
        try:
            await self._app(scope, receive, sent)
        finally:
            traceparent.reset(token)
            self._end(span, scope)

    def _end(self, span: Any, scope: Scope) -> None:
        method, route = self._named(scope)
        span.update_name(f"{method} {route}")
        span.set_attribute("http.request.method", method)
        span.set_attribute("http.route", route)
        for name, value in logs.noted_fields().items():
            if name in _ABOUT:
                span.set_attribute(f"tuneserve.{name}", value)
        span.end()


def _header(scope: Scope) -> str:
    for name, value in scope.get("headers", ()):
        if name == b"traceparent":
            return bytes(value).decode("latin-1")
    return ""
