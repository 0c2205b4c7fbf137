"""The services of a worker to its device loop and its models."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuneserve_engine.core.jobs import EncodedTokenDelta, Job
from tuneserve_engine.worker.accounting.usage_ledger import UsageLedger
from tuneserve_engine.worker.lease import StoreSession
from tuneserve_engine.worker.observers import JobObserver
from tuneserve_engine.worker.pending import PendingJobs
from tuneserve_engine.worker.unstored import UnstoredOutcomes


@dataclass(frozen=True)
class WorkerServices:
    """The parts of a worker that its device loop and its models share. Call them on the event loop.

    ``spawn`` runs a task beside everything else; an exception that it raises ends the worker.
    ``on_device`` runs a call on the device's thread between two micro-batches, and ``on_disk`` on a
    thread of its own.
    """

    pending: PendingJobs
    unstored: UnstoredOutcomes
    session: StoreSession
    ledger: UsageLedger
    observers: Sequence[JobObserver]
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    on_device: Callable[[Callable[[], Any]], Awaitable[Any]]
    on_disk: Callable[[Callable[[], Any]], Awaitable[Any]]

    without_takes: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
    """Make the call while no jobs are being taken from the store."""

    report_running: Callable[[Sequence[Job]], Coroutine[Any, Any, None]]
    """Report to the store what runs now."""
    abandon: Callable[[Sequence[str]], None]
    """Note that these requests have begun, and that this worker does not end them."""
    cancel_running: Callable[[Sequence[str]], None]
    """Note that these requests had begun when they were cancelled, and go no further."""
    publish: Callable[[Mapping[str, Sequence[EncodedTokenDelta]]], None]
    """Publish drawn tokens to the clients that stream them, without waiting for that."""
