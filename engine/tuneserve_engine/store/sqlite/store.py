"""The default store: SQLite in the API process, with no server to start.

One connection in one thread owns the file (``group_commit``). ``SqlStore`` is the event loop's side
of it: it keeps the waiting calls and wakes them after the commits that concern them.
"""

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar, TypeVarTuple

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, Outcome
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.core.records import Record, SamplerRecord, Update
from tuneserve_engine.core.usage import CurvePoint, TenantUsage
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import (
    UNCHECKED,
    CheckpointUsage,
    Completion,
    KeptRequest,
    Lease,
    LogEntry,
    Page,
    R,
    RecoveryPoint,
    Renewal,
    RequestState,
    SamplerClient,
    ServedModel,
    Soundness,
    StoreStats,
    Submitted,
)
from tuneserve_engine.store.errors import StoreDamaged, StoreFailed, StoreUnusable
from tuneserve_engine.store.pubsub import Subscription, TokenBroker
from tuneserve_engine.store.seat import seat_of
from tuneserve_engine.store.sqlite import finish as finishing
from tuneserve_engine.store.sqlite import (
    jobs,
    leases,
    lifecycle,
    limits,
    recordings,
    records,
    retention,
    samples,
)
from tuneserve_engine.store.sqlite import recovery_points as points
from tuneserve_engine.store.sqlite import usage as usages
from tuneserve_engine.store.sqlite.database import LOG_BYTES, open_database
from tuneserve_engine.store.sqlite.group_commit import (
    CommitEvents,
    GroupCommit,
    Transaction,
)
from tuneserve_engine.store.sqlite.integrity import check_open_file, damaged, is_corruption
from tuneserve_engine.store.sqlite.reserve import Reserve, is_full
from tuneserve_engine.store.sqlite.schema import SECRET
from tuneserve_engine.store.sqlite.trimming import date_back, trim
from tuneserve_engine.store.waiters import KeyedWaiters

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
DEFAULT_POLICY = StorePolicy()
RECORD_BYTES = 1024
"""Roughly the size of a record, or of a job's row without its payload."""


class Committer(Protocol):
    """A runner of operations on its own database; large ones let others go first.

    It announces the changes of a commit before the callers resume.
    """

    def run_operation(
        self, operation: Callable[[Transaction, *Ts], T], *arguments: *Ts, grows_by: int = 0
    ) -> "asyncio.Future[T]": ...

    async def stop(self) -> None: ...


