"""What happens to many records and jobs at once: leases, the end of sessions, the sweep."""

import json
from dataclasses import replace

import msgspec

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.jobs import JobKind, LoadWeights, Outcome, Rejection, decode
from tuneserve_engine.queue import rules
from tuneserve_engine.queue import sqlite_records as records
from tuneserve_engine.queue.base import Lease, SweepPolicy
from tuneserve_engine.queue.group_commit import Transaction
from tuneserve_engine.queue.sqlite_jobs import (
    UNFINISHED,
    advance,
    end,
    end_jobs_of,
    meta,
    set_meta,
    unload,
)
from tuneserve_engine.records import Model, ModelStatus, Session

FREE_PAGES = 4096  # handed back to the file system per sweep: 16 MB, a bounded pause
MOST_WORKERS = 3  # that one job may outlive: it may be what stops them


class _Command(msgspec.Struct):
    """The file that a command names, if any; decoding skips the other fields."""

    file_id: str | None = None


def lease(tx: Transaction, owner: str, info: BaseModelInfo) -> Lease:
    earlier = base_model(tx)
    set_meta(tx, "base_model", msgspec.json.encode(info).decode())
    epoch = int(meta(tx, "epoch"))
    if meta(tx, "owner") == owner:
        return Lease(epoch, resumed=True)
    set_meta(tx, "owner", owner)
    set_meta(tx, "epoch", epoch + 1)
    tx.news.take = True  # parked takes of the old epoch must learn that it is over
    _end_fatal(tx)
    if earlier is not None and earlier.name != info.name:
        _end_unfinished(tx, rules.other_base_model(earlier.name, info.name), "TRUE")
    _lose_models(tx)
    return Lease(epoch + 1, resumed=False)


def _end_fatal(tx: Transaction) -> None:
    """Ends the jobs that were there for the last ``MOST_WORKERS`` workers: one of them may be what
    stops every worker, and it would stop the next one too."""
    times: list[float] = json.loads(meta(tx, "leases") or "[]")
    if len(times) == MOST_WORKERS - 1:
        rejection = rules.fatal(MOST_WORKERS)
        _end_unfinished(tx, rejection, "state = 'ready' AND created_s < ?", times[0])
    set_meta(tx, "leases", json.dumps([*times, tx.now_s][1 - MOST_WORKERS :]))


def _end_unfinished(tx: Transaction, rejection: Rejection, where: str, *values: float) -> None:
    for (request_id,) in tx.all(
        f"SELECT request_id FROM jobs WHERE {UNFINISHED} AND {where}", *values
    ):
        end(tx, Outcome(request_id, rejection=rejection))


def _lose_models(tx: Transaction) -> None:
    """Gives up every model that lived in the earlier worker: its creation is done."""
    to_be_created = _models_to_be_created(tx)
    for (body,) in tx.all(
        "SELECT body FROM records WHERE type = 'model' AND ("
        "json_extract(body, '$.status') IN ('creating', 'ready') "
        f"OR key IN (SELECT model_id FROM jobs WHERE {UNFINISHED}))"
    ):
        model = records.decode(Model, body)
        if model.key in to_be_created:
            continue
        if model.status in rules.ALIVE:
            records.put(tx, replace(model, status=ModelStatus.LOST))
        end_jobs_of(tx, model.key, rules.lost(model.key))


def _models_to_be_created(tx: Transaction) -> set[str]:
    """Models whose creating job is unfinished: the new worker will run it."""
    found = set()
    for model_id, kind, payload in tx.each(
        "SELECT model_id, kind, payload FROM jobs WHERE model_id IS NOT NULL "
        f"AND kind IN ('create_model', 'load_weights') AND {UNFINISHED}"
    ):
        if kind == JobKind.CREATE_MODEL or decode(payload, LoadWeights).config is not None:
            found.add(model_id)
    return found


def base_model(tx: Transaction) -> BaseModelInfo | None:
    stored = meta(tx, "base_model")
    return None if stored is None else msgspec.json.decode(stored, type=BaseModelInfo)


def end_session(tx: Transaction, key: str, reason: str) -> None:
    session = records.get(tx, Session, key)
    if session is None or session.ended:
        return
    records.put(tx, replace(session, ended=reason))
    for model in records.page(tx, Model, parent=key).items:
        if model.status in rules.ALIVE:
            records.put(tx, replace(model, status=ModelStatus.ENDED))
            end_jobs_of(tx, model.key, rules.gap_at_end(key, reason), states=("held",))
            unload(tx, model)
    tx.run("DELETE FROM records WHERE type = 'sampler' AND parent = ?", key)


def sweep(tx: Transaction, now_s: float, policy: SweepPolicy) -> None:
    for (key,) in tx.all(
        "SELECT key FROM records WHERE type = 'session' "
        "AND json_extract(body, '$.ended') IS NULL AND json_extract(body, '$.last_seen_s') < ?",
        now_s - policy.session_ttl_s,
    ):
        end_session(tx, key, "expired")
    for (model_id,) in tx.all(
        f"SELECT model_id FROM jobs WHERE {UNFINISHED} AND state = 'held' "
        "GROUP BY model_id HAVING MIN(created_s) < ?",
        now_s - policy.gap_ttl_s,
    ):
        _give_up_gap(tx, model_id, policy.gap_ttl_s)
    tx.run(
        "UPDATE jobs SET state = 'expired', error = NULL, category = NULL, body = NULL "
        "WHERE state = 'done' AND finished_s < ?",
        now_s - policy.result_ttl_s,
    )
    tx.run(
        "DELETE FROM records WHERE type = 'checkpoint' AND json_extract(body, '$.expires_s') <= ?",
        now_s,
    )
    tx.all(f"PRAGMA incremental_vacuum({FREE_PAGES})")


def _give_up_gap(tx: Transaction, model_id: str, waited_s: float) -> None:
    """Ends all that is held: no ``optim_step`` may run without the data before it."""
    lane = tx.one("SELECT next FROM lanes WHERE model_id = ?", model_id)
    expected = lane[0] if lane else 0
    missing, highest = [], expected
    for position, seq, state in tx.all(
        "SELECT position, seq, state FROM jobs WHERE model_id = ? AND position >= ? "
        "ORDER BY position",
        model_id,
        expected,
    ):
        if position > expected:
            offset = seq - position
            missing.append((expected + offset, position - 1 + offset))
        expected = position + 1
        if state == "held":
            highest = position
    end_jobs_of(tx, model_id, rules.gap(missing, waited_s), states=("held",))
    advance(tx, model_id, highest + 1)


def files_in_use(tx: Transaction) -> set[str]:
    """A payload that cannot be read raises: a file too many is cheaper than one too few."""
    found = {
        file_id
        for (file_id,) in tx.all(
            "SELECT json_extract(body, '$.file_id') FROM records "
            "WHERE type IN ('checkpoint', 'sampler')"
        )
    }
    for (payload,) in tx.each(
        "SELECT payload FROM jobs WHERE kind IN ('save_weights', 'load_weights', 'sample') "
        f"AND {UNFINISHED}"
    ):
        found.add(msgspec.msgpack.decode(payload, type=_Command).file_id)
    return found - {None}
