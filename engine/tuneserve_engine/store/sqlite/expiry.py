"""Expiry in SQLite: silent sessions, the samples that wait in them, and checkpoints.

Each function is a step of a bounded number of records or jobs; ``trimming`` runs the steps.
"""

from typing import NamedTuple

from tuneserve_engine.core.records import CheckpointRecord, SamplerRecord, SessionRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.sqlite import records, retention
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.jobs import drop_jobs
from tuneserve_engine.store.sqlite.lifecycle import end_session
from tuneserve_engine.store.sqlite.schema import EXPIRES, IS_OPEN, LAST_SEEN, UNFINISHED

_OF_SESSION = f"type = 'session' AND {IS_OPEN} = {{}} AND {LAST_SEEN}"
_SEEN = f"body = json_set(body, '$.last_seen_s', MIN({LAST_SEEN} - :by_s, :now_s))"
_HELD = f"state = 'held' AND {UNFINISHED}"
_DATED = (
    ("records", "n", _SEEN, _OF_SESSION.format(1)),
    ("records", "n", _SEEN, _OF_SESSION.format(0)),
    ("jobs", "n", "created_s = MIN(created_s - :by_s, :now_s)", f"{_HELD} AND created_s"),
    (
        *("lanes", "model_id", "requested_s = MIN(requested_s - :by_s, :now_s)"),
        "worker IS NOT NULL AND requested_s",
    ),
    ("recordings", "n", "used_s = MIN(used_s - :by_s, :now_s)", "gone IS NULL AND used_s"),
)
"""The columns of times by which something ends: table, key, change, and condition on the time."""


def date_back(tx: Transaction, now_s: float, by_s: float) -> int:
    """Move times of the future back, in one step; return how many were moved."""
    done = 0
    for table, key, change, time in _DATED:
        done += tx.execute(
            f"UPDATE {table} SET {change} WHERE {key} IN "
            f"(SELECT {key} FROM {table} WHERE {time} > :now_s LIMIT :most)",
            by_s=by_s,
            now_s=now_s,
            most=refusals.RECORDS_AT_ONCE,
        ).rowcount
    return done


def end_silent_sessions(tx: Transaction, before_s: float) -> int:
    """End sessions that were last seen before ``before_s``, in one step.

    Returns how many records changed; 0 when no such session is left.
    """
    done = 0
    for (key,) in tx.execute(
        f"SELECT key FROM records WHERE type = 'session' AND {IS_OPEN} = 1 AND {LAST_SEEN} < ? "
        "LIMIT ?",
        before_s,
        refusals.RECORDS_AT_ONCE,
    ).fetchall():
        done += end_session(tx, key, "expired", refusals.RECORDS_AT_ONCE - done)
        if done >= refusals.RECORDS_AT_ONCE:
            break
    return done


def delete_expired(tx: Transaction, now_s: float) -> int:
    """Delete expired checkpoints, in one step; return how many were deleted."""
    due = tx.execute(
        "SELECT key FROM records INDEXED BY checkpoints_by_expiry "
        f"WHERE type = 'checkpoint' AND {EXPIRES} <= ? LIMIT ?",
        now_s,
        refusals.RECORDS_AT_ONCE,
    ).fetchall()
    for (key,) in due:
        retention.delete(tx, CheckpointRecord, key)
    return len(due)


class Silence(NamedTuple):
    """The rule for a silent session: it was last seen before ``before_s``, ``ttl_s`` ago."""

    before_s: float
    ttl_s: float


def drop_silent_samples(tx: Transaction, silence: Silence, after: str) -> str | None:
    """End the waiting samples of silent sessions, in one step.

    Looks at the next sampling sessions by name, behind ``after``. Returns the name of the last one
    that is done, for the next call; None when all are done.
    """
    left = refusals.RECORDS_AT_ONCE
    scopes = tx.execute(
        f"SELECT DISTINCT scope FROM jobs WHERE kind = 'sample' AND {UNFINISHED} AND scope > ? "
        "ORDER BY scope LIMIT ?",
        after,
        left,
    ).fetchall()
    for (scope,) in scopes:
        sampler = records.get_record(tx, SamplerRecord, scope)
        session = None if sampler is None else records.get_record(tx, SessionRecord, sampler.parent)
        if session is not None and session.last_seen_s < silence.before_s:
            left -= _drop(tx, scope, session, silence.ttl_s, left)
            if left <= 0:  # there may be more
                return after
        after = scope
    return after if scopes else None


def _drop(tx: Transaction, scope: str, session: SessionRecord, ttl_s: float, most: int) -> int:
    waiting = tx.execute(
        "SELECT request_id FROM jobs "
        f"WHERE kind = 'sample' AND scope = ? AND tenant = ? AND {UNFINISHED} LIMIT ?",
        *(scope, session.tenant, most),
    ).fetchall()
    for (request_id,) in waiting:
        drop_jobs(tx, request_id, refusals.silent(session.key, ttl_s))
    return len(waiting)
