"""The outcomes on their way from a worker to the store."""

import asyncio
from collections.abc import Iterable, Sequence

from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store.base import Queue
from tuneserve_engine.worker.accounting.usage_ledger import UsageLedger
from tuneserve_engine.worker.observers import JobObserver

_FINISH_BYTES = 64 * 2**20
"""The most body bytes that one ``finish`` carries, unless a single outcome is larger."""


class UnstoredOutcomes:
    """Jobs that run and outcomes that are not stored yet; ``observers`` hear of stored ones.

    An outcome carries its request's usage to the store, and is offered again after a lost
    connection, until the store has it.
    """

    def __init__(self, ledger: UsageLedger, observers: Sequence[JobObserver]) -> None:
        self.jobs: dict[str, Job] = {}
        """The jobs that run, or whose outcome is not stored yet, by request id."""
        self._ledger = ledger
        self._observers = observers
        self._outcomes: list[Outcome] = []
        self._offered = asyncio.Event()
        self._stored = asyncio.Event()  # replaced after each use, which wakes its waiters

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget these jobs, whose outcomes are not waited for any more."""
        for request_id in request_ids:
            self.jobs.pop(request_id, None)
        self._stored.set()
        self._stored = asyncio.Event()

    def offer(self, outcomes: Sequence[Outcome]) -> None:
        """Store these outcomes, after the earlier ones."""
        self._outcomes.extend([self._ledger.with_usage(each) for each in outcomes])
        self._offered.set()

    async def wait(self, model_id: str | None, position: int | None) -> None:
        """Wait until all begun requests of the model before ``position`` have durable results.

        A ``model_id`` of None means every model, a ``position`` of None every request.
        """
        while any(
            model_id in {None, job.model_id}
            and (position is None or job.position is None or job.position < position)
            for job in self.jobs.values()
        ):
            await self._stored.wait()

    async def store_forever(self, queue: Queue, epoch: int) -> None:
        """Store outcomes as they are offered. Never returns."""
        while True:
            await self._offered.wait()

            # The oldest outcomes that one ``finish`` can carry; at least one.
            batch: list[Outcome] = []
            size = 0
            for outcome in self._outcomes:
                size += len(outcome.body) + len(outcome.recording)
                if batch and size > _FINISH_BYTES:
                    break
                batch.append(outcome)

            failpoint("worker-before-finish")
            await queue.finish(epoch, batch)
            failpoint("worker-finished")
            del self._outcomes[: len(batch)]
            for observer in self._observers:
                observer.on_stored(batch)
            self.drop(outcome.request_id for outcome in batch)
            if not self._outcomes:  # not earlier: after a lost connection the rest is offered again
                self._offered.clear()
