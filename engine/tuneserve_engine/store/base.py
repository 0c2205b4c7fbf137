"""The store's interface: a durable log of jobs and a set of records, changed in one transaction.

With SQLite the API process owns the store, and workers reach its ``Queue`` half over a Unix socket
(``store.remote``); with Redis every process opens it. ``take`` and ``wait`` return as soon as there
is something new: callers do not poll.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, JobKind, Outcome
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.core.records import Record, SamplerRecord, Update
from tuneserve_engine.core.usage import CurvePoint, TenantUsage, Usage
from tuneserve_engine.store.pubsub import Subscription

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Submitted:
    request_id: str
    duplicate: bool  # the key was known; ``request_id`` is the earlier request's
    waits: bool = False  # the request creates a model that has to wait for room


@dataclass(frozen=True)
class Lease:
    epoch: int
    resumed: bool  # the same process leased again; its models are still placed with it


@dataclass(frozen=True)
class Renewal:
    """The store's answer when a worker renews its lease."""

    leaving: list[str] = field(default_factory=list)  # models that the worker should release
    cancelled: list[str] = field(default_factory=list)  # requests that ended without the worker
    weights: dict[str, float] = field(default_factory=dict)  # only tenants with their own weight


@dataclass(frozen=True)
class ServedModel:
    """A base model that a worker leases with now, or leased with in the past."""

    info: BaseModelInfo
    workers: int  # alive now, those that only sample included
    seen_s: float  # last sign of life of any of its workers
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by worker
    samplers: int = 0  # the workers that only sample

    @property
    def trainers(self) -> int:
        """The number of workers alive now that train."""
        return self.workers - self.samplers


@dataclass(frozen=True)
class RecoveryPoint:
    """A file with a model's state as it was when every request before ``position`` was done."""

    model_id: str
    position: int
    file_id: str
    numerics_id: str  # replay gives the same bits only under the same id


@dataclass(frozen=True)
class LogEntry:
    """A request that changed the model's state, and the data to replay it."""

    job: Job
    digest: bytes  # ``refusals.digest`` of the result that the client has
    halvings: int = 0  # how often its micro-batches were halved to fit the device


@dataclass(frozen=True)
class SamplerClient:
    """A client of a sampling session.

    ``number`` is 0 for the client that opened the session; clients that join it count from 1. The
    client's samples are those with ``seq // types.CLIENT_SEQS == number``.
    """

    tenant: str
    scope: str
    number: int


@dataclass(frozen=True)
class Completion:
    """A sample that has ended."""

    request_id: str
    number: int  # grows in the order in which samples end
    failed: bool = False
    size: int | None = None  # bytes of the result; None once the result was dropped


@dataclass(frozen=True)
class RequestState:
    """The state of a request.

    ``held``: waits for an earlier request, or creates a model and waits for room. ``ready``: waits
    for its worker, or runs. ``done``. ``expired``: its result and its usage were dropped. ``scope``
    is the scope of the client's key.
    """

    tenant: str
    kind: JobKind
    scope: str
    state: Literal["held", "ready", "done", "expired"]
    failed: bool = False
    usage: Usage | None = None  # set once the request is done, if it has run


@dataclass(frozen=True)
class KeptRequest:
    """A request of a model, a sampling session or a session, whose result is not dropped yet."""

    request_id: str
    kind: JobKind
    seq: int
    state: Literal["held", "ready", "done"]
    created_s: float
    finished_s: float | None = None
    failed: bool = False
    usage: Usage | None = None  # set once the request is done, if it has run


@dataclass(frozen=True)
class StoreStats:
    """The store's fill level: unfinished requests by tenant, requests kept for replay, recovery
    points, and the models that have unfinished requests."""

    unfinished: dict[str, int]
    logged: int
    points: int
    busy: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CheckpointUsage:
    """The number and bytes of a tenant's checkpoints and unnamed sampler saves. Both include the
    ``coming`` ones that are being saved."""

    count: int
    size_bytes: int
    coming: int = 0


