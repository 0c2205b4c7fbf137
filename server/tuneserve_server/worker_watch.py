"""The queue as the worker sees it, with a note of whether a worker is there."""

import time
from collections.abc import Callable, Sequence

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.jobs import Job, Outcome
from tuneserve_engine.queue.base import Lease, Queue

_SILENCE_S = 5.0


class WorkerWatch:
    """A ``Queue`` that passes every call on and remembers who called.

    A connected worker always has a ``take`` parked here, except for the moment between two takes.
    """

    def __init__(self, queue: Queue, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._clock = clock
        self._parked = 0
        self._last_call_s = -_SILENCE_S
        self.info: BaseModelInfo | None = None  # what the newest worker serves

    @property
    def is_present(self) -> bool:
        return self._parked > 0 or self._clock() - self._last_call_s < _SILENCE_S

    async def lease(self, owner: str, info: BaseModelInfo) -> Lease:
        lease = await self._queue.lease(owner, info)
        self.info = info
        self._last_call_s = self._clock()
        return lease

    async def take(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        self._parked += 1
        try:
            jobs = await self._queue.take(epoch, after=after, max_jobs=max_jobs)
            self._last_call_s = self._clock()
            return jobs
        finally:
            self._parked -= 1

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        await self._queue.finish(epoch, outcomes)
