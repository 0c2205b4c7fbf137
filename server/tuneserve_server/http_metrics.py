"""Requests by route, as this process has answered them."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneserve_server.figures import HTTP_FIGURES, PREFIX

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_NO_ROUTE = "none"


class HttpMetrics:
    """What to count, for all requests of an application."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        labels = ["method", "route"]
        name = "http_requests_total"
        self.requests = Counter(
            f"{PREFIX}{name}", HTTP_FIGURES[name], [*labels, "status"], registry=self.registry
        )
        name = "http_request_duration_seconds"
        meaning = HTTP_FIGURES[name]
        self.seconds = Histogram(
            f"{PREFIX}{name}", meaning, labels, registry=self.registry, buckets=_BUCKETS_S
        )


class CountRequests:
    """Middleware that does the counting. A route is named as it is mounted, without the ids in it:
    there are as many names as routes, whatever clients ask for. The framework leaves out the
    ``prefix`` under which routers are included."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        *,
        prefix: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._prefix = prefix
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = self._clock()
        status = 500  # of an exception that is answered further out

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            route = self._route(scope)
            known = getattr(scope.get("route"), "methods", None) or ()
            method = scope["method"] if scope["method"] in known else _NO_ROUTE
            self._metrics.requests.labels(method, route, status).inc()
            self._metrics.seconds.labels(method, route).observe(self._clock() - started_s)

    def _route(self, scope: Scope) -> str:
        path = getattr(scope.get("route"), "path", None)
        if path is None:
            return _NO_ROUTE
        is_included = scope["path"].startswith(self._prefix) and not path.startswith(self._prefix)
        return f"{self._prefix}{path}" if is_included else str(path)
