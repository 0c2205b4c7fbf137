"""The jobs that wait for the device: new jobs, and logged jobs to replay."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.store.base import LogEntry


class PendingJobs:
    """The waiting jobs, in the order of the store.

    Replayed jobs keep their old, lower release numbers, so that they run before the model's new
    jobs, in batches shared with other tenants.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Job] = {}
        self.replays: dict[str, asyncio.Future[Outcome]] = {}
        """The future outcomes of logged jobs that are replayed, by request id."""
        self._samples = 0
        self.is_empty = True
        """Whether no job waits. Any thread may read it."""
        self.arrived = asyncio.Event()

    def add_jobs(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.is_empty = False
            self._samples += job.request_id not in self._pending and job.kind == JobKind.SAMPLE
            self._pending[job.request_id] = job
        self.arrived.set()

    def replay(self, entries: Sequence[LogEntry], attempts: int) -> "asyncio.Future[list[Outcome]]":
        """Add logged jobs for replay and return their future outcomes.

        ``attempts`` is that of the request that needs the replay: if workers died with that
        request, one of these jobs may have been the cause.
        """
        loop = asyncio.get_running_loop()
        futures = {entry.job.request_id: loop.create_future() for entry in entries}
        self.replays |= futures
        self.add_jobs(
            replace(
                entry.job,
                halvings=entry.halvings,
                attempts=max(entry.job.attempts, attempts),
            )
            for entry in entries
        )
        return asyncio.gather(*futures.values())

    @property
    def has_samples(self) -> bool:
        """Whether a sample waits. Any thread may read it."""
        return self._samples > 0

    def has_job(self, job: Job) -> bool:
        return job.request_id in self._pending

    def in_order(self) -> list[Job]:
        return sorted(self._pending.values(), key=lambda job: job.release)

    def withdraw(self, model_id: str) -> list[Job]:
        """Remove the model's jobs and return them, in order."""
        mine = [job for job in self.in_order() if job.model_id == model_id]
        self.remove_jobs(mine)
        return mine

    def remove_jobs(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            del self._pending[job.request_id]
            self._samples -= job.kind == JobKind.SAMPLE
        self.is_empty = not self._pending

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Remove the jobs of these requests, if they wait."""
        self.remove_jobs([self._pending[name] for name in request_ids if name in self._pending])

    def finish_replay(self, job: Job, outcome: Outcome) -> None:
        future = self.replays.pop(job.request_id)
        if not future.done():
            future.set_result(outcome)
