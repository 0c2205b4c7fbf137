"""OpenTelemetry, if it is installed (``tuneserve[otel]``) and somebody collects: spans of this
process, sent by OTLP over HTTP. Nothing of it is imported otherwise."""

import logging
import threading
from importlib.util import find_spec
from typing import Any

from tuneserve_engine.config import CommonSettings

logger = logging.getLogger(__name__)

_FLUSH_S = 0.5
"""What is not sent so long after the end is lost: a stop must not wait for a collector."""


class Tracer:
    """Makes spans; what they hold is names, numbers and times, never what was sent."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tuneserve")
        self._format = TraceContextTextMapPropagator()

    def context(self, traceparent: str) -> Any:
        """The context of a W3C ``traceparent``; an empty one for what is none."""
        return self._format.extract({"traceparent": traceparent})

    def traceparent(self, context: Any = None) -> str:
        """Of the span in the context, or the current one; empty if nobody records it."""
        from opentelemetry.trace import get_current_span

        carrier: dict[str, str] = {}
        if get_current_span(context).is_recording():
            self._format.inject(carrier, context)
        return carrier.get("traceparent", "")

    def start(self, name: str, **options: Any) -> Any:
        """A span that the caller ends; see OpenTelemetry's ``start_span``."""
        return self._tracer.start_span(name, **options)

    def close(self) -> None:
        """Sends what is left, if that is soon done."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


def open_tracer(process: str, settings: CommonSettings) -> Tracer | None:
    """A tracer that sends to the collector of the settings; None if there is none."""
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
