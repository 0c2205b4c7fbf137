"""The log of jobs in SQLite: how a job enters, is released, and ends.

States: ``held`` (waits for a missing position) → ``ready`` (released) → ``done`` → ``expired``
(result dropped) → forgotten. An ended job's row stays for a while, so that its key is known. After
that, the model's lane still rejects every position that it has passed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from tuneserve_client.wire.types import CLIENT_SEQS
from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import ModelRecord, Record, SessionRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import LogEntry, SamplerClient, Submitted
from tuneserve_engine.store.errors import KeyReused, ResultDropped
from tuneserve_engine.store.sqlite import limits, placement, records, retention
from tuneserve_engine.store.sqlite import recovery_points as points
from tuneserve_engine.store.sqlite import usage as usages
from tuneserve_engine.store.sqlite.group_commit import Row, Transaction
from tuneserve_engine.store.sqlite.schema import SECRET, UNFINISHED

# --- entering -----------------------------------------------------------------------------------


def submit(
    tx: Transaction, policy: StorePolicy, job: Job, new_records: Sequence[Record]
) -> Submitted:
    known = tx.execute(
        "SELECT request_id, kind FROM jobs WHERE tenant = ? AND scope = ? AND seq = ?",
        job.tenant,
        job.scope,
        job.seq,
    ).fetchone()
    if known is not None:
        if known[1] != job.kind:
            raise KeyReused(refusals.reused(job, known[1]))
        return Submitted(known[0], duplicate=True)

    rejection, position, following = job.rejection, job.position, 0
    if new_records:
        rejection = rejection or _ended_session(tx, new_records)
    model = None if job.model_id is None else records.get_record(tx, ModelRecord, job.model_id)
    if model is not None and model.status not in refusals.ALIVE:
        if dead := refusals.dead_model(model, job.kind):
            rejection, position = rejection or dead, None
    if position is not None:
        lane = tx.execute("SELECT next FROM lanes WHERE model_id = ?", job.model_id).fetchone()
        following = 0 if lane is None else lane[0]
        if position > following:
            refusals.check_window(job, following, policy)
        elif position < following:
            rejection = rejection or refusals.too_late(job, following + job.seq - position)
            position = None
    if job.saves is not None:
        rejection = rejection or limits.no_room_to_keep(tx, job.tenant, job.saves.key, policy)
    job = replace(job, rejection=rejection, position=position)

    waits = False
    if rejection is not None:
        limits.count_refusal(tx, job, rejection, policy)
    else:
        limits.check_jobs(tx, job, policy)
        if any(isinstance(record, ModelRecord) for record in new_records):
            waits = limits.must_wait(tx, job, policy)
        if model is not None:
            records.put_record(tx, replace(model, last_request_s=tx.now_s))
        for record in new_records:
            records.put_record(tx, record)
    request_id = _enter(tx, job)
    if position == following and job.model_id is not None and not waits:
        advance(tx, job.model_id, following)
    return Submitted(request_id, duplicate=False, waits=waits)


def _ended_session(tx: Transaction, new_records: Sequence[Record]) -> Rejection | None:
    """Return the rejection for a new model in an ended session; None if there is none.

    Such a model would never be unloaded.
    """
    for record in new_records:
        session = (
            records.get_record(tx, SessionRecord, record.parent)
            if isinstance(record, ModelRecord)
            else None
        )
        if session is not None and session.ended:
            return refusals.ended_session(session)
    return None


def _enter(tx: Transaction, job: Job) -> str:
    """Store a new job as held, as ended if it is rejected, or as ready if it has no position.

    Returns the job's request id.
    """
    (secret,) = tx.execute(SECRET).fetchone()
    request_id = refusals.request_id(secret, job)
    base_model = job.base_model
    if job.model_id is not None:
        # Only an accepted job marks the lane as in use.
        if job.rejection is None:
            lane = tx.execute(
                "UPDATE lanes SET park = 0, requested_s = ? WHERE model_id = ? "
                "RETURNING base_model",
                tx.now_s,
                job.model_id,
            ).fetchone()
        else:
            lane = tx.execute(
                "SELECT base_model FROM lanes WHERE model_id = ?", job.model_id
            ).fetchone()
        base_model = _new_lane(tx, job, job.model_id) if lane is None else lane[0]

    sequences = placement.count_sample(tx, job) if job.kind == JobKind.SAMPLE else None
    (n,) = tx.execute(
        "INSERT INTO jobs (request_id, tenant, kind, scope, seq, model_id, position, base_model, "
        "state, release, attempts, size, created_s, trace, saves, sequences) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'held', 0, 0, ?, ?, ?, ?, ?) RETURNING n",
        *(request_id, job.tenant, job.kind.value, job.scope, job.seq),
        *(job.model_id, job.position, base_model),
        *(len(job.payload), tx.now_s, job.trace or None),
        None if job.saves is None else job.saves.size_bytes,
        sequences,
    ).fetchone()
    if job.rejection is None:
        tx.execute("INSERT INTO payloads VALUES (?, ?)", n, job.payload)
    limits.count(tx, job.tenant, job.model_id, 1, len(job.payload))

    if job.rejection is not None:
        end_job(tx, Outcome(request_id, rejection=job.rejection))
    elif job.position is None or job.model_id is None:
        placement.release(tx, n, job.model_id, base_model)
    return request_id


def _new_lane(tx: Transaction, job: Job, model_id: str) -> str:
    """Make a lane for the job's model, and return the model's base model."""
    model = records.get_record(tx, ModelRecord, model_id)
    base_model = job.base_model if model is None else model.base_model
    tx.execute(
        "INSERT INTO lanes (model_id, tenant, base_model, next, park, jobs, bytes, requested_s) "
        "VALUES (?, ?, ?, 0, 0, 0, 0, ?)",
        model_id,
        job.tenant,
        base_model,
        tx.now_s,
    )
    return base_model


def unload(tx: Transaction, model: ModelRecord) -> None:
    """Queue the model's unload behind its log. No limit applies to it."""
    scope = f"{model.key}/unload"
    job = Job(model.tenant, JobKind.UNLOAD_MODEL, scope, 0, model_id=model.key)
    _enter(tx, replace(job, base_model=model.base_model))


