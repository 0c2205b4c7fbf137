"""The store seam: one durable log of jobs and one set of records, changed in the same transactions.

The API process owns the store. A worker reaches its ``Queue`` half over a Unix socket
(``queue.remote``). Nothing here is polled: ``take`` and ``wait`` return when there is news.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.jobs import Job, Outcome
from tuneserve_engine.records import Record, Update

R = TypeVar("R", bound=Record)


class Fenced(Exception):
    """This worker's lease was taken by another; it must stop at once and write nothing."""


class StoreFailed(Exception):
    """The store could not do it (a full disk, say) and changed nothing; worth trying again."""


class KeyReused(Exception):
    """A known (scope, seq) was submitted again with another kind."""


@dataclass(frozen=True)
class Submitted:
    request_id: str
    duplicate: bool  # the key was known; this is the earlier request


@dataclass(frozen=True)
class Lease:
    epoch: int
    resumed: bool  # the same owner came back; its models are still its own


@dataclass(frozen=True)
class Page(Generic[R]):
    items: list[R]
    total: int


class Queue(Protocol):
    """The worker's half."""

    async def lease(self, owner: str, info: BaseModelInfo) -> Lease:
        """Makes ``owner`` the worker. A new owner gets a higher epoch; models that lived in an
        earlier worker are marked lost and their unfinished jobs end with a ``server`` error;
        so does a job that several workers in a row did not live to finish, and every job if this
        worker serves another base model."""
        ...

    async def take(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        """Unfinished released jobs with ``release > after``, oldest first; waits until there is
        one. Reading changes nothing: the caller's cursor is ``after``. Raises ``Fenced``."""
        ...

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        """Stores results and record changes in one transaction, then wakes the waiting. Outcomes
        of jobs that already ended are ignored. Raises ``Fenced``."""
        ...


class Store(Queue, Protocol):
    """The whole store, as the API process sees it."""

    async def submit(self, job: Job, *records: Record) -> Submitted:
        """Durable before it returns; the records are inserted with a new job only. Releases the
        contiguous run of positions that the job completes. A job with a rejection ends at once
        but spends its position; so does one whose model has failed, ended or was lost.
        Raises ``KeyReused``."""
        ...

    async def job_tenant(self, request_id: str) -> str | None:
        """Who submitted this request; None if it is unknown."""
        ...

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None:
        """The outcome, as soon as there is one; None after the time-out. Raises ``ResultExpired``
        for one dropped after its retention, ``KeyError`` for an unknown id."""
        ...

    async def put(self, record: Record) -> None:
        """Inserts or replaces."""
        ...

    async def put_new(self, record: R) -> R:
        """Inserts, or returns the record already stored under this key."""
        ...

    async def update(self, *updates: Update) -> None: ...

    async def get(self, record_type: type[R], key: str) -> R | None: ...

    async def page(
        self,
        record_type: type[R],
        *,
        tenant: str | None = None,
        parent: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Page[R]:
        """Newest first."""
        ...

    async def delete(self, record_type: type[R], key: str) -> None: ...

    async def end_session(self, key: str, reason: str) -> None:
        """Marks the session and its models ended (the first reason wins), deletes its samplers,
        rejects jobs still waiting for a gap, and queues an unload behind each model's log."""
        ...

    async def sweep(self, now_s: float, policy: "SweepPolicy") -> None:
        """Ends sessions without heartbeat, fails requests stuck behind a gap, drops old results
        and expired checkpoints."""
        ...

    async def base_model(self) -> BaseModelInfo | None:
        """What the current worker serves; None before the first lease."""
        ...

    async def files_in_use(self) -> set[str]:
        """File ids named by a checkpoint, a sampler or an unfinished job."""
        ...

    async def secret(self) -> bytes:
        """Random bytes made with the store: they sign request ids and download URLs."""
        ...


class ResultExpired(Exception):
    """The result was delivered or waited for, kept for its retention, and dropped."""


@dataclass(frozen=True)
class SweepPolicy:
    session_ttl_s: float = 900.0
    gap_ttl_s: float = 600.0
    result_ttl_s: float = 86_400.0
