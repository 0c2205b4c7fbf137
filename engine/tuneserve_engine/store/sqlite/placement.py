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


def release(tx: Transaction, n: int, model_id: str | None, base_model: str) -> None:
    """Make the job ``n`` ready, and place it if a worker serves its base model.

    Its worker is the one of its model, or else the one with the fewest samples or models. Workers
    that only sample come first for samples, and get no models.
    """
    if model_id is None:
        worker = tx.execute(
            "UPDATE workers SET samples = samples + 1 WHERE epoch = (SELECT epoch FROM workers "
            "WHERE base_model = ? ORDER BY epoch NOT IN (SELECT epoch FROM samplers), samples, "
            "epoch LIMIT 1) RETURNING epoch",
            base_model,
        ).fetchone()
    else:
        worker = tx.execute("SELECT worker FROM lanes WHERE model_id = ?", model_id).fetchone()
        if worker in (None, (None,)):
            worker = tx.execute(
                "SELECT epoch FROM workers WHERE base_model = ? "
                "AND epoch NOT IN (SELECT epoch FROM samplers) ORDER BY "
                "(SELECT COUNT(*) FROM lanes WHERE lanes.worker = workers.epoch), epoch LIMIT 1",
                base_model,
            ).fetchone()
            if worker is not None:
                tx.execute("UPDATE lanes SET worker = ? WHERE model_id = ?", worker[0], model_id)

    tx.execute(
        "UPDATE jobs SET state = 'ready', worker = ?, release = ? WHERE n = ?",
        None if worker is None else worker[0],
        records.next_of(tx, "release"),
        n,
    )
    tx.news.take = True


def place_waiting(tx: Transaction, base_model: str) -> None:
    """Place the released jobs that have no worker, in their order, and their models."""
    waiting = tx.execute(
        "SELECT n, model_id FROM jobs WHERE state = 'ready' AND worker IS NULL AND base_model = ? "
        "ORDER BY release",
        base_model,
    ).fetchall()
    if not tx.execute("SELECT 1 FROM workers WHERE base_model = ?", base_model).fetchone():
        return  # all jobs wait for a worker
    for n, model_id in waiting:
        release(tx, n, model_id, base_model)


def unplace(tx: Transaction, model_id: str) -> None:
    """Take the model and its released jobs from their worker."""
    tx.execute("UPDATE lanes SET worker = NULL, park = 0 WHERE model_id = ?", model_id)
    tx.execute(f"UPDATE jobs SET worker = NULL WHERE model_id = ? AND {UNFINISHED}", model_id)
