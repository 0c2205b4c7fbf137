"""The log of jobs in SQLite: how a job enters, is released, and ends.

States: ``held`` (waits for a missing position) → ``ready`` (released) → ``done`` → ``expired``
(result dropped). The row of an ended job stays, so that its key is known for good.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tuneserve_engine.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.queue import rules
from tuneserve_engine.queue import sqlite_records as records
from tuneserve_engine.queue.base import Fenced, KeyReused, ResultExpired, Submitted
from tuneserve_engine.queue.group_commit import Transaction
from tuneserve_engine.records import Checkpoint, Model, ModelStatus, Record, Session

UNFINISHED = "state IN ('held', 'ready')"


def meta(tx: Transaction, name: str) -> Any:
    row = tx.one("SELECT value FROM meta WHERE name = ?", name)
    return None if row is None else row[0]


def set_meta(tx: Transaction, name: str, value: Any) -> None:
    tx.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", name, value)


# --- entering -----------------------------------------------------------------------------------


def submit(tx: Transaction, job: Job, new_records: Sequence[Record]) -> Submitted:
    known = tx.one(
        "SELECT request_id, kind FROM jobs WHERE tenant = ? AND scope = ? AND seq = ?",
        job.tenant,
        job.scope,
        job.seq,
    )
    if known is not None:
        if known[1] != job.kind:
            raise KeyReused(rules.reused(job, known[1]))
        return Submitted(known[0], duplicate=True)
    rejection = _ended_session(tx, new_records)
    if rejection is None:
        for record in new_records:
            records.put(tx, record)
    rejection = job.rejection or rejection
    model = None if job.model_id is None else records.get(tx, Model, job.model_id)
    if model is not None:
        rejection = rejection or rules.dead_model(model, job.kind)
        if rejection is None:
            records.put(tx, replace(model, last_request_s=tx.now_s))
    job = replace(job, request_id=rules.request_id(meta(tx, "secret"), job), rejection=rejection)
    _enter(tx, job)
    return Submitted(job.request_id, duplicate=False)


def _ended_session(tx: Transaction, new_records: Sequence[Record]) -> Rejection | None:
    """A model that enters an ended session would never be unloaded."""
    for record in new_records:
        session = records.get(tx, Session, record.parent) if isinstance(record, Model) else None
        if session is not None and session.ended:
            return rules.ended_session(session)
    return None


def _enter(tx: Transaction, job: Job) -> None:
    """Stores a new job in the state that its place in the log gives it."""
    model_id, position = job.model_id, job.position
    if model_id is None or position is None:
        _insert(tx, job, "ready")
        return
    following = _next_position(tx, model_id)
    if position < following and job.rejection is None:
        job = replace(job, rejection=rules.too_late(job, following + job.seq - position))
    _insert(tx, job, "ready" if position == following else "held")
    if position == following:
        advance(tx, model_id, following + 1)


def _insert(tx: Transaction, job: Job, state: str) -> None:
    """Stores the job; one with a rejection ends at once, whatever its state would be."""
    if job.rejection is not None:
        state = "held"
    tx.run(
        "INSERT INTO jobs (request_id, tenant, kind, scope, seq, model_id, position, state, "
        "release, created_s, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        job.request_id,
        job.tenant,
        job.kind.value,
        job.scope,
        job.seq,
        job.model_id,
        job.position,
        state,
        next_release(tx) if state == "ready" else 0,
        tx.now_s,
        job.payload,
    )
    if job.rejection is not None:
        end(tx, Outcome(job.request_id, rejection=job.rejection))


def unload(tx: Transaction, model: Model) -> None:
    """Queues the model's unload behind its log, once."""
    job = Job(model.tenant, JobKind.UNLOAD_MODEL, f"{model.key}/unload", 0, model_id=model.key)
    submit(tx, job, ())


def _next_position(tx: Transaction, model_id: str) -> int:
    row = tx.one("SELECT next FROM lanes WHERE model_id = ?", model_id)
    return 0 if row is None else int(row[0])


def advance(tx: Transaction, model_id: str, position: int) -> None:
    """Releases the contiguous run from ``position`` on; spent positions count as present."""
    while row := tx.one(
        "SELECT request_id, state FROM jobs WHERE model_id = ? AND position = ?", model_id, position
    ):
        if row[1] == "held":
            tx.run(
                "UPDATE jobs SET state = 'ready', release = ? WHERE request_id = ?",
                next_release(tx),
                row[0],
            )
        position += 1
    tx.run("INSERT OR REPLACE INTO lanes VALUES (?, ?)", model_id, position)


def next_release(tx: Transaction) -> int:
    row = tx.one("UPDATE meta SET value = value + 1 WHERE name = 'release' RETURNING value")
    assert row is not None
    tx.news.take = True
    return int(row[0])