def advance(tx: Transaction, model_id: str, position: int) -> None:
    """Release the contiguous run of jobs from ``position`` on.

    Spent positions count as present, and are taken from their jobs.
    """
    while row := tx.execute(
        "SELECT n, state, base_model FROM jobs WHERE model_id = ? AND position = ?",
        model_id,
        position,
    ).fetchone():
        n, state, base_model = row
        if state == "held":
            placement.release(tx, n, model_id, base_model)
        else:
            tx.execute("UPDATE jobs SET position = NULL WHERE n = ?", n)
        position += 1
    tx.execute("UPDATE lanes SET next = ? WHERE model_id = ?", position, model_id)


def use_up(tx: Transaction, model_id: str) -> None:
    """Take the positions from jobs that ended ahead of their turn: the turn will not come."""
    lane = tx.execute("SELECT next FROM lanes WHERE model_id = ?", model_id).fetchone()
    tx.execute(
        "UPDATE jobs SET position = NULL WHERE model_id = ? AND position >= ?",
        model_id,
        0 if lane is None else lane[0],
    )


# --- running ------------------------------------------------------------------------------------

_JOB = (
    "tenant, kind, scope, seq, payload, model_id, position, base_model, request_id, release, "
    "attempts, trace"
)


def _job(row: Row) -> Job:
    """Return the job in a row of ``_JOB``."""
    tenant, kind, scope, seq, payload, model_id, position, base_model, request_id, *rest = row
    release, attempts, trace = rest
    return Job(
        tenant=tenant,
        kind=JobKind(kind),
        scope=scope,
        seq=seq,
        payload=payload,
        model_id=model_id,
        position=position,
        base_model=base_model,
        request_id=request_id,
        release=release,
        attempts=attempts,
        trace=trace or "",
    )


def take_jobs(tx: Transaction, epoch: int, after: int, max_jobs: int) -> list[Job]:
    placement.check_epoch(tx, epoch)
    jobs: list[Job] = []
    size = 0
    for row in tx.execute(
        f"SELECT {_JOB} FROM jobs CROSS JOIN payloads ON job = n "
        "WHERE state = 'ready' AND worker = ? AND release > ? ORDER BY release LIMIT ?",
        epoch,
        after,
        max_jobs,
    ):
        job = _job(row)
        size += len(job.payload)
        if jobs and size > refusals.TAKE_BYTES:
            break
        jobs.append(job)
    return jobs


def read_log(tx: Transaction, epoch: int, model_id: str, start: int) -> list[LogEntry]:
    placement.check_epoch(tx, epoch)
    entries: list[LogEntry] = []
    size = 0
    for *columns, digest, halvings in tx.execute(
        f"SELECT {_JOB}, digest, halvings FROM jobs CROSS JOIN payloads ON job = n "
        "WHERE model_id = ? AND position >= ? AND digest IS NOT NULL ORDER BY position",
        model_id,
        start,
    ):
        job = _job(tuple(columns))
        size += len(job.payload)
        if entries and size > refusals.TAKE_BYTES:
            break
        entries.append(LogEntry(job, digest, halvings))
    return entries


