"""Recovery points in SQLite, and the parts of the log that they make superfluous."""

from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import RecoveryPoint
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.placement import check_epoch
from tuneserve_engine.store.sqlite.schema import UNFINISHED

KEPT = 2  # the newest, and one to fall back on


def recovery_points(tx: Transaction, epoch: int, model_id: str) -> list[RecoveryPoint]:
    check_epoch(tx, epoch)
    rows = tx.execute(
        "SELECT model_id, position, file_id, numerics_id FROM points WHERE model_id = ? "
        "ORDER BY n DESC",
        model_id,
    ).fetchall()
    return [RecoveryPoint(*row) for row in rows]


def save_point(tx: Transaction, epoch: int, point: RecoveryPoint) -> None:
    check_epoch(tx, epoch)
    if not _is_here(tx, epoch, point.model_id):
        return
    newest = next(iter(recovery_points(tx, epoch, point.model_id)), None)
    if point == newest:  # a repeated call: the first answer was lost
        return
    _check_position(tx, point)
    tx.execute(
        "INSERT INTO points (model_id, position, file_id, numerics_id) VALUES (?, ?, ?, ?)",
        point.model_id,
        point.position,
        point.file_id,
        point.numerics_id,
    )
    kept = tx.execute(
        "SELECT n, position FROM points WHERE model_id = ? ORDER BY n DESC LIMIT ?",
        point.model_id,
        KEPT,
    ).fetchall()
    if len(kept) == KEPT:
        oldest, position = kept[-1]
        tx.execute("DELETE FROM points WHERE model_id = ? AND n < ?", point.model_id, oldest)
        _drop_payloads(tx, point.model_id, position)


def _is_here(tx: Transaction, epoch: int, model_id: str) -> bool:
    """Return whether the model may still be restored, and no other worker has it."""
    lane = tx.execute("SELECT worker, jobs FROM lanes WHERE model_id = ?", model_id).fetchone()
    model = records.get_record(tx, ModelRecord, model_id)
    if lane is None or model is None or lane[0] not in (None, epoch):
        return False
    return model.status in refusals.ALIVE or lane != (None, 0)


def _check_position(tx: Transaction, point: RecoveryPoint) -> None:
    row = tx.execute(
        "SELECT next, "
        f"(SELECT MIN(position) FROM jobs WHERE model_id = :model_id AND {UNFINISHED}), "
        "(SELECT MAX(position) FROM points WHERE model_id = :model_id) "
        "FROM lanes WHERE model_id = :model_id",
        model_id=point.model_id,
    ).fetchone()
    assert row is not None
    following, unfinished, newest = row
    first = following if unfinished is None else min(following, unfinished)
    if point.position > first:
        raise ValueError(
            f"a recovery point of {point.model_id} at position {point.position}, but position "
            f"{first} has not ended; finish it first"
        )
    if newest is not None and point.position < newest:
        raise ValueError(
            f"a recovery point of {point.model_id} at position {point.position}, but there is one "
            f"at {newest} already; save them in order"
        )


def forget(tx: Transaction, model_id: str) -> None:
    """Drop the points and payloads of a model that will not be restored."""
    tx.execute("UPDATE lanes SET worker = NULL, park = 0 WHERE model_id = ?", model_id)
    tx.execute("DELETE FROM points WHERE model_id = ?", model_id)
    _drop_payloads(tx, model_id, None)


def _drop_payloads(tx: Transaction, model_id: str, position: int | None) -> None:
    """Drop the payloads kept for replay, before this position, or all of them if it is None."""
    where = (
        "model_id = :model_id AND digest IS NOT NULL AND (:before IS NULL OR position < :before)"
    )
    of_model = f"SELECT n FROM jobs WHERE {where}"
    change = f"UPDATE jobs SET digest = NULL, halvings = NULL WHERE {where}"
    for statement in (f"DELETE FROM payloads WHERE job IN ({of_model})", change):
        tx.execute(statement, model_id=model_id, before=position)
