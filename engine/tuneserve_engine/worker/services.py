"""The services of a worker to its device loop and its models."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, Outcome
from tuneserve_engine.worker.execution.outcomes import BatchResult
from tuneserve_engine.worker.lease import StoreSession
from tuneserve_engine.worker.pending import PendingJobs


@dataclass(frozen=True)
class WorkerServices:
    """The parts of a worker that its device loop and its models share. Call them on the event loop.

    ``spawn`` runs a task beside everything else; an exception that it raises ends the worker.
    ``on_device`` runs a call on the device's thread between two micro-batches, and ``on_disk`` on a
    thread of its own.
    """

    pending: PendingJobs
    session: StoreSession
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    on_device: Callable[[Callable[[], Any]], Awaitable[Any]]
    on_disk: Callable[[Callable[[], Any]], Awaitable[Any]]

    offer: Callable[[list[Outcome]], None]
    """Send these outcomes to the store."""
    wait_until_stored: Callable[[str, int | None], Awaitable[None]]
    """Wait until the results of the model's requests before the position are durable."""
    without_takes: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
    """Make the call while no jobs are being taken from the store."""

    report_running: Callable[[Sequence[Job]], Coroutine[Any, Any, None]]
    """Report to the store what runs now."""
    start_jobs: Callable[[Sequence[Job], int], None]
    """Note that these jobs left the pending ones for a batch, with so many jobs beside each."""
    account: Callable[[BatchResult], None]
    """Account for a batch that had the device."""
    abandon: Callable[[Sequence[str]], None]
    """Note that these requests have begun, and that this worker does not end them."""
    cancel_running: Callable[[Sequence[str]], None]
    """Note that these requests had begun when they were cancelled, and go no further."""
    publish: Callable[[Mapping[str, Sequence[EncodedTokenDelta]]], None]
    """Publish drawn tokens to the clients that stream them, without waiting for that."""
