"""Recovery points in SQLite, and what of the log they make superfluous."""

from tuneserve_engine.queue import rules
from tuneserve_engine.queue import sqlite_records as records
from tuneserve_engine.queue.base import RecoveryPoint
from tuneserve_engine.queue.group_commit import Transaction
from tuneserve_engine.queue.schema import UNFINISHED
from tuneserve_engine.queue.sqlite_placement import check_epoch
from tuneserve_engine.records import Model

KEPT = 2  # the newest, and one to fall back on


def points(tx: Transaction, epoch: int, model_id: str) -> list[RecoveryPoint]:
    check_epoch(tx, epoch)
    rows = tx.all(
        "SELECT model_id, position, file_id, numerics_id FROM points WHERE model_id = ? "
        "ORDER BY n DESC",
        model_id,
    )
    return [RecoveryPoint(*row) for row in rows]


def save_point(tx: Transaction, epoch: int, point: RecoveryPoint) -> None:
    check_epoch(tx, epoch)
    if not _is_here(tx, epoch, point.model_id):
        return
    newest = next(iter(points(tx, epoch, point.model_id)), None)
    if point == newest:  # the same again: its answer was lost
        return
    _check_position(tx, point)
    tx.run(
        "INSERT INTO points (model_id, position, file_id, numerics_id) VALUES (?, ?, ?, ?)",
        point.model_id,
        point.position,
        point.file_id,
        point.numerics_id,
    )
    kept = tx.all(
        "SELECT n, position FROM points WHERE model_id = ? ORDER BY n DESC LIMIT ?",
        point.model_id,
        KEPT,
    )
    if len(kept) == KEPT:
        oldest, position = kept[-1]
        tx.run("DELETE FROM points WHERE model_id = ? AND n < ?", point.model_id, oldest)
        _drop_payloads(tx, point.model_id, position)


def _is_here(tx: Transaction, epoch: int, model_id: str) -> bool:
    """Whether the model may still be restored, and nobody else has it."""
    lane = tx.one("SELECT worker, jobs FROM lanes WHERE model_id = ?", model_id)
    model = records.get(tx, Model, model_id)
    if lane is None or model is None or lane[0] not in (None, epoch):
        return False
    return model.status in rules.ALIVE or lane != (None, 0)


def _check_position(tx: Transaction, point: RecoveryPoint) -> None:
    row = tx.one(
        f"SELECT next, (SELECT MIN(position) FROM jobs WHERE model_id = ?1 AND {UNFINISHED}), "
        "(SELECT MAX(position) FROM points WHERE model_id = ?1) FROM lanes WHERE model_id = ?1",
        point.model_id,
    )
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
    """Drops the points and payloads of a model that nobody will restore."""
    tx.run("UPDATE lanes SET worker = NULL, park = 0 WHERE model_id = ?", model_id)
    tx.run("DELETE FROM points WHERE model_id = ?", model_id)
    _drop_payloads(tx, model_id, None)


def _drop_payloads(tx: Transaction, model_id: str, position: int | None) -> None:
    """Those kept for the log, of positions before this one or of all."""
    where = "model_id = ?1 AND digest IS NOT NULL AND (?2 IS NULL OR position < ?2)"
    values = (model_id, position)
    tx.run(f"DELETE FROM payloads WHERE job IN (SELECT n FROM jobs WHERE {where})", *values)
    tx.run(f"UPDATE jobs SET digest = NULL, halvings = NULL WHERE {where}", *values)
