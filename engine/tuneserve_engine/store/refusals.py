"""The decisions that every store shares: ids, limits, and the messages of refused requests."""

import base64
import hashlib
import hmac
import math
from collections.abc import Sequence

import msgspec

from tuneserve_engine.core.jobs import Job, JobKind, Rejection
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import (
    RECORD_NAME,
    ModelRecord,
    ModelStatus,
    Record,
    SamplerRecord,
    SessionRecord,
    TenantRecord,
)
from tuneserve_engine.store.base import CheckpointUsage
from tuneserve_engine.store.errors import LimitReached

ALIVE = (ModelStatus.CREATING, ModelStatus.READY)
FORGOTTEN_AT_ONCE = 10_000  # the most requests that one sweep forgets, to bound its pause
MOST_DEATHS = 12
"""The number of workers that may die with a request, by any cause, before the request fails.

Kills from outside count too: the kernel kills a worker that runs out of memory, and the request may
be the one that takes the memory. Four times the default of ``job_attempts``.
"""
TAKE_BYTES = 64 * 2**20  # the most payload bytes of one take, unless one job is larger
RECORDINGS_BYTES = 16 * 2**20  # the most bytes of one answer, unless one recording is larger
RECORDING_BYTES = 512  # added to the size of each recording, for its row
DROPPED_AT_ONCE = 1000  # the most recordings that one step of the sweep drops
DROPPED_BYTES = 32 * 2**20  # the most bytes of recordings that one step drops
RECORDS_AT_ONCE = 200  # the most records of ended sessions that one step forgets
ENDED_AT_ONCE = 4000  # the most records of ended sessions that one sweep forgets
MINUTE_S, HOUR_S = 60.0, 3600.0
_AHEAD_RETRY_S = 5
_SESSIONS_RETRY_S = 30
ACKNOWLEDGED_AT_ONCE = 1000  # the most results that one step drops: other calls wait meanwhile


def request_id(secret: bytes, job: Job) -> str:
    """Return the job's id: the same for the same key, and not guessable without the secret."""
    key = msgspec.json.encode([job.tenant, job.scope, job.kind, job.seq])
    digest = hmac.digest(secret, key, hashlib.sha256)
    return "req_" + base64.b32encode(digest)[:26].decode().lower()


def digest(body: bytes) -> bytes:
    """Return the digest of a result, to check that replay gives the same result."""
    return hashlib.blake2b(body, digest_size=16).digest()


def reused(job: Job, earlier: str) -> str:
    return (
        f"seq_id {job.seq} of {job.scope} was already used for {earlier}; this request is for "
        f"{job.kind}; send it with the next seq_id"
    )


def dead_model(model: ModelRecord, kind: JobKind) -> Rejection | None:
    """Return why a job of this kind cannot run on the model; None if it can."""
    if model.status is ModelStatus.ENDED and kind is not JobKind.UNLOAD_MODEL:
        return Rejection(
            f"model {model.key} has ended with its session; create a new session and load your "
            "last checkpoint"
        )
    if model.status is ModelStatus.FAILED:
        return failed(model.key)
    return lost(model.key) if model.status is ModelStatus.LOST else None


def failed(model_id: str) -> Rejection:
    return Rejection(f"model {model_id} does not exist: its creation failed; create another model")


def lost(model_id: str) -> Rejection:
    return Rejection(
        f"model {model_id} cannot be restored: its recovery points and log could not be read; "
        "create a new model from your last checkpoint, and tell the operator: the worker's log "
        "names the file",
        "server",
    )


def no_room(model_id: str) -> Rejection:
    return Rejection(
        f"there is no room to restore model {model_id} at the moment; the model is unchanged, and "
        "this request was not carried out; send it again with a new seq_id after other models "
        "have been parked, or tell the operator: the worker's log gives the reason",
        "server",
    )


def fatal(workers: int | str) -> Rejection:
    return Rejection(
        f"{workers} workers stopped while they ran this request; it is not tried again, because "
        "it may be the cause; make the request smaller, and tell the operator: the worker's log "
        "says why it stopped",
        "server",
    )


def ended_session(session: SessionRecord) -> Rejection:
    return Rejection(
        f"session {session.key} has ended ({session.ended}); create a new session and continue "
        "there"
    )


def gap_at_end(session_key: str, reason: str) -> Rejection:
    return Rejection(
        f"session {session_key} ended ({reason}) while this request was waiting for an earlier "
        "seq_id, or for room for its model; send it again in a new session"
    )


