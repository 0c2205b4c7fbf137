"""What waits for the device: new jobs, and logged ones that have to be done again."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tuneserve_engine.jobs import Job, JobKind, Outcome
from tuneserve_engine.queue.base import LogEntry


class Backlog:
    """Jobs in ``release`` order. Jobs of a log come back with their old, lower numbers, so that
    they run before the model's new ones, in units shared with everybody."""

    def __init__(self) -> None:
        self._pending: dict[str, Job] = {}
        self._again: dict[str, asyncio.Future[Outcome]] = {}
        self._samples = 0
        self.arrived = asyncio.Event()

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._samples += job.request_id not in self._pending and job.kind == JobKind.SAMPLE
            self._pending[job.request_id] = job
        self.arrived.set()

    def again(self, entries: Sequence[LogEntry], attempts: int) -> "asyncio.Future[list[Outcome]]":
        """Adds what was done before; its outcomes, once it has been done again. ``attempts`` are of
        the request that needs it: if workers died with that, this may be what they died of."""
        loop = asyncio.get_running_loop()
        futures = {entry.job.request_id: loop.create_future() for entry in entries}
        self._again |= futures
        self.add(
            replace(
                entry.job,
                halvings=entry.halvings,
                attempts=max(entry.job.attempts, attempts),
            )
            for entry in entries
        )
        return asyncio.gather(*futures.values())

    def is_again(self, job: Job) -> bool:
        return job.request_id in self._again

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits; may be asked from another thread."""
        return not self._pending

    @property
    def has_samples(self) -> bool:
        """May be asked from another thread."""
        return self._samples > 0

    def in_order(self) -> list[Job]:
        return sorted(self._pending.values(), key=lambda job: job.release)

    def withdraw(self, model_id: str) -> list[Job]:
        """Takes out the model's jobs, in order."""
        mine = [job for job in self.in_order() if job.model_id == model_id]
        self.remove(mine)
        return mine

    def remove(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            del self._pending[job.request_id]
            self._samples -= job.kind == JobKind.SAMPLE

    def drop(self, request_ids: Iterable[str]) -> None:
        """Takes out those of these that wait."""
        self.remove([self._pending[name] for name in request_ids if name in self._pending])

    def done_again(self, job: Job, outcome: Outcome) -> None:
        future = self._again.pop(job.request_id)
        if not future.done():
            future.set_result(outcome)