class SqlStore:
    """A ``Store`` in a SQLite database. Call its methods in one event loop; ``close`` it.

    A method that raises ``StoreFailed`` (a full disk, an I/O error) has changed nothing.
    """

    def __init__(self, policy: StorePolicy) -> None:
        self._commit: Committer
        self._policy = policy
        self._leases = leases.Leases(policy)
        self._waiting: dict[str, set[asyncio.Future[Outcome | None]]] = {}
        self._completed = KeyedWaiters()
        self._streams = TokenBroker()
        self._cancelled: dict[int, list[str]] = {}  # by epoch, until its next renewal
        self._news = asyncio.Event()  # replaced after each use: the old event wakes its waiters
        self._closed = False
        self._path = Path()
        self.soundness = UNCHECKED
        """The known condition of the store's file."""

    async def close(self) -> None:
        """Finish the calls made so far. Waiting ``wait`` calls return None; waiting takes raise."""
        self._closed = True
        await self._commit.stop()
        for waiting in list(self._waiting.values()):
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        self._completed.close()
        self._news.set()

    async def _call(
        self, operation: Callable[[Transaction, *Ts], T], *arguments: *Ts, grows_by: int = 0
    ) -> T:
        """Run an operation. A full disk refuses one that ``grows_by`` some bytes."""
        try:
            return await self._commit.run_operation(operation, *arguments, grows_by=grows_by)
        except sqlite3.Error as error:
            if is_corruption(error):
                self._note_damage(damaged(self._path, str(error)))
                raise StoreDamaged(f"{self.soundness.detail}; nothing was changed") from error
            raise StoreFailed(
                f"the store failed: {error}; nothing was changed; free some disk space or check "
                "the disk, and try again"
            ) from error

    def _note_damage(self, found: Soundness) -> None:
        if self.soundness.state != "damaged":
            self.soundness = found
            logger.error("%s; until then no new requests are accepted", found.detail)

    def _announce(self, news: CommitEvents) -> None:
        for outcome in news.ended:
            for future in self._waiting.get(outcome.request_id, ()):
                if not future.done():
                    future.set_result(outcome)
        if news.completed:
            self._completed.wake(news.completed)
        for epoch, request_id in news.cancelled:
            self._cancelled.setdefault(epoch, []).append(request_id)
        for epoch in news.over:
            self._cancelled.pop(epoch, None)
        if news.take:
            self._news.set()
            self._news = asyncio.Event()

    # --- jobs -----------------------------------------------------------------------------------

    async def submit(self, job: Job, *new_records: Record) -> Submitted:
        size = RECORD_BYTES + len(job.payload)
        return await self._call(jobs.submit, self._policy, job, new_records, grows_by=size)

    async def take_jobs(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        while True:
            news = self._news  # taken before the read: jobs released during the read wake us too
            found = await self._call(jobs.take_jobs, epoch, after, max_jobs)
            if found:
                return found
            await news.wait()

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        await self._call(finishing.finish, epoch, outcomes)

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None:
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(request_id, set())
        waiting.add(future)
        try:
            known = await self._call(jobs.outcome, request_id)
            if known is not None:
                return known
            if not self._closed:
                await asyncio.wait([future], timeout=timeout_s)
            return future.result() if future.done() else None
        finally:
            waiting.discard(future)
            if not waiting:
                del self._waiting[request_id]

    async def publish_tokens(self, parts: dict[str, list[EncodedTokenDelta]]) -> None:
        self._streams.publish(parts)

    def subscribe(self, streams: Iterable[str]) -> Subscription:
        return self._streams.subscribe(streams)

    async def job_key(self, request_id: str) -> tuple[str, str] | None:
        return await self._call(jobs.job_key, request_id)

    async def cancel(self, request_id: str) -> bool:
        return await self._call(samples.cancel, request_id)

    async def completions(
        self, client: SamplerClient, *, after: int, limit: int, timeout_s: float
    ) -> list[Completion]:
        async def look() -> list[Completion]:
            return await self._call(samples.completions, client, after, limit)

        return await self._completed.found(client, look, timeout_s)

    async def acknowledge(self, client: SamplerClient, request_ids: Sequence[str]) -> None:
        most = refusals.ACKNOWLEDGED_AT_ONCE
        for start in range(0, len(request_ids), most):
            await self._call(samples.acknowledge, client, request_ids[start : start + most])

    async def join_sampler(self, sampler_key: str) -> int | None:
        return await self._call(samples.join_sampler, sampler_key)

    async def recordings(self, tenant: str, samples: Sequence[SampleKey]) -> list[bytes | Gone]:
        return await self._call(recordings.read_recordings, tenant, samples)

    # --- workers and their models ---------------------------------------------------------------

    async def lease(self, name: str, owner: str, info: BaseModelInfo, speed: float = 1.0) -> Lease:
        return await self._call(self._leases.lease, name, owner, info, speed)

    async def renew(self, epoch: int, metrics: dict[str, float] | None = None) -> Renewal:
        leaving, weights = await self._call(self._leases.renew, epoch, metrics)
        return Renewal(leaving, self._cancelled.pop(epoch, []), weights)

    async def note_running(self, epoch: int, request_ids: Sequence[str]) -> None:
        await self._call(self._leases.note_running, epoch, request_ids)

    async def recovery_points(self, epoch: int, model_id: str) -> list[RecoveryPoint]:
        return await self._call(points.recovery_points, epoch, model_id)

    async def read_log(self, epoch: int, model_id: str, *, start: int) -> list[LogEntry]:
        return await self._call(jobs.read_log, epoch, model_id, start)

    async def save_point(self, epoch: int, point: RecoveryPoint) -> None:
        await self._call(points.save_point, epoch, point)

    async def unassign(self, epoch: int, model_id: str) -> None:
        await self._call(leases.unassign, epoch, model_id)

    async def resign(self, epoch: int) -> None:
        await self._call(self._leases.resign, epoch)

    async def killed(self, name: str) -> None:
        await self._call(self._leases.killed, name)

    async def base_models(self) -> list[ServedModel]:
        return await self._call(self._leases.base_models)

    # --- what was used --------------------------------------------------------------------------

    async def usage(
        self, tenant: str | None = None, since_s: float = 0.0, before_s: float = math.inf
    ) -> list[TenantUsage]:
        return await self._call(usages.usage, tenant, since_s, before_s)

    async def curve(self, model_id: str, *, after: int = -1) -> list[CurvePoint]:
        return await self._call(usages.curve, model_id, after)

    async def request(self, request_id: str) -> RequestState | None:
        return await self._call(usages.request, request_id)

    async def kept_requests(self, tenant: str, scope: str, *, limit: int) -> list[KeptRequest]:
        return await self._call(usages.kept_requests, tenant, scope, limit)

    async def stats(self) -> StoreStats:
        return await self._call(usages.store_stats)

    # --- records --------------------------------------------------------------------------------

    async def put_record(self, record: Record) -> None:
        await self._call(records.put_record, record, grows_by=RECORD_BYTES)

    async def put_new_record(self, record: R) -> R:
        return await self._call(
            lambda tx: limits.put_new(tx, self._policy, record), grows_by=RECORD_BYTES
        )

    async def update_record(self, *updates: Update) -> None:
        await self._call(lambda tx: [records.update_record(tx, each) for each in updates])

    async def get_record(self, record_type: type[R], key: str) -> R | None:
        return await self._call(lambda tx: records.get_record(tx, record_type, key))

    async def page_of_records(
        self,
        record_type: type[R],
        *,
        tenant: str | None = None,
        parent: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Page[R]:
        return await self._call(
            lambda tx: records.page_of_records(tx, record_type, tenant, parent, (limit, offset))
        )

    async def checkpoint_usage(self, tenant: str, key: str = "") -> CheckpointUsage:
        return await self._call(limits.kept, tenant, key)

    async def unnamed_saves(self, tenant: str) -> list[SamplerRecord]:
        return await self._call(records.unnamed_saves, tenant)

    async def delete_record(self, record_type: type[R], key: str) -> None:
        await self._call(lambda tx: retention.delete(tx, record_type, key))

    # --- the rest -------------------------------------------------------------------------------

    async def end_session(self, key: str, reason: str) -> None:
        most = refusals.RECORDS_AT_ONCE
        while await self._call(lifecycle.end_session, key, reason, most) == most:
            pass

    async def sweep(self, now_s: float, policy: SweepPolicy) -> None:
        try:
            await date_back(self._call, now_s, policy.set_back_s)
            await self._call(lifecycle.sweep, now_s, policy, self._policy)
        finally:  # also on a full disk, where trimming makes room for the rest
            await trim(self._call, now_s, policy)

    async def files_in_use(self) -> set[str]:
        return await self._call(lifecycle.files_in_use)

    async def released_files(self) -> set[str]:
        return await self._call(lifecycle.released_files)

    async def forget_released(self, file_ids: Iterable[str]) -> None:
        await self._call(lifecycle.forget_released, list(file_ids))

    async def secret(self) -> bytes:
        return await self._call(lambda tx: bytes(tx.execute(SECRET).fetchone()[0]))

    async def seat(self) -> str:
        return seat_of(self._path)


class SqliteStore(SqlStore):
    """A store in one file: changes are durable before any method returns."""

    durability: Final = "always"

    _checking: "asyncio.Task[None] | None" = None

    @classmethod
    async def open(  # noqa: PLR0913
        cls,
        path: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        policy: StorePolicy = DEFAULT_POLICY,
        trace: Callable[[str], None] | None = None,
        reserve_bytes: int = 0,
        check_s: float = 0.0,
    ) -> Self:
        """Open the store at ``path``, created if missing.

        ``trace`` gets every SQL statement. ``reserve_bytes`` of the disk are set aside beside the
        file (see ``Reserve``). The file is checked in the background, for at most ``check_s``.
        Raises ``StoreUnusable``.
        """
        store = cls(policy)
        store._path = Path(path)
        reserve = Reserve(store._path.with_suffix(".reserve"), reserve_bytes)
        store._commit = commit = GroupCommit(clock, store._announce, reserve)
        await commit.start(partial(_open, store._path, trace, reserve, for_check=check_s > 0))
        if check_s > 0 and await store._call(lambda tx: tx.holds_file()):
            store.soundness = Soundness("checking")
            store._checking = asyncio.create_task(store._check(check_s))
        return store

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        await super().close()

    async def _check(self, limit_s: float) -> None:
        """Find out whether the file is sound, while the store serves calls."""
        began_s, was_held = time.monotonic(), True
        try:
            found = await check_open_file(self._path, limit_s=limit_s)
        except OSError as error:
            found = Soundness("unchecked", f"its check could not be started: {error}")
        finally:
            with suppress(StoreFailed, ConnectionError):
                was_held = await self._call(lambda tx: tx.write_into_file())
        if not was_held:  # the file changed while the check read it
            found = Soundness("unchecked", "its disk became full during its check")
        if found.state == "damaged":
            self._note_damage(found)
        elif self.soundness.state == "checking":  # no request has met damage meanwhile
            self.soundness = found
            told = found.detail or f"sound, found in {time.monotonic() - began_s:.1f} s"
            logger.info("the store's file is %s: %s", found.state, told)


def _open(
    path: Path, trace: Callable[[str], None] | None, reserve: Reserve, *, for_check: bool
) -> sqlite3.Connection:
    """Open the database as ``open_database`` does; on a full disk, in the space of the reserve."""
    try:
        connection = open_database(path, trace, for_check=for_check)
    except StoreUnusable as error:
        if not (is_full(error.__cause__) and reserve.give()):
            raise
        connection = open_database(path, trace, for_check=for_check)
    reserve.lengthen(path.with_name(f"{path.name}-wal"), LOG_BYTES)
    return connection