def silent(session_key: str, ttl_s: float) -> Rejection:
    return Rejection(
        f"session {session_key} was silent for {ttl_s:g} s while this sample was waiting, so the "
        "sample was dropped; keep the client running, because its heartbeats keep samples alive, "
        "and submit the sample again with a new seq_id"
    )


def cancelled() -> Rejection:
    return Rejection(
        "this sample was cancelled before it ended, and nothing of it is stored; submit it again "
        "with a new seq_id if you still need it"
    )


def too_late(job: Job, next_seq: int) -> Rejection:
    """Return the rejection for a position that the model has passed.

    Either the wait for the position ended, or its request is forgotten.
    """
    if job.scope != job.model_id:
        return Rejection(
            f"model {job.model_id} was created long ago, and the answer is no longer stored; "
            "continue with the model, or create another one"
        )
    return Rejection(
        f"seq_id {job.seq} of {job.scope} arrived after the server had stopped waiting for it, or "
        f"was answered long ago; the next seq_id is {next_seq}; send the request with a new one"
    )


def gap(missing: Sequence[tuple[int, int]], waited_s: float) -> Rejection:
    """Return the rejection for requests held behind ``missing``, the inclusive ranges of seq_ids
    not received."""
    names = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in missing[:5])
    more = f" and {len(missing) - 5} more ranges" if len(missing) > 5 else ""
    return Rejection(
        f"seq_id {names}{more} did not arrive within {waited_s:g} s, so the requests after it "
        "were not carried out; send them again with new seq_ids, in order"
    )


def checkpoint_exists(key: str) -> Rejection:
    return Rejection(f"checkpoint {key} already exists; pass overwrite=true or choose another name")


# --- limits ---------------------------------------------------------------------------------------


def most_kept(own: TenantRecord | None, policy: StorePolicy) -> CheckpointUsage:
    """Return the number and the total bytes of checkpoints that a tenant may keep."""
    count = own.max_checkpoints if own is not None else None
    size = own.max_checkpoint_bytes if own is not None else None
    return CheckpointUsage(
        policy.tenant_checkpoints if count is None else count,
        policy.tenant_checkpoint_bytes if size is None else size,
    )


def keeps_too_much(
    kept: CheckpointUsage, most: CheckpointUsage, needed_bytes: int = 0
) -> Rejection | None:
    """Return why a tenant may not keep one more checkpoint; None if it may.

    ``needed_bytes`` is the known size of the new checkpoint, or 0.
    """
    way_out = (
        "delete some, set a ttl_seconds on them, or end sessions whose unnamed sampler saves you "
        "no longer need, and save again"
    )
    coming = f", and {kept.coming} more are being saved" if kept.coming else ""
    if kept.count >= most.count:
        return Rejection(
            f"you have {kept.count - kept.coming} checkpoints{coming}; this server keeps up to "
            f"{most.count} of yours; {way_out}"
        )
    if kept.size_bytes >= most.size_bytes:
        return Rejection(
            f"your checkpoints have {kept.size_bytes} bytes{coming}; the limit is "
            f"{most.size_bytes} bytes; {way_out}"
        )
    if kept.size_bytes + needed_bytes > most.size_bytes:
        return Rejection(
            f"your checkpoints have {kept.size_bytes} bytes and this one would have {needed_bytes}"
            f"{coming}; this server keeps up to {most.size_bytes} bytes of yours; {way_out}"
        )
    return None


def too_many_jobs(whose: str, limit: int, retry_after_s: int) -> LimitReached:
    return LimitReached(
        f"{whose} has {limit} unfinished requests, which is the limit; nothing was accepted; wait "
        "until some have ended and send this one again",
        retry_after_s,
    )


def too_many_bytes(
    whose: str, size: int, held: int, limit: int, retry_after_s: int
) -> LimitReached:
    return LimitReached(
        f"{whose} has {held} bytes of unfinished requests; with the {size} bytes of this one it "
        f"would exceed the limit of {limit}; nothing was accepted; wait until some have ended and "
        "send it again",
        retry_after_s,
    )


def too_many_models(limit: int, waiting: int) -> LimitReached:
    return LimitReached(
        f"you have {limit} models in use, which is the limit, and too few of them are idle to be "
        f"parked; {waiting} more wait to be created, which is the limit too; nothing was "
        "accepted; wait until a model's requests have ended, or end a session that you no longer "
        "need, and send this again",
        5,
    )


