"""The events of a worker's jobs, for observers such as traces."""

from collections.abc import Iterable, Sequence

from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.worker.execution.outcomes import BatchResult


class JobObserver:
    """An observer of a worker's jobs. The methods are called in the order of the events.

    Each method does nothing here; an observer overrides those that it needs.
    """

    def on_arrived(self, jobs: Sequence[Job]) -> None:
        """Note that the worker has received the jobs."""

    def on_started(self, jobs: Sequence[Job], others: int) -> None:
        """Note that the jobs' first batch starts now, with ``others`` jobs beside each."""

    def on_ran(self, result: BatchResult) -> None:
        """Note that a batch has run; its samples may continue in another."""

    def on_finished(self, jobs: Sequence[Job], batch_id: str) -> None:
        """Note that this batch was the jobs' last."""

    def on_stored(self, outcomes: Iterable[Outcome]) -> None:
        """Note that the store has the results."""

    def on_dropped(self, request_ids: Iterable[str]) -> None:
        """Note that the requests will have no result here."""
