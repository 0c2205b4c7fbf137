"""The metrics of the requests that this process has answered, by route."""

import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuneserve_engine.telemetry import logs
from tuneserve_server.metric_names import HTTP_METRICS, PREFIX

logger = logging.getLogger(__name__)

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_NO_ROUTE = "none"


class HttpMetrics:
    """The HTTP metrics of an application."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        labels = ["method", "route"]
        name = "http_requests_total"
        self.requests = Counter(
            f"{PREFIX}{name}", HTTP_METRICS[name], [*labels, "status"], registry=self.registry
        )
        name = "http_request_duration_seconds"
        meaning = HTTP_METRICS[name]
        self.seconds = Histogram(
            f"{PREFIX}{name}", meaning, labels, registry=self.registry, buckets=_BUCKETS_S
        )

    def record_request(self, name: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when the metrics are collected."""
        gauge = Gauge(f"{PREFIX}{name}", HTTP_METRICS[name], registry=self.registry)
        gauge.set_function(read)


class CountRequests:
    """A middleware that counts requests by route.

    A route is named by its path template, so clients cannot create new names. FastAPI leaves out
    the ``prefix`` under which routers are included; it is added here.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        *,
        prefix: str,
        access_log: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._prefix = prefix
        self._access_log = access_log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        logs.begin()
        started_s = self._clock()
        status = 500  # for an exception that an outer layer answers

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            method, route = named(scope, self._prefix)
            self._metrics.requests.labels(method, route, status).inc()
            seconds = self._clock() - started_s
            self._metrics.seconds.labels(method, route).observe(seconds)
            if self._access_log:
                _tell(method, route, status, seconds)


def named(scope: Scope, prefix: str) -> tuple[str, str]:
    """Return the method and the route's full path template, each "none" if it is unknown."""
    route = scope.get("route")
    methods = getattr(route, "methods", None) or ()
    method = scope["method"] if scope["method"] in methods else _NO_ROUTE
    path = getattr(route, "path", None)
    if path is None:
        return method, _NO_ROUTE
    is_included = scope["path"].startswith(prefix) and not path.startswith(prefix)
    return method, f"{prefix}{path}" if is_included else str(path)


def _tell(method: str, route: str, status: int, seconds: float) -> None:
    """Log one line without text from the client: a path may hold a link's signature."""
    duration_ms = round(1000 * seconds, 3)
    about = {"method": method, "route": route, "status": status, "duration_ms": duration_ms}
    logger.info("%s %s %d in %.1f ms", method, route, status, duration_ms, extra=about)
