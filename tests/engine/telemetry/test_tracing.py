"""Tracers: the spans that they name, and when there are none."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.telemetry import tracing
from tuneserve_engine.telemetry.tracing import Tracer, open_tracer


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_an_invalid_traceparent_names_no_span(given: str) -> None:
    tracer = Tracer(TracerProvider(shutdown_on_exit=False))
    assert tracer.traceparent(tracer.context(given)) == ""


def test_without_a_collector_there_are_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert open_tracer("worker", WorkerSettings()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert WorkerSettings().otel == "http://collector:4318"


def test_an_invalid_address_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match="http://host:4318"):
        WorkerSettings(otel="collector:4318")


def test_a_collector_without_the_extra_is_warned_of_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    assert open_tracer("worker", WorkerSettings(otel="http://collector:4318")) is None
    assert "pip install '.[otel]'" in caplog.text


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("tuneserve_client.sync", ("opentelemetry",)),
        # Other libraries that they load may import OpenTelemetry's API: redis does.
        (
            "tuneserve_engine.worker.__main__, tuneserve_server.serve",
            ("opentelemetry.sdk", "opentelemetry.exporter"),
        ),
    ],
)
def test_opentelemetry_is_not_loaded_without_tracing(
    modules: str, unwanted: tuple[str, ...]
) -> None:
    script = (
        f"import sys, {modules}\n"
        f"print([name for name in sys.modules if name.startswith({unwanted})])"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "[]"
