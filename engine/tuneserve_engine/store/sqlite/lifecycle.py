"""Operations on many records and jobs at once: the end of sessions, the sweep, files in use.

``trimming`` has the part of the sweep that works in steps.
"""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import ModelRecord, ModelStatus, SessionRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.sqlite import limits, recordings, records
from tuneserve_engine.store.sqlite import recovery_points as points
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.jobs import advance, end_jobs_of, unload, use_up
from tuneserve_engine.store.sqlite.schema import UNFINISHED


def end_session(tx: Transaction, key: str, reason: str, most: int) -> int:
    """End a session in steps of ``most`` records; return how many records this step changed.

    The session has ended when the result is below ``most``. The session's own record changes last,
    so that ending the session again makes up for a missing step.
    """
    session = records.get_record(tx, SessionRecord, key)
    if session is None or session.ended:
        return 0
    done = _delete_owned(tx, key, most)
    if done < most:
        done += recordings.end_session(tx, key, most - done)
    for (body,) in tx.execute(_ALIVE, key, most - done).fetchall():
        model = msgspec.json.decode(body, type=ModelRecord)
        records.put_record(tx, replace(model, status=ModelStatus.ENDED, ended=reason))
        end_jobs_of(tx, model.key, refusals.gap_at_end(key, reason), states=("held",))
        use_up(tx, model.key)
        _unload(tx, model)
        done += 1
    if done == most:
        return done
    for (body,) in tx.execute(_DEAD, key).fetchall():
        _unload(tx, msgspec.json.decode(body, type=ModelRecord))
    records.put_record(tx, replace(session, ended=reason))
    return done + 1


_MODELS = "SELECT body FROM records WHERE type = 'model' AND parent = ? AND "
_STATUS = "json_extract(body, '$.status')"
_ALIVE = f"{_MODELS} {_STATUS} IN ('creating', 'ready') LIMIT ?"
_DEAD = f"{_MODELS} {_STATUS} NOT IN ('creating', 'ready', 'ended')"


def _delete_owned(tx: Transaction, session: str, most: int) -> int:
    return tx.execute(
        "DELETE FROM records WHERE n IN "
        "(SELECT n FROM records WHERE type IN ('sampler', 'custom_loss') AND parent = ? LIMIT ?)",
        *(session, most),
    ).rowcount


def _unload(tx: Transaction, model: ModelRecord) -> None:
    """Queue the model's unload if a worker may hold it; otherwise drop its recovery points and
    payloads."""
    lane = tx.execute("SELECT worker, jobs FROM lanes WHERE model_id = ?", model.key).fetchone()
    if lane is None or lane == (None, 0):
        points.forget(tx, model.key)
    else:
        unload(tx, model)


def sweep(tx: Transaction, now_s: float, policy: SweepPolicy, store_policy: StorePolicy) -> None:
    for (model_id,) in tx.execute(
        f"SELECT model_id FROM jobs JOIN lanes USING (model_id) WHERE {UNFINISHED} "
        "AND state = 'held' GROUP BY model_id HAVING MIN(created_s) < ? AND MIN(position) > next",
        now_s - policy.gap_ttl_s,
    ).fetchall():
        _give_up_gap(tx, model_id, policy.gap_ttl_s)
    tx.execute(
        "UPDATE lanes SET park = 1 WHERE worker IS NOT NULL AND jobs = 0 AND requested_s < ?",
        now_s - policy.park_s,
    )
    _create_waiting(tx, store_policy)


def _create_waiting(tx: Transaction, policy: StorePolicy) -> None:
    """Release the waiting new models that there is room for."""
    full = set()
    for tenant, model_id, position in limits.waiting_models(tx):
        if tenant in full:
            continue
        if limits.make_room(tx, tenant, policy):
            advance(tx, model_id, position)
        else:
            full.add(tenant)


def _give_up_gap(tx: Transaction, model_id: str, waited_s: float) -> None:
    """End all held jobs of the model: no ``optim_step`` may run without the data before it."""
    lane = tx.execute("SELECT next FROM lanes WHERE model_id = ?", model_id).fetchone()
    expected = lane[0] if lane else 0
    missing, highest = [], expected
    for position, seq, state in tx.execute(
        "SELECT position, seq, state FROM jobs WHERE model_id = ? AND position >= ? "
        "ORDER BY position",
        model_id,
        expected,
    ).fetchall():
        if position > expected:
            offset = seq - position
            missing.append((expected + offset, position - 1 + offset))
        expected = position + 1
        if state == "held":
            highest = position
    end_jobs_of(tx, model_id, refusals.gap(missing, waited_s), states=("held",))
    tx.execute(
        "UPDATE jobs SET position = NULL WHERE model_id = ? AND position BETWEEN ? AND ?",
        model_id,
        lane[0] if lane else 0,
        highest,
    )
    advance(tx, model_id, highest + 1)


def files_in_use(tx: Transaction) -> set[str]:
    """Return the file ids that something in the store names.

    An unreadable payload raises: keeping a file too many is cheaper than losing one.
    """
    found = {
        file_id
        for (file_id,) in tx.execute(
            "SELECT json_extract(body, '$.file_id') FROM records "
            "WHERE type IN ('checkpoint', 'sampler') UNION SELECT file_id FROM points"
        ).fetchall()
    }
    for of_commands in (
        f"kind IN ('save_weights', 'load_weights', 'sample') AND {UNFINISHED}",
        "kind = 'load_weights' AND digest IS NOT NULL",
    ):
        for (payload,) in tx.execute(
            f"SELECT payload FROM jobs CROSS JOIN payloads ON job = n WHERE {of_commands}"
        ):
            found.add(msgspec.msgpack.decode(payload, type=records.Command).file_id)
    return found - {None}


def released_files(tx: Transaction) -> set[str]:
    return {file_id for (file_id,) in tx.execute("SELECT file_id FROM released").fetchall()}


def forget_released(tx: Transaction, file_ids: Iterable[str]) -> None:
    for file_id in file_ids:
        tx.execute("DELETE FROM released WHERE file_id = ?", file_id)
