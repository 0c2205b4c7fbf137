"""Spans of a worker's requests, and the absence of any cost without tracing."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.core.usage import Usage
from tuneserve_engine.telemetry.tracing import Tracer
from tuneserve_engine.worker.accounting.traces import WorkerTraces
from tuneserve_engine.worker.execution.outcomes import BatchResult

ONE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TWO = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = "00-1bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


class Bench:
    """A worker's traces on a clock that the test sets, and the resulting spans."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = WorkerTraces(Tracer(provider), lambda: self.now_s)

    def spans(self) -> list[tuple[str, str, float]]:
        """Request, name and seconds of each span, in the order in which they ended."""
        return [
            (
                str(dict(span.attributes or {})["tuneserve.request_id"]),
                span.name,
                round(((span.end_time or 0) - (span.start_time or 0)) / 1e9, 3),
            )
            for span in self._exporter.get_finished_spans()
        ]

    def finished(self, name: str) -> list[object]:
        return [each for each in self._exporter.get_finished_spans() if each.name == name]


def job(request_id: str, trace: str, kind: JobKind = JobKind.FORWARD_BACKWARD) -> Job:
    return Job("alice", kind, "m", 1, b"body", "m", request_id=request_id, trace=trace)


def test_a_request_is_queued_packed_on_the_device_and_written() -> None:
    bench = Bench()
    one = job("r", ONE)
    bench.traces.on_arrived([one])
    bench.now_s = 101.0
    bench.traces.on_started([one], 0)
    bench.now_s = 101.75
    bench.traces.on_ran(BatchResult([one], [], device_s=0.5, began_s=101.25))
    bench.traces.on_finished([one], "1-7")
    bench.now_s = 102.0
    bench.traces.on_stored([Outcome("r", usage=Usage(device_s=0.5, trained_tokens=4))])
    assert bench.spans() == [
        ("r", "queued", 1.0),
        ("r", "packed", 0.25),
        ("r", "device batch", 0.5),
        ("r", "result written", 0.25),
    ]
    (written,) = bench.finished("result written")
    assert written.attributes["tuneserve.device_ms"] == 500.0
    assert not any("body" in str(value) for value in written.attributes.values())


def test_a_device_batch_is_a_child_of_each_of_its_requests_and_links_the_others() -> None:
    bench = Bench()
    jobs = [job("r", ONE), job("s", TWO), job("nobody traces this", "")]
    bench.traces.on_arrived(jobs)
    bench.traces.on_started(jobs, 1)
    bench.traces.on_ran(BatchResult(jobs, [], device_s=0.5, began_s=100.0))
    bench.traces.on_finished(jobs, "1-1")
    ids = {
        f"{span.context.trace_id:032x}": [f"{link.context.trace_id:032x}" for link in span.links]
        for span in bench.finished("device batch")
    }
    one, two = ONE.split("-")[1], TWO.split("-")[1]
    assert ids == {one: [two], two: [one]}
    assert [f"{s.parent.span_id:016x}" for s in bench.finished("queued")] == [
        ONE.split("-")[2],
        TWO.split("-")[2],
    ]


def test_a_sample_is_one_batch_from_its_first_slice_to_its_last() -> None:
    bench = Bench()
    sample = job("r", ONE, JobKind.SAMPLE)
    bench.traces.on_arrived([sample])
    bench.traces.on_started([sample], 0)
    bench.traces.on_ran(BatchResult([], [], {"r": 1}, device_s=0.1, began_s=100.5))
    bench.now_s = 103.0
    bench.traces.on_ran(BatchResult([sample], [], device_s=0.1, began_s=102.9))
    bench.traces.on_finished([sample], "1-2")
    (batch,) = bench.finished("device batch")
    assert batch.attributes["tuneserve.units"] == 2
    assert bench.spans()[-1] == ("r", "device batch", 2.5)


def test_a_job_that_failed_before_it_ran_has_a_span_and_one_that_moved_has_none() -> None:
    bench = Bench()
    bench.traces.on_arrived([job("r", ONE), job("s", TWO), job("t", UNSAMPLED)])
    bench.traces.on_dropped(["s"])
    bench.traces.on_stored([Outcome(each, rejection=Rejection("no")) for each in ("r", "s", "t")])
    assert [name for _, name, _ in bench.spans()] == ["result written"]
    (written,) = bench.finished("result written")
    assert written.attributes["tuneserve.failed"] is True
