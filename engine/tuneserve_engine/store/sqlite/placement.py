"""Placement in SQLite: the assignment of models and jobs to workers.

A job that is placed gets a new ``release`` number, so that no worker's cursor is past it.
"""

from collections.abc import Sequence
from hashlib import sha1

from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Row, Transaction
from tuneserve_engine.store.sqlite.schema import SPEEDS, UNFINISHED

SAMPLES_TOGETHER = 16
"""The unfinished samples of one sampling session that stay together. A worker that has so many more
samples than the average is passed over."""


def check_epoch(tx: Transaction, epoch: int) -> None:
    if tx.execute("SELECT 1 FROM workers WHERE epoch = ?", epoch).fetchone() is None:
        raise Fenced(
            f"lease epoch {epoch} is over: another process has this worker's name, or it was "
            "silent for too long and others have its models; stop this worker"
        )


def release(tx: Transaction, n: int, model_id: str | None, base_model: str) -> None:
    """Make the job ``n`` ready, and place it if a worker serves its base model.

    A job of a model goes to the model's worker, or else to the one that then has the fewest models
    for its speed.
    """
    if model_id is None:
        worker = _worker_for_sample(tx, n, base_model)
    else:
        worker = tx.execute("SELECT worker FROM lanes WHERE model_id = ?", model_id).fetchone()
        if worker in (None, (None,)):
            worker = place_models(tx, [model_id], base_model)

    tx.execute(
        "UPDATE jobs SET state = 'ready', worker = ?, release = ? WHERE n = ?",
        None if worker is None else worker[0],
        records.next_of(tx, "release"),
        n,
    )
    tx.news.take = True


def trainers(tx: Transaction, base_model: str) -> list[tuple[int, float, int]]:
    """Return epoch, speed and number of models of the base model's workers that train."""
    return tx.execute(
        f"SELECT epoch, speed, (SELECT COUNT(*) FROM lanes WHERE worker = epoch) FROM ({SPEEDS}) "
        "WHERE base_model = ? AND speed > 0 ORDER BY epoch",
        base_model,
    ).fetchall()


def place_models(tx: Transaction, model_ids: Sequence[str], base_model: str) -> Row | None:
    """Place the models, each with the worker that then has the fewest for its speed.

    Returns the last one's worker; None if no worker trains.
    """
    found = {epoch: (speed, count) for epoch, speed, count in trainers(tx, base_model)}
    chosen = None
    for model_id in model_ids if found else ():
        chosen = min(found, key=lambda epoch: (1 + found[epoch][1]) / found[epoch][0])
        found[chosen] = found[chosen][0], found[chosen][1] + 1
        tx.execute("UPDATE lanes SET worker = ? WHERE model_id = ?", chosen, model_id)
    return None if chosen is None else (chosen,)


def _worker_for_sample(tx: Transaction, n: int, base_model: str) -> Row | None:
    """Choose the worker of the sample ``n``, and count the sample; None without a worker.

    Workers that only sample come first. The first ``SAMPLES_TOGETHER`` samples of a sampling
    session go to one worker, which then loads their snapshot once. It is the worker of the
    session's first model, or else the first in a random order of this sampling session (rendezvous
    hashing), of those that are not passed over. Further samples go to the worker with the fewest.
    """
    workers = tx.execute(
        f"SELECT epoch, samples, speed = 0 FROM ({SPEEDS}) WHERE base_model = ? ORDER BY epoch",
        base_model,
    ).fetchall()
    workers = [each for each in workers if each[2]] or workers
    if not workers:
        return None
    row = tx.execute("SELECT scope FROM jobs WHERE n = ?", n).fetchone()
    assert row is not None
    (scope,) = row
    of_scope = tx.execute(
        f"SELECT 1 FROM jobs WHERE scope = ? AND kind = 'sample' AND {UNFINISHED} LIMIT ?",
        scope,
        SAMPLES_TOGETHER + 1,
    ).fetchall()
    if len(of_scope) > SAMPLES_TOGETHER:
        chosen = min(workers, key=lambda each: each[1])[0]
    else:
        first = scope.rpartition(":sample:")[0] + ":train:0"
        home = tx.execute("SELECT worker FROM lanes WHERE model_id = ?", first).fetchone()
        average = sum(samples for _, samples, _ in workers) / len(workers)
        near = [each for each, samples, _ in workers if samples < average + SAMPLES_TOGETHER]
        chosen = max(near, key=lambda each: (home == (each,), _order(each, scope)))
    tx.execute("UPDATE workers SET samples = samples + 1 WHERE epoch = ?", chosen)
    return (chosen,)


def _order(epoch: int, scope: str) -> str:
    return sha1(f"{epoch}:{scope}".encode()).hexdigest()


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
