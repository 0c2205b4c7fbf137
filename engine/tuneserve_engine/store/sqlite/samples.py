"""The other operations of clients that sample, in SQLite: completions, cancelling, joining."""

from collections.abc import Sequence
from dataclasses import replace

from tuneserve_engine.core.jobs import JobKind
from tuneserve_engine.core.records import SamplerRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Completion, SamplerClient
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.jobs import drop_jobs
from tuneserve_engine.store.sqlite.schema import UNFINISHED

# Worded as in the index ``jobs_completed``, so that SQLite uses it.
_OF_CLIENT = "tenant = ? AND scope = ? AND seq / 1000000000 = ?"


def cancel(tx: Transaction, request_id: str) -> bool:
    row = tx.execute(
        f"SELECT kind, {UNFINISHED} FROM jobs WHERE request_id = ?", request_id
    ).fetchone()
    if row is None:
        raise KeyError(request_id)
    if row[0] != JobKind.SAMPLE:
        return False
    if row[1]:
        drop_jobs(tx, request_id, refusals.cancelled())
    return True


def completions(tx: Transaction, client: SamplerClient, after: int, limit: int) -> list[Completion]:
    rows = tx.execute(
        "SELECT request_id, completion, error IS NOT NULL, LENGTH(body) FROM jobs "
        f"WHERE completion > ? AND {_OF_CLIENT} ORDER BY completion LIMIT ?",
        after,
        client.tenant,
        client.scope,
        client.number,
        limit,
    ).fetchall()
    return [
        Completion(request_id, number, bool(failed), None if failed else size)
        for request_id, number, failed, size in rows
    ]


def acknowledge(tx: Transaction, client: SamplerClient, request_ids: Sequence[str]) -> None:
    for request_id in request_ids:
        tx.execute(
            "UPDATE jobs SET state = 'expired', error = NULL, category = NULL, body = NULL, "
            "completion = NULL "
            f"WHERE request_id = ? AND completion IS NOT NULL AND {_OF_CLIENT}",
            request_id,
            client.tenant,
            client.scope,
            client.number,
        )


def join_sampler(tx: Transaction, sampler_key: str) -> int | None:
    sampler = records.get_record(tx, SamplerRecord, sampler_key)
    if sampler is None:
        return None
    joined = replace(sampler, clients=sampler.clients + 1)
    records.put_record(tx, joined)
    return joined.clients
