"""What is done for jobs before their turn: their payloads are decoded, while the device is busy."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from tuneserve_engine.jobs import Job
from tuneserve_engine.scheduler import MAX_BYTES

T = TypeVar("T")

_BYTES = 2 * MAX_BYTES
"""Payload bytes that are decoded ahead, unless one job has more: what two units take. In its
decoded form a payload may be a hundred times as large."""


class Ahead(Generic[T]):
    """Runs ``decode`` on ``decoder`` for jobs that are expected. Called from one thread."""

    def __init__(self, decode: Callable[[Job], T], decoder: Executor) -> None:
        self._decode = decode
        self._decoder = decoder
        self._begun: dict[str, Future[T]] = {}

    def expect(self, jobs: Sequence[Job]) -> None:
        """Begins with these, the most urgent first, as far as there is room; forgets all others."""
        near = {job.request_id: job for job in _first_of(jobs)}
        for request_id in self._begun.keys() - near.keys():
            self._begun.pop(request_id).cancel()
        for request_id, job in near.items():
            if request_id not in self._begun:
                self._begun[request_id] = self._decoder.submit(self._decode, job)

    def take(self, unit: Sequence[Job]) -> dict[str, Future[T]]:
        """What has been begun for these jobs, by request id; it is the caller's now."""
        ids = [job.request_id for job in unit if job.request_id in self._begun]
        return {request_id: self._begun.pop(request_id) for request_id in ids}


def _first_of(jobs: Sequence[Job]) -> list[Job]:
    """As many as there is room for; at least one."""
    size = 0
    for count, job in enumerate(jobs):
        size += len(job.payload)
        if count and size > _BYTES:
            return list(jobs[:count])
    return list(jobs)
