"""The spans of a worker for each traced request: queued, packed, device batch, result written.

They are children of the API's span that accepted the request.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.telemetry.tracing import Tracer
from tuneserve_engine.worker.execution.outcomes import BatchResult
from tuneserve_engine.worker.observers import JobObserver

_REMEMBERED = 65_536
"""The number of requests remembered. Beyond it, the oldest are forgotten, which removes requests
that went to other workers."""

_LINKS = 128
"""The number of other requests that a span links to: OpenTelemetry's default limit."""


@dataclass
class _Request:
    """A traced request on this worker; times are the clock's, 0 before they are known."""

    job: Job
    context: Any
    arrived_s: float
    began_s: float = 0.0
    device_from_s: float = 0.0
    device_to_s: float = 0.0
    batches: int = 0
    beside: dict[str, Any] = field(default_factory=dict)  # contexts of batch mates, by request id


class WorkerTraces(JobObserver):
    """The traces of a worker; ``clock`` is the clock of the worker and its executor."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock
        self._epoch_ns = time.time_ns() - int(clock() * 1e9)
        self._requests: dict[str, _Request] = {}

    def on_arrived(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.trace:
                context = self._tracer.context(job.trace)
                self._requests[job.request_id] = _Request(job, context, self._clock())
        while len(self._requests) > _REMEMBERED:
            del self._requests[next(iter(self._requests))]

    def on_started(self, jobs: Sequence[Job], others: int) -> None:
        now_s = self._clock()
        for request in self._known(job.request_id for job in jobs):
            request.began_s = now_s
            self._span(request, "queued", request.arrived_s, now_s, {})

    def on_ran(self, result: BatchResult) -> None:
        ids = [job.request_id for job in result.jobs] + list(result.remaining)
        requests = self._known(ids)
        now_s = self._clock()
        for request in requests:
            request.device_from_s = request.device_from_s or result.began_s or now_s
            request.device_to_s = now_s
            request.batches += 1
            for each in requests[: _LINKS - len(request.beside)]:
                if each is not request:
                    request.beside[each.job.request_id] = each.context

    def on_finished(self, jobs: Sequence[Job], batch_id: str) -> None:
        for request in self._known(job.request_id for job in jobs):
            about = {"tuneserve.batch_id": batch_id, "tuneserve.units": request.batches}
            began_s, device_from_s = request.began_s, request.device_from_s
            self._span(request, "packed", began_s, device_from_s, {})
            others = list(request.beside.values())
            self._span(
                request, "device batch", device_from_s, request.device_to_s, about, links=others
            )

    def on_stored(self, outcomes: Iterable[Outcome]) -> None:
        now_s = self._clock()
        for outcome in outcomes:
            request = self._requests.pop(outcome.request_id, None)
            if request is not None:
                from_s = request.device_to_s or request.arrived_s
                self._span(request, "result written", from_s, now_s, _cost(outcome))

    def on_dropped(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _known(self, request_ids: Iterable[str]) -> list[_Request]:
        if not self._requests:
            return []
        return [self._requests[each] for each in request_ids if each in self._requests]

    def _span(  # noqa: PLR0913 - the parts of a span
        self,
        request: _Request,
        name: str,
        from_s: float,
        to_s: float,
        about: Mapping[str, Any],
        links: Sequence[Any] = (),
    ) -> None:
        from opentelemetry.trace import Link, get_current_span

        job = request.job
        attributes = {
            "tuneserve.request_id": job.request_id,
            "tuneserve.tenant": job.tenant,
            "tuneserve.kind": job.kind.value,
            **({"tuneserve.model_id": job.model_id} if job.model_id else {}),
            **about,
        }
        span = self._tracer.start(
            name,
            context=request.context,
            start_time=self._ns(from_s),
            attributes=attributes,
            links=[Link(get_current_span(each).get_span_context()) for each in links],
        )
        span.end(end_time=self._ns(max(from_s, to_s)))

    def _ns(self, clock_s: float) -> int:
        return self._epoch_ns + int(clock_s * 1e9)


def _cost(outcome: Outcome) -> dict[str, Any]:
    """Return the cost of the request, and whether it failed, as span attributes."""
    about: dict[str, Any] = {"tuneserve.failed": outcome.rejection is not None}
    if outcome.usage is not None:
        about["tuneserve.device_ms"] = round(1000 * outcome.usage.device_s, 3)
        for name in ("trained_tokens", "prompt_tokens", "sampled_tokens", "padded_tokens"):
            about[f"tuneserve.{name}"] = getattr(outcome.usage, name)
    return about