def waits_for_room(limit: int) -> str:
    """Return the reason why a new model is not created yet."""
    return (
        f"{limit} models are in use, which is the limit of your key, and too few of them are idle "
        "to be parked; the new model is created as soon as the requests or the session of one of "
        "them have ended"
    )


def check_window(job: Job, following: int, policy: StorePolicy) -> None:
    """Raise ``LimitReached`` for a job too far ahead of the first missing position."""
    if job.position is None or job.position - following < policy.model_window:
        return
    missing = following + job.seq - job.position
    raise LimitReached(
        f"seq_id {job.seq} of {job.scope} is {job.seq - missing} ahead of {missing}, which has not "
        f"arrived, and the limit is {policy.model_window - 1}; nothing was accepted; send the "
        "earlier requests first, then this one again",
        _AHEAD_RETRY_S,
    )


def level_of_refusals(level_s: float, now_s: float, policy: StorePolicy) -> tuple[float, float]:
    """Count one more refused request of a tenant in a leaky bucket.

    Returns the new level, as the time at which the bucket will be empty, and the seconds to wait if
    the request would overflow the bucket, otherwise 0.
    """
    full_s = now_s + HOUR_S
    level_s = max(min(level_s, full_s), now_s) + HOUR_S / policy.tenant_refusals
    return min(level_s, full_s), max(level_s - full_s, 0.0)


def too_many_refusals(why: Rejection, limit: int, wait_s: float) -> LimitReached:
    retry_after_s = max(1, math.ceil(wait_s))
    return LimitReached(
        f"{limit} of your requests were refused within an hour, which is the limit; this one is "
        f"refused too and was not stored, so its seq_id is still missing: {why.message[:500]}; "
        f"correct it and send it again in {retry_after_s} s",
        retry_after_s,
    )


def check_sessions(of_all: int, of_tenant: int, policy: StorePolicy) -> None:
    """Raise ``LimitReached`` if the server or the tenant is at its limit of open sessions."""
    for whose, count, limit in (
        ("the server", of_all, policy.server_sessions),
        ("your key", of_tenant, policy.tenant_sessions),
    ):
        if count >= limit:
            raise LimitReached(
                f"{whose} has {count} sessions that have not ended, and the limit is {limit}; "
                "nothing was created; end sessions that you no longer need, or wait until silent "
                "ones expire, and send this again",
                _SESSIONS_RETRY_S,
            )


def check_samplers(session: str, of_session: int, of_tenant: int, policy: StorePolicy) -> None:
    """Raise ``LimitReached`` if the session or the tenant is at its limit of samplers."""
    for whose, count, limit, way_out in (
        (
            *(f"session {session}", of_session, policy.session_samplers),
            "sample with an existing one, or continue in a new session",
        ),
        (
            *("your key", of_tenant, policy.tenant_samplers),
            "sample with an existing one, or end sessions that you no longer need",
        ),
    ):
        if count >= limit:
            raise LimitReached(
                f"{whose} has {count} sampling sessions, and the limit is {limit}; nothing was "
                f"created; {way_out}, and send this again",
                _SESSIONS_RETRY_S,
            )


def rate_of(new: Record, policy: StorePolicy) -> int:
    """Return how many records like this a tenant may create within a minute; 0 means no limit."""
    if isinstance(new, SessionRecord):
        return policy.tenant_sessions_a_minute
    return policy.tenant_samplers_a_minute if isinstance(new, SamplerRecord) else 0


def check_rate(new: Record, policy: StorePolicy, passed_s: float) -> None:
    """Raise ``LimitReached`` if the tenant creates such records too fast.

    ``passed_s`` is the time in seconds in which the tenant created its last ``rate_of`` records; it
    must be at least a minute.
    """
    if not 0 <= passed_s < MINUTE_S:  # below zero: the clock was set back
        return
    what, retry_after_s = RECORD_NAME[type(new)], max(1, math.ceil(MINUTE_S - passed_s))
    raise LimitReached(
        f"you created {rate_of(new, policy)} {what}s within a minute, which is the limit; nothing "
        f"was created; send this again in {retry_after_s} s, and use one {what} for many requests",
        retry_after_s,
    )


def other_revision(base_model: str, known: str, revision: str) -> str:
    """Return why a worker with this revision of the base model gets no lease."""
    return (
        f"this worker has revision {revision} of base model {base_model!r}, but this store knows "
        f"that name by revision {known}, which its models and checkpoints were trained with; start "
        f"the worker with --base-model-revision {known}, or serve {revision} under another "
        "base_model_name"
    )
