"""Recordings in SQLite: the tokens of samples that training refers to, kept while they are used."""

from collections.abc import Sequence

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.store import refusals
from tuneserve_engine.store.sqlite.group_commit import Row, Transaction

_COUNTED = "recorded "
"""The prefix of the scopes in ``counts`` with a tenant's number of recordings and their bytes."""


def put_recording(tx: Transaction, request_id: str, body: bytes) -> None:
    """Store a sample's recording, unless its session has ended and its sampler is gone."""
    row = tx.execute(
        "SELECT jobs.tenant, scope, seq, parent FROM jobs "
        "JOIN records ON type = 'sampler' AND key = scope AND records.tenant = jobs.tenant "
        "WHERE request_id = ?",
        request_id,
    ).fetchone()
    if row is None:
        return
    tenant, scope, seq, session = row
    earlier = _row(tx, tenant, SampleKey(scope, seq))
    if earlier is not None:  # its request was forgotten
        _drop(tx, earlier[0], Gone.UNUSED)
        tx.execute("DELETE FROM recordings WHERE n = ?", earlier[0])
    size = len(body) + refusals.RECORDING_BYTES
    row = tx.execute(
        "INSERT INTO recordings (tenant, scope, seq, session, size, used_s) "
        "VALUES (?, ?, ?, ?, ?, ?) RETURNING n",
        *(tenant, scope, seq, session, size, tx.now_s),
    ).fetchone()
    assert row is not None
    tx.execute("INSERT INTO recorded VALUES (?, ?)", row[0], body)
    _count(tx, tenant, 1, size)


def read_recordings(
    tx: Transaction, tenant: str, samples: Sequence[SampleKey]
) -> list[bytes | Gone]:
    found: list[bytes | Gone] = []
    total = 0
    for key in samples:
        row = _row(tx, tenant, key)
        if row is None or row[2] is not None:
            found.append(Gone.UNKNOWN if row is None else Gone(row[2]))
            continue
        n, size, _ = row
        total += size
        if found and total > refusals.RECORDINGS_BYTES:
            break
        body = tx.execute("SELECT body FROM recorded WHERE recording = ?", n).fetchone()
        assert body is not None
        tx.execute("UPDATE recordings SET used_s = ? WHERE n = ?", tx.now_s, n)
        found.append(body[0])
    return found


def end_session(tx: Transaction, session: str, most: int) -> int:
    """Mark up to ``most`` recordings of the session to be dropped first; return how many."""
    return tx.execute(
        "UPDATE recordings SET used_s = 0 WHERE n IN (SELECT n FROM recordings "
        "WHERE session = ? AND gone IS NULL AND used_s > 0 LIMIT ?)",
        *(session, most),
    ).rowcount


def sweep(tx: Transaction, now_s: float, policy: SweepPolicy) -> int:
    """Drop unused recordings, then those beyond a tenant's limit, and forget long dropped ones.

    Handles a bounded number at once; returns how many.
    """
    left, done = refusals.DROPPED_BYTES, 0
    for n, size in tx.execute(
        "SELECT n, size FROM recordings WHERE gone IS NULL AND used_s < ? ORDER BY used_s LIMIT ?",
        now_s - policy.recording_ttl_s,
        refusals.DROPPED_AT_ONCE,
    ).fetchall():
        if left <= 0:
            break
        left -= size
        done += 1
        _drop(tx, n, Gone.UNUSED)
    for scope, count, total in tx.execute(
        "SELECT scope, jobs, bytes FROM counts WHERE scope BETWEEN ? AND ? AND bytes > ?",
        _COUNTED,
        _COUNTED + "\U0010ffff",
        policy.recording_bytes,
    ).fetchall():
        most = min(count - 1, refusals.DROPPED_AT_ONCE)  # keep a tenant's only one
        tenant, over = scope.removeprefix(_COUNTED), total - policy.recording_bytes
        done += _make_room(tx, tenant, over, most)
    return (
        done
        + tx.execute(
            "DELETE FROM recordings WHERE n IN (SELECT n FROM recordings WHERE gone IS NOT NULL "
            "AND used_s < ? ORDER BY used_s LIMIT ?)",
            now_s - 2 * policy.recording_ttl_s,
            refusals.FORGOTTEN_AT_ONCE,
        ).rowcount
    )


def _make_room(tx: Transaction, tenant: str, over: int, most: int) -> int:
    """Drop the tenant's least recently used recordings; return how many."""
    over, done = min(over, refusals.DROPPED_BYTES), 0
    for n, size in tx.execute(
        "SELECT n, size FROM recordings WHERE tenant = ? AND gone IS NULL "
        "ORDER BY used_s, n LIMIT ?",
        tenant,
        most,
    ).fetchall():
        if over <= 0:
            break
        over -= size
        done += 1
        _drop(tx, n, Gone.NO_ROOM)
    return done


def _row(tx: Transaction, tenant: str, key: SampleKey) -> Row | None:
    row: Row | None = tx.execute(
        "SELECT n, size, gone FROM recordings WHERE tenant = ? AND scope = ? AND seq = ?",
        tenant,
        key.scope,
        key.seq,
    ).fetchone()
    return row


def _drop(tx: Transaction, n: int, why: Gone) -> None:
    row = tx.execute(
        "UPDATE recordings SET gone = ? WHERE n = ? AND gone IS NULL RETURNING tenant, size",
        why.value,
        n,
    ).fetchone()
    if row is not None:
        tx.execute("DELETE FROM recorded WHERE recording = ?", n)
        _count(tx, row[0], -1, -row[1])


def _count(tx: Transaction, tenant: str, recordings: int, size: int) -> None:
    tx.execute(
        "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (scope) DO UPDATE SET "
        "jobs = jobs + excluded.jobs, bytes = bytes + excluded.bytes",
        *(_COUNTED + tenant, recordings, size),
    )
