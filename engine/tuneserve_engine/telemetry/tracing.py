"""The spans of this process, sent to an OpenTelemetry collector by OTLP over HTTP.

OpenTelemetry is imported only if it is installed (``tuneserve[otel]``) and a collector is set.
"""

import logging
import threading
from importlib.util import find_spec
from typing import Any

from tuneserve_engine.settings.common import CommonSettings

logger = logging.getLogger(__name__)

_FLUSH_S = 0.5
"""Seconds to send the last spans at the end; later ones are lost, as a stop must not wait for a
collector."""


class Tracer:
    """A maker of spans, which hold names, numbers and times, but never the content of requests."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tuneserve")
        self._format = TraceContextTextMapPropagator()

    def context(self, traceparent: str) -> Any:
        """Return the context of a W3C ``traceparent``; an empty context if it is invalid."""
        return self._format.extract({"traceparent": traceparent})

    def traceparent(self, context: Any = None) -> str:
        """Return the ``traceparent`` of the context's span, by default the current one.

        It is empty if the span is not recorded.
        """
        from opentelemetry.trace import get_current_span

        carrier: dict[str, str] = {}
        if get_current_span(context).is_recording():
            self._format.inject(carrier, context)
        return carrier.get("traceparent", "")

    def start(self, name: str, **options: Any) -> Any:
        """Start a span, which the caller must end; see OpenTelemetry's ``start_span``."""
        return self._tracer.start_span(name, **options)

    def close(self) -> None:
        """Send the remaining spans, waiting for at most ``_FLUSH_S``."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


def open_tracer(process: str, settings: CommonSettings) -> Tracer | None:
    """Return a tracer that sends to the settings' collector; None without one or OpenTelemetry."""
    if not settings.otel:
        return None
    try:
        has_exporter = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        has_exporter = False
    if not has_exporter:
        logger.warning(
            "traces are wanted (otel), but OpenTelemetry is not installed, so there are none: "
            "pip install '.[otel]' in a clone"
        )
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"tuneserve-{process}"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{settings.otel.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)