def outcome(tx: Transaction, request_id: str) -> Outcome | None:
    """Return the stored outcome; None while there is none.

    Raises ``KeyError`` for an unknown request, and ``ResultDropped``.
    """
    row = tx.execute(
        "SELECT state, category, error, content_type, body, usage, created_s, finished_s FROM jobs "
        "WHERE request_id = ?",
        request_id,
    ).fetchone()
    if row is None:
        raise KeyError(request_id)
    state, category, error, content_type, body, *cost = row
    if state == "expired":
        raise ResultDropped(f"the result of {request_id} was dropped after its retention time")
    if state != "done":
        return None
    usage = usages.decoded(*cost)
    if error is not None:
        return Outcome(request_id, rejection=Rejection(error, category), usage=usage)
    return Outcome(request_id, body, content_type, usage=usage)


def job_key(tx: Transaction, request_id: str) -> tuple[str, str] | None:
    row = tx.execute("SELECT tenant, scope FROM jobs WHERE request_id = ?", request_id).fetchone()
    return None if row is None else (row[0], row[1])


# --- ending -------------------------------------------------------------------------------------


def end_model(tx: Transaction, model_id: str, rejection: Rejection) -> None:
    """End the model's unfinished jobs and take the model from its worker."""
    end_jobs_of(tx, model_id, rejection)
    use_up(tx, model_id)
    placement.unplace(tx, model_id)


def drop_jobs(tx: Transaction, request_id: str, rejection: Rejection) -> None:
    """End an unfinished sample; its worker learns of it with the next renewal."""
    row = tx.execute("SELECT worker FROM jobs WHERE request_id = ?", request_id).fetchone()
    assert row is not None, f"{request_id} is unknown"
    end_job(tx, Outcome(request_id, rejection=rejection))
    if row[0] is not None:
        tx.news.cancelled.append((row[0], request_id))


def end_job(tx: Transaction, result: Outcome) -> None:
    """Store how an unfinished job ended, and announce it.

    The payload is dropped, unless the job changed its model's state: then replay may need it.
    """
    row = tx.execute(
        "SELECT n, tenant, kind, scope, seq, model_id, position, worker, size, created_s, "
        f"sequences FROM jobs WHERE request_id = ? AND {UNFINISHED}",
        result.request_id,
    ).fetchone()
    assert row is not None, f"{result.request_id} had already ended"
    n, tenant, kind, scope, seq, model_id, position, worker, size, created_s, sequences = row
    rejection = result.rejection
    is_kept = result.changed and rejection is None and position is not None
    is_sample = kind == JobKind.SAMPLE
    usage = result.usage
    if usage is not None:
        usage = replace(usage, total_s=max(tx.now_s - created_s, 0.0))
    stored = Outcome(result.request_id, result.body, result.content_type, usage=usage)
    if rejection is not None:
        stored = Outcome(result.request_id, rejection=rejection, usage=usage)
    tx.execute(
        "UPDATE jobs SET state = 'done', category = ?, error = ?, content_type = ?, body = ?, "
        "digest = ?, halvings = ?, completion = ?, usage = ?, finished_s = ? WHERE n = ?",
        None if rejection is None else rejection.category,
        None if rejection is None else rejection.message,
        stored.content_type,
        stored.body,
        refusals.digest(stored.body) if is_kept else None,
        result.halvings if is_kept else None,
        records.next_of(tx, "completion") if is_sample else None,
        None if result.usage is None else msgspec.json.encode(result.usage).decode(),
        tx.now_s,
        n,
    )
    if result.point is not None and rejection is None and model_id is not None:
        usages.draw(tx, model_id, result.point)
    if kind == JobKind.SAVE_WEIGHTS and rejection is not None:
        records.release_file_of(tx, n)
    if not is_kept:
        tx.execute("DELETE FROM payloads WHERE job = ?", n)
    limits.count(tx, tenant, model_id, -1, -size)
    if model_id is None:
        placement.discount_sample(tx, worker, scope, sequences)
    elif kind == JobKind.UNLOAD_MODEL:
        points.forget(tx, model_id)
        retention.forget_orphan(tx, model_id)
    tx.news.ended.append(stored)
    if is_sample:
        tx.news.completed.add(SamplerClient(tenant, scope, seq // CLIENT_SEQS))


def end_jobs_of(
    tx: Transaction,
    model_id: str,
    rejection: Rejection,
    states: Iterable[str] = ("held", "ready"),
) -> None:
    """End the model's unfinished jobs in these states."""
    for request_id, state in tx.execute(
        f"SELECT request_id, state FROM jobs WHERE model_id = ? AND {UNFINISHED}", model_id
    ).fetchall():
        if state in states:
            end_job(tx, Outcome(request_id, rejection=rejection))
