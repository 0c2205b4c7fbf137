"""The outcomes on their way from a worker to the store."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from tuneserve_engine.core.jobs import Job, Outcome
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store.base import Queue

_FINISH_BYTES = 64 * 2**20
"""The most body bytes that one ``finish`` carries, unless a single outcome is larger."""


class UnstoredOutcomes:
    """Jobs that run and outcomes that are not stored yet; ``on_stored`` hears of stored ones.

    An outcome is offered again after a lost connection, until the store has it.
    """

    def __init__(self, on_stored: Callable[[Sequence[Outcome]], None]) -> None:
        self._on_stored = on_stored
        self._jobs: dict[str, Job] = {}  # jobs that run, or whose outcome is not stored yet
        self._outcomes: list[Outcome] = []
        self._offered = asyncio.Event()
        self._stored = asyncio.Event()  # replaced after each use, which wakes its waiters

    def start(self, jobs: Iterable[Job]) -> None:
        """Note that these jobs run."""
        self._jobs |= {job.request_id: job for job in jobs}

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget these jobs, whose outcomes are not waited for any more."""
        for request_id in request_ids:
            self._jobs.pop(request_id, None)
        self._wake()

    def offer(self, outcomes: Sequence[Outcome]) -> None:
        """Store these outcomes, after the earlier ones."""
        self._outcomes.extend(outcomes)
        self._offered.set()

    async def wait(self, model_id: str | None, position: int | None) -> None:
        """Wait until all begun requests of the model before ``position`` have durable results.

        A ``model_id`` of None means every model, a ``position`` of None every request.
        """
        while any(
            model_id in {None, job.model_id}
            and (position is None or job.position is None or job.position < position)
            for job in self._jobs.values()
        ):
            await self._stored.wait()

    async def store_forever(self, queue: Queue, epoch: int) -> None:
        """Store outcomes as they are offered. Never returns."""
        while True:
            await self._offered.wait()
            batch = _first_of(self._outcomes)
            failpoint("worker-before-finish")
            await queue.finish(epoch, batch)
            failpoint("worker-finished")
            del self._outcomes[: len(batch)]
            self._on_stored(batch)
            self.drop(outcome.request_id for outcome in batch)
            if not self._outcomes:  # not earlier: after a lost connection the rest is offered again
                self._offered.clear()

    def _wake(self) -> None:
        self._stored.set()
        self._stored = asyncio.Event()


def _first_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the oldest outcomes that one ``finish`` can carry; at least one."""
    size = 0
    for count, outcome in enumerate(outcomes):
        size += len(outcome.body) + len(outcome.recording)
        if count and size > _FINISH_BYTES:
            return list(outcomes[:count])
    return list(outcomes)