# --- running ------------------------------------------------------------------------------------


def check_epoch(tx: Transaction, epoch: int) -> None:
    current = meta(tx, "epoch")
    if epoch != current:
        raise Fenced(
            f"lease epoch {epoch} is over, the current one is {current}: another worker took the "
            "models; stop this worker"
        )


def take(tx: Transaction, epoch: int, after: int, max_jobs: int) -> list[Job]:
    check_epoch(tx, epoch)
    jobs: list[Job] = []
    size = 0
    for row in tx.each(
        "SELECT tenant, kind, scope, seq, payload, model_id, position, request_id, release "
        "FROM jobs WHERE state = 'ready' AND release > ? ORDER BY release LIMIT ?",
        after,
        max_jobs,
    ):
        tenant, kind, scope, seq, payload, model_id, position, request_id, release = row
        size += len(payload)
        if jobs and size > rules.TAKE_BYTES:
            break
        jobs.append(
            Job(
                tenant=tenant,
                kind=JobKind(kind),
                scope=scope,
                seq=seq,
                payload=payload,
                model_id=model_id,
                position=position,
                request_id=request_id,
                release=release,
            )
        )
    return jobs


def outcome(tx: Transaction, request_id: str) -> Outcome | None:
    """The stored outcome, None while there is none. Raises ``KeyError``, ``ResultExpired``."""
    row = tx.one(
        "SELECT state, category, error, content_type, body FROM jobs WHERE request_id = ?",
        request_id,
    )
    if row is None:
        raise KeyError(request_id)
    state, category, error, content_type, body = row
    if state == "expired":
        raise ResultExpired(f"the result of {request_id} was dropped after its retention time")
    if state != "done":
        return None
    if error is not None:
        return Outcome(request_id, rejection=Rejection(error, category))
    return Outcome(request_id, body, content_type)


def tenant(tx: Transaction, request_id: str) -> str | None:
    row = tx.one("SELECT tenant FROM jobs WHERE request_id = ?", request_id)
    return None if row is None else str(row[0])


# --- ending -------------------------------------------------------------------------------------


def finish(tx: Transaction, epoch: int, outcomes: Sequence[Outcome]) -> None:
    check_epoch(tx, epoch)
    for each in outcomes:
        if is_unfinished(tx, each.request_id):
            _finish_one(tx, each)


def is_unfinished(tx: Transaction, request_id: str) -> bool:
    row = tx.one(f"SELECT 1 FROM jobs WHERE request_id = ? AND {UNFINISHED}", request_id)
    return row is not None


def _finish_one(tx: Transaction, result: Outcome) -> None:
    checkpoint = result.checkpoint
    if checkpoint is not None and result.rejection is None:
        taken = records.get(tx, Checkpoint, checkpoint.key)
        if taken is not None and not (result.overwrite or taken.has_expired(tx.now_s)):
            exists = rules.checkpoint_exists(checkpoint.key)
            end(tx, Outcome(result.request_id, rejection=exists))
            return
        records.delete(tx, Checkpoint, checkpoint.key)  # an overwritten one is listed as new
        records.put(tx, checkpoint)
    sampler = result.sampler
    if sampler is not None and result.rejection is None:
        session = records.get(tx, Session, sampler.parent)
        if session is None or not session.ended:
            records.put(tx, sampler)
    end(tx, result)
    for change in result.updates:
        record = records.update(tx, change)
        if isinstance(record, Model) and record.status is ModelStatus.FAILED:
            end_jobs_of(tx, record.key, rules.failed(record.key))


def end(tx: Transaction, result: Outcome) -> None:
    """Stores how an unfinished job ended, drops its payload, and makes it news."""
    rejection = result.rejection
    result = Outcome(result.request_id, result.body, result.content_type, rejection)
    if rejection is not None:
        result = Outcome(result.request_id, rejection=rejection)
    changed = tx.run(
        "UPDATE jobs SET state = 'done', category = ?, error = ?, content_type = ?, body = ?, "
        f"payload = NULL, finished_s = ? WHERE request_id = ? AND {UNFINISHED}",
        None if rejection is None else rejection.category,
        None if rejection is None else rejection.message,
        result.content_type,
        result.body,
        tx.now_s,
        result.request_id,
    )
    assert changed == 1, f"{result.request_id} had already ended"
    tx.news.ended.append(result)


def end_jobs_of(
    tx: Transaction,
    model_id: str,
    rejection: Rejection,
    states: Iterable[str] = ("held", "ready"),
) -> None:
    """Ends the model's unfinished jobs in these states."""
    for request_id, state in tx.all(
        f"SELECT request_id, state FROM jobs WHERE model_id = ? AND {UNFINISHED}", model_id
    ):
        if state in states:
            end(tx, Outcome(request_id, rejection=rejection))
