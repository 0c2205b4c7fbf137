"""The removal of records in SQLite: checkpoints, ended sessions and their models."""

from tuneserve_engine.core.records import CheckpointRecord, ModelRecord, SessionRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import R
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.schema import IS_OPEN, LAST_SEEN


def delete(tx: Transaction, record_type: type[R], key: str) -> None:
    """Delete a record. The last checkpoint of a forgotten session's model takes the model along."""
    found = records.get_record(tx, record_type, key) if record_type is CheckpointRecord else None
    records.delete_record(tx, record_type, key)
    if found is not None:
        forget_orphan(tx, found.parent)


def forget_ended(tx: Transaction, before_s: float) -> bool:
    """Forget ended sessions last seen before ``before_s``, with their models, in one step.

    Returns whether more may be left.
    """
    left = refusals.RECORDS_AT_ONCE
    for (key,) in tx.execute(
        f"SELECT key FROM records WHERE type = 'session' AND {IS_OPEN} = 0 AND {LAST_SEEN} < ? "
        f"ORDER BY {LAST_SEEN} LIMIT ?",
        before_s,
        left,
    ).fetchall():
        for (model_id,) in tx.execute(
            "SELECT key FROM records WHERE type = 'model' AND parent = ?", key
        ).fetchall():
            left -= _forget_model(tx, model_id)
            if left <= 0:
                return True
        tx.execute(
            "DELETE FROM records WHERE type IN ('sampler', 'custom_loss') AND parent = ?", key
        )
        records.delete_record(tx, SessionRecord, key)
        left -= 1
    return left <= 0


def forget_orphan(tx: Transaction, model_id: str) -> None:
    """Forget the model if its session is forgotten and nothing needs the model any more."""
    model = records.get_record(tx, ModelRecord, model_id)
    if model is not None and records.get_record(tx, SessionRecord, model.parent) is None:
        _forget_model(tx, model_id)


def _forget_model(tx: Transaction, model_id: str) -> bool:
    """Forget the model if it is dead, unloaded, and has no checkpoints; return whether it was."""
    model = records.get_record(tx, ModelRecord, model_id)
    if model is None or model.status in refusals.ALIVE:
        return False
    lane = tx.execute("SELECT worker, jobs FROM lanes WHERE model_id = ?", model_id).fetchone()
    if lane not in (None, (None, 0)):
        return False
    if tx.execute(
        "SELECT 1 FROM records WHERE type = 'checkpoint' AND parent = ?", model_id
    ).fetchone():
        return False
    for table in ("lanes", "curves", "curve_points", "points"):
        tx.execute(f"DELETE FROM {table} WHERE model_id = ?", model_id)
    tx.execute("DELETE FROM records WHERE type = 'run_event' AND parent = ?", model_id)
    records.delete_record(tx, ModelRecord, model_id)
    return True