@dataclass(frozen=True)
class Page(Generic[R]):
    items: list[R]
    total: int


@dataclass(frozen=True)
class Soundness:
    """The known condition of the store's file; ``detail`` explains a file that is not sound."""

    state: Literal["unchecked", "checking", "sound", "damaged"]
    detail: str = ""


UNCHECKED = Soundness("unchecked")


class Queue(Protocol):
    """The worker's half of the store.

    A worker is a process with a lease: a name, a base model and an epoch that only grows. The jobs
    of a model go to the one worker that the model is placed with. A model is placed on its first
    job, or when its worker is gone, with the worker of its base model that then has the
    fewest models for its speed. A sample goes to the worker with the fewest sequences, but the
    first 16 sequences of a snapshot's session go to one worker, if it may that of the session's
    first model. Workers that only sample come first for samples, and get no models. If no worker
    serves the base model, models and samples are placed when such a worker leases. Placing gives
    waiting jobs new ``release`` numbers, so that a cursor never misses them.

    Every method with an epoch raises ``Fenced`` if that lease is over. Any method may raise
    ``StoreFailed`` or ``ConnectionError``.
    """

    async def lease(self, name: str, owner: str, info: BaseModelInfo, speed: float = 1.0) -> Lease:
        """Make the process ``owner`` the worker ``name``.

        ``speed`` is how fast it trains, relative to others of its base model; 0: it only samples.
        If another process had the name, its lease ends at once, as after a time-out (see
        ``renew``). Raises ``StoreUnusable`` if the store knows the base model's name by another
        revision.
        """
        ...

    async def renew(self, epoch: int, metrics: dict[str, float] | None = None) -> Renewal:
        """Extend the lease by its time to live.

        Returns three things. The models placed here that the worker should give up with
        ``release``: idle models, and models that another worker has more room for. The samples
        placed here that were cancelled since the last renewal; the store may lose this list when
        its process restarts, which only costs the worker a sample run in vain. The tenants'
        weights.

        ``metrics`` are the worker's metrics and replace those of the last renewal. The store may
        lose them when its process restarts.

        Also ends the leases that have run out: jobs noted by ``note_running`` count an
        attempt, jobs with too many attempts end, and everything else is placed again.
        """
        ...

    async def take_jobs(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        """Return unfinished, released jobs placed here with ``release > after``, oldest first.

        Waits until there is one. Reading changes nothing: ``after`` is the caller's cursor.
        """
        ...

    async def note_running(self, epoch: int, request_ids: Sequence[str]) -> None:
        """Note the requests that this worker runs from now on, replacing the last note.

        The store may lose the note when its process restarts: the note serves to count attempts
        when a worker dies.
        """
        ...

    async def publish_tokens(self, parts: dict[str, list[EncodedTokenDelta]]) -> None:
        """Send parts of running samples to the current ``listen`` subscribers.

        Nothing is stored, and a part may be lost on its way. Needs no lease: every worker that runs
        a sample draws the same tokens.
        """
        ...

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        """Store results and record changes in one transaction, then wake the waiting calls.

        Outcomes of jobs that have already ended are ignored. Raises ``Fenced`` for a job placed
        with another worker.

        The usage of an outcome is added to its tenant's usage: once, however often the outcome is
        reported, and also if the job ended without its worker (as a cancelled sample does).
        """
        ...

    async def recovery_points(self, epoch: int, model_id: str) -> list[RecoveryPoint]:
        """Return the model's kept recovery points, newest first: two at most."""
        ...

    async def read_log(self, epoch: int, model_id: str, *, start: int) -> list[LogEntry]:
        """Return the requests that changed the model's state from position ``start`` on, in order.

        Returns as many as one message carries, and an empty list at the end of the log.
        """
        ...

    async def save_point(self, epoch: int, point: RecoveryPoint) -> None:
        """Make the point the model's newest, keep the one before, and forget older points.

        Also drops the payloads that no kept point needs. Raises ``ValueError`` if a request before
        the point has not ended. A no-op for a model that is gone.
        """
        ...

    async def unassign(self, epoch: int, model_id: str) -> None:
        """Give the model up: its waiting and future jobs are placed again."""
        ...

    async def resign(self, epoch: int) -> None:
        """End the lease. Everything is placed again, and no job counts an attempt."""
        ...

    async def killed(self, name: str) -> None:
        """End the lease of the worker of this name, if there is one.

        The supervisor calls this for a worker that was killed from outside. The requests that the
        worker ran count an attempt, as after any death. Such attempts alone end a request only
        after ``refusals.MOST_DEATHS`` workers have gone.
        """
        ...


class Store(Queue, Protocol):
    """The whole store, as the API process sees it."""

    async def submit(self, job: Job, *records: Record) -> Submitted:
        """Store the job and return once it is durable.

        The records are inserted only with a new job that is not rejected. Releases the contiguous
        run of positions that the job completes.

        A job with a rejection ends at once but spends its position. A job is rejected and changes
        nothing if its model has failed, has ended or was lost, or if the model has passed its
        position. The last case covers a model's request that is sent again after ``sweep`` forgot
        it; a sample that is sent again then counts as new.

        For a new model beyond its tenant's ``tenant_models``, the tenant's longest idle models are
        parked. If too few are idle, the new model is held until ``sweep`` finds room, in the order
        of arrival.

        A save is rejected if its tenant keeps, or is about to keep, as many checkpoints or bytes as
        it may. Raises ``KeyReused``, or ``LimitReached`` if another limit would be passed.
        """
        ...

    async def job_key(self, request_id: str) -> tuple[str, str] | None:
        """Return the request's tenant and scope; None if it is unknown."""
        ...

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None:
        """Return the outcome as soon as there is one; None after the time-out.

        The outcome has the request's usage, if the request has run. Raises ``ResultDropped`` if the
        result was dropped after its retention, and ``KeyError`` for an unknown id. A request stays
        known for at least twice the retention after its end.
        """
        ...

    def subscribe(self, streams: Iterable[str]) -> Subscription:
        """Subscribe to the parts that workers send by ``progress`` for these streams.

        Stream names must be unique. Call this before the sample is submitted: parts sent earlier
        are gone.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """End an unfinished sample as rejected, whether it waits or runs.

        Returns whether the request is a sample; requests of other kinds are not touched. Raises
        ``KeyError`` for an unknown id.
        """
        ...

    async def completions(
        self, client: SamplerClient, *, after: int, limit: int, timeout_s: float
    ) -> list[Completion]:
        """Return the client's ended samples with a ``number`` above ``after``, in that order.

        Waits until there is one; returns an empty list after the time-out. A completion stays until
        its request is forgotten or acknowledged.
        """
        ...

    async def acknowledge(self, client: SamplerClient, request_ids: Sequence[str]) -> None:
        """Drop the results and completions of these requests before their retention is over.

        Requests that are not ended samples of the client are ignored.
        """
        ...

    async def join_sampler(self, sampler_key: str) -> int | None:
        """Return a unique number for one more client of a sampling session.

        Returns None if the session does not exist.
        """
        ...

    async def recordings(self, tenant: str, samples: Sequence[SampleKey]) -> list[bytes | Gone]:
        """Return the recordings of the tenant's samples, in order, or why one is missing.

        Returns as many as one message carries, at least one. Reading counts as use and restarts a
        recording's retention.
        """
        ...

    async def put_record(self, record: Record) -> None:
        """Insert or replace the record."""
        ...

    async def put_new_record(self, record: R) -> R:
        """Insert the record, or return the one already stored under this key.

        Raises ``LimitReached`` for a session or a sampler over a limit.
        """
        ...

    async def update_record(self, *updates: Update) -> None: ...

    async def get_record(self, record_type: type[R], key: str) -> R | None: ...

    async def page_of_records(
        self,
        record_type: type[R],
        *,
        tenant: str | None = None,
        parent: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Page[R]:
        """Return a page of records, newest first."""
        ...

    async def checkpoint_usage(self, tenant: str, key: str = "") -> CheckpointUsage:
        """Return what the tenant keeps, except the checkpoint or unnamed save with this key."""
        ...

    async def unnamed_saves(self, tenant: str) -> list[SamplerRecord]:
        """Return the tenant's samplers that have weights of their own, in any order."""
        ...

    async def delete_record(self, record_type: type[R], key: str) -> None:
        """Delete the record.

        Deleting the last checkpoint of a model whose session is forgotten also deletes the model.
        """
        ...

    async def end_session(self, key: str, reason: str) -> None:
        """Mark the session and its models ended; the first reason wins.

        Deletes the session's samplers and custom losses, rejects jobs that still wait for a gap,
        and queues an unload behind the log of each model that a worker holds. When a model is
        unloaded, its recovery points and payloads are dropped.
        """
        ...

    async def sweep(self, now_s: float, policy: SweepPolicy) -> None:
        """End silent sessions and drop what is no longer needed.

        Ends sessions without a heartbeat (and drops their samples long before that), marks idle
        models to be released, fails requests stuck behind a gap, and drops old results and expired
        checkpoints.

        Drops recordings that were not used within their retention and, for tenants that have too
        many, the least recently used ones; a bounded number at once. Recordings of ended sessions
        go first.

        Forgets requests that ended twice the retention of results ago, the oldest first and a
        bounded number at once. Requests that replay may need, and requests whose spent position
        their model has not passed yet, are kept.

        Forgets sessions that have ended and gave no sign of life for their retention, a bounded
        number at once, together with their models' records, lanes and curves. A model that a worker
        still has to unload, or that has checkpoints, is forgotten once it is unloaded and its last
        checkpoint is deleted.

        A time stamp in the future is from before the clock was set back. It is moved back by
        ``set_back_s``, and if that is not enough, to now; otherwise what it belongs to would last
        longer by that much.

        Works in steps of bounded time: other calls are served between them.
        """
        ...

    async def usage(
        self, tenant: str | None = None, since_s: float = 0.0, before_s: float = math.inf
    ) -> list[TenantUsage]:
        """Return the usage of all tenants, or of one, sorted by name.

        The days (UTC) from that of ``since_s`` on count, if they begin before ``before_s``.
        """
        ...

    async def curve(self, model_id: str, *, after: int = -1) -> list[CurvePoint]:
        """Return the kept points of a model's curve behind the position ``after``, in order.

        A long curve keeps only every n-th point and the newest (see ``usage.stride``). The points
        stay as long as the model's record.
        """
        ...

    async def request(self, request_id: str) -> RequestState | None: ...

    async def kept_requests(self, tenant: str, scope: str, *, limit: int) -> list[KeptRequest]:
        """Return the kept requests among the ``limit`` with the highest ``seq``, in that order.

        ``scope`` is that of the jobs: a model, a sampling session, or for creations a session.
        """
        ...

    async def stats(self) -> StoreStats: ...

    async def base_models(self) -> list[ServedModel]:
        """Return every base model that a worker has ever leased with, sorted by name."""
        ...

    async def files_in_use(self) -> set[str]:
        """Return the file ids that something in the store names: a checkpoint, a sampler, a kept
        recovery point, an unfinished job, or a logged load that no recovery point covers."""
        ...

    async def released_files(self) -> set[str]:
        """Return the released file ids that ``forget_released`` has not forgotten yet.

        These are ids that a recovery point, a checkpoint or a sampler no longer names, and ids of
        failed saves. A file may still be in use, or be in use again.
        """
        ...

    async def forget_released(self, file_ids: Iterable[str]) -> None:
        """Forget these released file ids, because their files are deleted."""
        ...

    async def secret(self) -> bytes:
        """Return the random bytes made with the store; they sign request ids and download URLs."""
        ...

    async def seat(self) -> str:
        """Return a text that identifies the store's place.

        It differs for a copy of the store and for a Redis that was started again, and is the same
        for all processes that have the store open.
        """
        ...
