"""The decoding of payloads before their jobs' turn, while the device is busy."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from tuneserve_engine.core.jobs import Job
from tuneserve_engine.worker.scheduling.scheduler import MAX_BYTES

T = TypeVar("T")

_BYTES = 2 * MAX_BYTES
"""Payload bytes that are decoded ahead, unless one job has more: as many as two batches take. A
decoded payload may be a hundred times as large."""


class PayloadPrefetcher(Generic[T]):
    """A prefetcher that runs ``decode`` on ``decoder`` for expected jobs; one thread calls it."""

    def __init__(self, decode: Callable[[Job], T], decoder: Executor) -> None:
        self._decode = decode
        self._decoder = decoder
        self._begun: dict[str, Future[T]] = {}

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """Start to decode these jobs, most urgent first, as room allows; forget all others."""
        near: dict[str, Job] = {}
        size = 0
        for job in jobs:
            size += len(job.payload)
            if near and size > _BYTES:
                break
            near[job.request_id] = job
        for request_id in self._begun.keys() - near.keys():
            self._begun.pop(request_id).cancel()
        for request_id, job in near.items():
            if request_id not in self._begun:
                self._begun[request_id] = self._decoder.submit(self._decode, job)

    def pop(self, batch: Sequence[Job]) -> dict[str, Future[T]]:
        """Return the decodings begun for these jobs, by request id; the caller owns them now."""
        ids = [job.request_id for job in batch if job.request_id in self._begun]
        return {request_id: self._begun.pop(request_id) for request_id in ids}
