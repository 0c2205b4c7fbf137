"""Placement in SQLite: the assignment of models and jobs to workers.

A job that is placed gets a new ``release`` number, so that no worker's cursor is past it.
"""

from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.schema import UNFINISHED


def check_epoch(tx: Transaction, epoch: int) -> None:
    if tx.execute("SELECT 1 FROM workers WHERE epoch = ?", epoch).fetchone() is None:
        raise Fenced(
            f"lease epoch {epoch} is over: another process has this worker's name, or it was "
            "silent for too long and others have its models; stop this worker"
        )


def make_ready(tx: Transaction, n: int, model_id: str | None, base_model: str) -> None:
    """Release the held job ``n``, and place it if there is a worker for it."""
    tx.execute(
        "UPDATE jobs SET state = 'ready', worker = ?, release = ? WHERE n = ?",
        _worker(tx, model_id, base_model),
        records.next_of(tx, "release"),
        n,
    )
    tx.news.take = True


def place_waiting(tx: Transaction, base_model: str) -> None:
    """Place the released jobs that have no worker, in their order, and their models."""
    for n, model_id in tx.execute(
        "SELECT n, model_id FROM jobs WHERE state = 'ready' AND worker IS NULL AND base_model = ? "
        "ORDER BY release",
        base_model,
    ).fetchall():
        worker = _worker(tx, model_id, base_model)
        if worker is None:
            return  # no worker serves this base model: all jobs wait for one
        tx.execute(
            "UPDATE jobs SET worker = ?, release = ? WHERE n = ?",
            worker,
            records.next_of(tx, "release"),
            n,
        )
        tx.news.take = True


def unplace(tx: Transaction, model_id: str) -> None:
    """Take the model and its released jobs from their worker."""
    tx.execute("UPDATE lanes SET worker = NULL, park = 0 WHERE model_id = ?", model_id)
    tx.execute(f"UPDATE jobs SET worker = NULL WHERE model_id = ? AND {UNFINISHED}", model_id)


def _worker(tx: Transaction, model_id: str | None, base_model: str) -> int | None:
    """Return the worker's epoch for one more job; None if no worker serves the base model.

    It is the worker of the job's model, or else the one with the fewest samples or models.
    """
    if model_id is None:
        row = tx.execute(
            "UPDATE workers SET samples = samples + 1 WHERE epoch = (SELECT epoch FROM workers "
            "WHERE base_model = ? ORDER BY samples, epoch LIMIT 1) RETURNING epoch",
            base_model,
        ).fetchone()
        return None if row is None else int(row[0])
    lane = tx.execute("SELECT worker FROM lanes WHERE model_id = ?", model_id).fetchone()
    if lane is not None and lane[0] is not None:
        return int(lane[0])
    row = tx.execute(
        "SELECT epoch FROM workers WHERE base_model = ? ORDER BY "
        "(SELECT COUNT(*) FROM lanes WHERE lanes.worker = workers.epoch), epoch LIMIT 1",
        base_model,
    ).fetchone()
    if row is None:
        return None
    tx.execute("UPDATE lanes SET worker = ? WHERE model_id = ?", row[0], model_id)
    return int(row[0])
