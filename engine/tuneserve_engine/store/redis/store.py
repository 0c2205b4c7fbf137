"""The store for several hosts: a Redis server that every process opens.

There is one Lua script per step (``scripts``). ``RedisStore`` turns calls into steps, refusals into
messages, and the server's messages into results for waiting calls.
"""

import hashlib
import heapq
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import msgspec

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import EncodedTokenDelta, Job, Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.core.records import (
    RECORD_NAME,
    ModelRecord,
    Record,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.core.usage import (
    DAY_S,
    MOST_POINTS,
    CurvePoint,
    PointKind,
    TenantUsage,
    day_of,
)
from tuneserve_engine.process.failpoints import failpoint
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
from tuneserve_engine.store.errors import Fenced, KeyReused, StoreFailed, StoreUnusable
from tuneserve_engine.store.pubsub import Subscription
from tuneserve_engine.store.redis import encoding as forms
from tuneserve_engine.store.redis import usage as usages
from tuneserve_engine.store.redis.connection import Server
from tuneserve_engine.store.redis.limits import check_limits
from tuneserve_engine.store.redis.notifications import RedisNotifications
from tuneserve_engine.store.redis.sweep import end_session, sweep
from tuneserve_engine.store.seat import seat_named

logger = logging.getLogger(__name__)

Durability = Literal["always", "asserted"]
DEFAULT_POLICY = StorePolicy()
_READ_AT_ONCE = 500  # requests


class RedisStore:
    """A ``Store`` in a Redis server.

    ``open`` it, call its methods in one event loop, and ``close`` it. Any number of processes may
    have it open.

    A method that raises ``ConnectionError`` may or may not have changed something. It can be called
    again, and has its effect only once.
    """

    def __init__(self, server: Server, clock: Callable[[], float] | None, policy: StorePolicy):
        self._server = server
        self._clock = clock
        self._policy = policy
        self._secret = b""
        self._news = RedisNotifications(server)
        self._lease_policy = forms.pack(
            {
                "ttl": policy.lease_ttl_s,
                "attempts": policy.job_attempts,
                "deaths": max(refusals.MOST_DEATHS, policy.job_attempts),
                "fatal": refusals.fatal("\n").message.split("\n"),
                "failed": refusals.failed("\n").message.split("\n"),
            }
        )

    @classmethod
    async def open(  # noqa: PLR0913 - all by name
        cls,
        url: str,
        *,
        clock: Callable[[], float] | None = None,
        policy: StorePolicy = DEFAULT_POLICY,
        prefix: str = "tuneserve",
        durability_asserted: bool = False,
        before_new: Callable[[], None] = lambda: None,
    ) -> Self:
        """Open the store at ``url``. Creates a new one unless ``before_new`` raises.

        Without a ``clock``, the time is the server's, which is the same for all hosts. Raises
        ``StoreUnusable``, and ``ConnectionError`` if no server answers.
        """
        server = Server(url, prefix, durability_asserted)
        store = cls(server, clock, policy)
        try:
            await server.check()
            if await server.run_script("format") is None:
                before_new()
            await store._make()
            await store._news.start()
        except StoreFailed as error:
            await store.close()
            raise StoreUnusable(str(error)) from error
        except BaseException:
            await store.close()
            raise
        return store

    async def _make(self) -> None:
        """Create the store if it is new. Raises ``StoreUnusable`` for another format."""
        found, secret = await self._run("open", forms.FORMAT, secrets.token_bytes(32))
        forms.check_format(found)
        self._secret = secret
        self._server.identity = hashlib.sha1(secret, usedforsecurity=False).hexdigest()

    @staticmethod
    async def check(
        url: str, *, prefix: str = "tuneserve", durability_asserted: bool = False
    ) -> Durability:
        """Return why a store at ``url`` would keep accepted data. Raises like ``open``, and creates
        nothing."""
        server = Server(url, prefix, durability_asserted)
        try:
            await server.check()
            found = await server.run_script("format")
            forms.check_format(str(forms.FORMAT).encode() if found is None else found)
            return server.checker.durability
        finally:
            await server.close()

    async def close(self) -> None:
        """Close the store. Waiting ``wait`` calls return None; waiting takes raise."""
        await self._news.stop()
        await self._server.close()

    @property
    def soundness(self) -> Soundness:
        return UNCHECKED

    @property
    def durability(self) -> Durability:
        """The reason to trust that an accepted request is on disk: Redis's settings, or the
        operator's word."""
        return self._server.checker.durability

    async def _run(self, step: str, *args: Any) -> Any:
        """Run a script and return its answer."""
        self._news.check_open()
        now = "" if self._clock is None else repr(self._clock())
        return await self._server.run_script(step, *args, now=now)

    async def _run_leased(self, step: str, epoch: int, *args: Any) -> Any:
        """Run a worker's script and return its answer. Raises ``Fenced`` if the lease is over."""
        answer = await self._run(step, epoch, *args)
        if answer[0] != b"fenced":
            return answer[1] if len(answer) > 1 else None
        if len(answer) > 1:
            raise Fenced(
                f"request {answer[1].decode()} is not placed with lease epoch {epoch} any more: "
                "its model was given up, or moved; stop this worker"
            )
        raise Fenced(
            f"lease epoch {epoch} is over: another process has this worker's name, or it was "
            "silent for too long and others have its models; stop this worker"
        )

    # --- jobs -----------------------------------------------------------------------------------

    async def submit(self, job: Job, *records: Record) -> Submitted:
        request_id = refusals.request_id(self._secret, job)
        new = [forms.with_parent(each) for each in records]
        limits = forms.pack(forms.limits(self._policy))
        while True:
            packed = forms.pack(forms.job(job, request_id))
            failpoint("store-before-commit")
            answer = await self._run("submit", packed, job.payload, forms.pack(new), limits)
            failpoint("store-after-commit")
            if answer[0] in (b"accepted", b"waits"):
                return Submitted(request_id, duplicate=False, waits=answer[0] == b"waits")
            if answer[0] == b"known":
                known, kind = answer[1].decode(), answer[2].decode()
                if kind != job.kind:
                    raise KeyReused(refusals.reused(job, kind))
                return Submitted(known, duplicate=True)
            job = replace(job, rejection=await self._refusal(job, records, answer))

    async def _refusal(self, job: Job, records: Sequence[Record], answer: list[Any]) -> Rejection:
        """Return the rejection for the rule by which the script refused the job.

        Raises ``LimitReached`` for a limit. Raises ``ConnectionError`` if the session or model that
        the rule was about has changed meanwhile: then the client may send the job again.
        """
        rule = answer[0]
        check_limits(job, answer, self._policy)
        if rule == b"late":
            return refusals.too_late(job, int(answer[1]) + job.seq - (job.position or 0))
        if rule == b"keeps":
            count, size, coming, *most = map(int, answer[1:])
            found = refusals.keeps_too_much(
                CheckpointUsage(count, size, coming), CheckpointUsage(*most)
            )
        elif rule == b"ended":
            session = await self.get_record(SessionRecord, answer[1].decode())
            found = None if session is None else refusals.ended_session(session)
        else:
            model = await self.get_record(ModelRecord, job.model_id or "")
            found = None if model is None else refusals.dead_model(model, job.kind)
        if found is None:
            raise ConnectionError(
                "the store changed while the request was looked at; send it again"
            )
        return found

    async def job_key(self, request_id: str) -> tuple[str, str] | None:
        tenant, scope = await self._run("job_key", request_id)
        return None if tenant is None else (tenant.decode(), scope.decode())

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None:
        self._news.check_open()
        return await self._news.outcome(request_id, timeout_s)

    def subscribe(self, streams: Iterable[str]) -> Subscription:
        return self._news.streams.subscribe(streams)

    # --- clients that sample --------------------------------------------------------------------

    async def cancel(self, request_id: str) -> bool:
        rejection = refusals.cancelled()
        (found,) = await self._run("cancel", request_id, rejection.message, rejection.category)
        if found == b"unknown":
            raise KeyError(request_id)
        return bool(found == b"sample")

    async def completions(
        self, client: SamplerClient, *, after: int, limit: int, timeout_s: float
    ) -> list[Completion]:
        async def look() -> list[Completion]:
            rows = await self._run("completions", forms.client(client), after, limit)
            return [forms.read_completion(row) for row in rows]

        return await self._news.completed.found(forms.client_in_news(client), look, timeout_s)

    async def acknowledge(self, client: SamplerClient, request_ids: Sequence[str]) -> None:
        most = refusals.ACKNOWLEDGED_AT_ONCE
        for start in range(0, len(request_ids), most):
            chunk = request_ids[start : start + most]
            await self._run("acknowledge", forms.client(client), *chunk)

    async def join_sampler(self, sampler_key: str) -> int | None:
        number: int | None = await self._run("join", sampler_key)
        return number

    async def recordings(self, tenant: str, samples: Sequence[SampleKey]) -> list[bytes | Gone]:
        keys = [part for each in samples for part in (each.scope, str(each.seq))]
        found = await self._run("recordings_read", tenant, refusals.RECORDINGS_BYTES, *keys)
        return [body if is_kept else Gone(body.decode()) for is_kept, body in found]

    # --- the worker's half ----------------------------------------------------------------------

    async def lease(self, name: str, owner: str, info: BaseModelInfo, speed: float = 1.0) -> Lease:
        facts = msgspec.json.encode(info)
        epoch, resumed = await self._run(
            *("lease", name, owner, info.name, facts, self._lease_policy, info.revision),
            speed,
        )
        if epoch == b"other":
            known = resumed.decode()
            raise StoreUnusable(refusals.other_revision(info.name, known, info.revision))
        return Lease(epoch, resumed=bool(resumed))

    async def renew(self, epoch: int, metrics: dict[str, float] | None = None) -> Renewal:
        told = b"" if metrics is None else msgspec.json.encode(metrics)
        *lists, weights = await self._run_leased("renew", epoch, self._lease_policy, told)
        leaving, cancelled = ([each.decode() for each in found] for found in lists)
        return Renewal(leaving, cancelled, forms.read_weights(weights))

    async def take_jobs(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        while True:
            placed = self._news.placed  # taken before the read: jobs placed during it wake us too
            rows = await self._run_leased(
                "take", epoch, after, max_jobs, refusals.TAKE_BYTES, forms.pack(forms.JOB_FIELDS)
            )
            if rows:
                return [forms.read_job(row) for row in rows]
            await placed.wait()

    async def note_running(self, epoch: int, request_ids: Sequence[str]) -> None:
        await self._run_leased("begin", epoch, *request_ids)

    async def publish_tokens(self, parts: dict[str, list[EncodedTokenDelta]]) -> None:
        await self._run("progress", forms.pack(parts))

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        packed = forms.pack([forms.outcome(each) for each in outcomes])
        bodies = [b"" if each.rejection else each.body for each in outcomes]
        bodies += [each.recording for each in outcomes]
        failpoint("store-before-commit")
        limits = (MOST_POINTS, refusals.RECORDING_BYTES)
        await self._run_leased("finish", epoch, packed, *limits, *bodies)
        failpoint("store-after-commit")

    async def recovery_points(self, epoch: int, model_id: str) -> list[RecoveryPoint]:
        stored = await self._run_leased("points", epoch, model_id)
        return [forms.read_point(each) for each in stored]

    async def read_log(self, epoch: int, model_id: str, *, start: int) -> list[LogEntry]:
        fields = forms.pack(forms.JOB_FIELDS)
        rows = await self._run_leased("log", epoch, model_id, start, refusals.TAKE_BYTES, fields)
        return [forms.read_entry(row) for row in rows]

    async def save_point(self, epoch: int, point: RecoveryPoint) -> None:
        found = await self._run_leased(
            "save_point", epoch, point.model_id, point.position, forms.point(point)
        )
        if found is None:
            return
        reason, position = found[0].decode(), int(found[1])
        why = {
            "early": f"position {position} has not ended; finish it first",
            "passed": f"there is one at {position} already; save them in order",
        }
        raise ValueError(
            f"a recovery point of {point.model_id} at position {point.position}, but {why[reason]}"
        )

    async def unassign(self, epoch: int, model_id: str) -> None:
        await self._run_leased("release", epoch, model_id)

    async def resign(self, epoch: int) -> None:
        await self._run_leased("resign", epoch)

    async def killed(self, name: str) -> None:
        await self._run("killed", name, self._lease_policy)

    # --- what was used --------------------------------------------------------------------------

    async def usage(
        self, tenant: str | None = None, since_s: float = 0.0, before_s: float = math.inf
    ) -> list[TenantUsage]:
        of_tenant = [] if tenant is None else [tenant]
        rows = await self._run("used", day_of(since_s), f"({before_s / DAY_S}", *of_tenant)
        found = [usages.read_sums(name, days) for name, *days in rows]
        return sorted((each for each in found if each.by_model), key=lambda each: each.tenant)

    async def curve(self, model_id: str, *, after: int = -1) -> list[CurvePoint]:
        kinds: tuple[PointKind, ...] = get_args(PointKind)
        found = await self._run("curve", model_id, after, *kinds)
        return sorted(map(usages.read_curve_point, found), key=lambda each: each.position)

    async def request(self, request_id: str) -> RequestState | None:
        return usages.read_request(await self._run("request", request_id))

    async def kept_requests(self, tenant: str, scope: str, *, limit: int) -> list[KeptRequest]:
        newest: list[tuple[int, str]] = []  # the numbers and ids of requests
        cursor: bytes | None = None
        while cursor != b"0":
            cursor, rows = await self._run("seqs", tenant, scope, cursor or b"0")
            pairs = zip(rows[::2], rows[1::2], strict=True)
            newest += ((int(seq), request_id.decode()) for seq, request_id in pairs)
            newest = heapq.nlargest(limit, set(newest))  # a scan may return an entry twice
        newest.reverse()
        kept: list[KeptRequest | None] = []
        for start in range(0, len(newest), _READ_AT_ONCE):
            chunk = newest[start : start + _READ_AT_ONCE]
            rows = await self._run("kept_requests", *(request_id for _, request_id in chunk))
            kept += map(usages.read_kept_request, chunk, rows)
        return [each for each in kept if each is not None]

    async def stats(self) -> StoreStats:
        unfinished, logged, points, busy = await self._run("figures")
        pairs = zip(unfinished[::2], unfinished[1::2], strict=True)
        tenants = {name.decode(): jobs for name, jobs in pairs}
        return StoreStats(tenants, logged, points, frozenset(each.decode() for each in busy))

    # --- records --------------------------------------------------------------------------------

    async def put_record(self, record: Record) -> None:
        await self._run("put", forms.pack(forms.record(record)))

    async def put_new_record(self, record: R) -> R:
        rate = refusals.rate_of(record, self._policy)
        new = forms.pack(forms.with_tenant(record))
        what, *found = await self._run("create", new, forms.pack(self._policy), rate)
        if what == b"stored":
            return forms.read_record(type(record), found[0]) or record
        if what == b"sessions":
            refusals.check_sessions(found[0], found[1], self._policy)
        elif what == b"samplers":
            refusals.check_samplers(record.parent, found[0], found[1], self._policy)
        elif what == b"fast":
            refusals.check_rate(record, self._policy, float(found[0]))
        return record

    async def update_record(self, *updates: Update) -> None:
        await self._run("update", forms.pack([forms.update(each) for each in updates]))

    async def get_record(self, record_type: type[R], key: str) -> R | None:
        fields = await self._run("get", RECORD_NAME[record_type], key)
        return forms.read_record(record_type, fields)

    async def page_of_records(
        self,
        record_type: type[R],
        *,
        tenant: str | None = None,
        parent: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Page[R]:
        listing = forms.listing(tenant, parent)
        total, rows = await self._run(
            "page", RECORD_NAME[record_type], listing, offset, -1 if limit is None else limit
        )
        items = (forms.read_record(record_type, row) for row in rows)
        return Page([item for item in items if item is not None], total)

    async def checkpoint_usage(self, tenant: str, key: str = "") -> CheckpointUsage:
        count, size, coming = await self._run("kept", tenant, forms.listed(tenant), key)
        return CheckpointUsage(count, int(size), coming)

    async def unnamed_saves(self, tenant: str) -> list[SamplerRecord]:
        rows = await self._run("unnamed_saves", tenant)
        found = (forms.read_record(SamplerRecord, row) for row in rows)
        return [each for each in found if each is not None]

    async def delete_record(self, record_type: type[R], key: str) -> None:
        await self._run("delete", RECORD_NAME[record_type], key)

    # --- the rest -------------------------------------------------------------------------------

    async def end_session(self, key: str, reason: str) -> None:
        await end_session(self, self._run, key, reason)

    async def sweep(self, now_s: float, policy: SweepPolicy) -> None:
        await sweep(self, self._run, now_s, policy, self._policy.tenant_models)

    async def base_models(self) -> list[ServedModel]:
        rows = await self._run("served", self._policy.lease_ttl_s)
        found = [
            ServedModel(
                msgspec.json.decode(info, type=BaseModelInfo),
                workers,
                float(seen_s),
                forms.read_metrics(told),
                samplers,
            )
            for _, info, workers, seen_s, told, samplers in rows
        ]
        return sorted(found, key=lambda each: each.info.name)

    async def files_in_use(self) -> set[str]:
        return forms.read_files(*await self._run("files"))

    async def released_files(self) -> set[str]:
        return {file_id.decode() for file_id in await self._run("released")}

    async def forget_released(self, file_ids: Iterable[str]) -> None:
        await self._run("forget_released", *file_ids)

    async def secret(self) -> bytes:
        return self._secret

    async def seat(self) -> str:
        return seat_named(self._server.checker.run_id)
