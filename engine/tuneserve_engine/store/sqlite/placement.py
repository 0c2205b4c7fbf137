"""Placement in SQLite: the assignment of models and jobs to workers.

A job that is placed gets a new ``release`` number, so that no worker's cursor is past it.
"""

from collections.abc import Sequence

from tuneserve_engine.core.jobs import Job, snapshot_and_sequences
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.sqlite import records
from tuneserve_engine.store.sqlite.group_commit import Row, Transaction
from tuneserve_engine.store.sqlite.schema import SPEEDS, UNFINISHED

SEQUENCES_TOGETHER = 16
"""The unfinished sequences of one sampling session that stay together. A worker that has so many
more sequences than the average is passed over."""


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


def count_sample(tx: Transaction, job: Job) -> int | None:
    """Count an accepted sample for its sampling session, if it has a snapshot.

    Returns the number of its sequences.
    """
    if job.rejection is not None:
        return None
    file_id, sequences = snapshot_and_sequences(job.payload)
    if file_id is not None:
        tx.execute(
            "INSERT INTO sampling (scope, sequences) VALUES (?, ?) "
            "ON CONFLICT (scope) DO UPDATE SET sequences = sequences + excluded.sequences",
            job.scope,
            sequences,
        )
    return sequences


def discount_sample(tx: Transaction, epoch: int | None, scope: str, sequences: int | None) -> None:
    """Undo ``count_sample`` and the count of the sample's worker."""
    tx.execute(
        "UPDATE workers SET samples = samples - ? WHERE epoch = ?",
        1 if sequences is None else sequences,
        epoch,
    )
    if sequences is not None:
        tx.execute(
            "UPDATE sampling SET sequences = sequences - ? WHERE scope = ?", sequences, scope
        )
        tx.execute("DELETE FROM sampling WHERE scope = ? AND sequences <= 0", scope)


def _worker_for_sample(tx: Transaction, n: int, base_model: str) -> Row | None:
    """Choose the worker of the sample ``n``, and count its sequences; None without a worker.

    Workers that only sample come first. The first ``SEQUENCES_TOGETHER`` sequences of a sampling
    session with a snapshot go to one worker, which then loads the snapshot once: to the one that
    has it for unfinished samples of the session, or else the worker of the session's first model,
    unless it is passed over. All others go to the worker with the fewest sequences.
    """
    workers = tx.execute(
        f"SELECT epoch, samples, speed = 0 FROM ({SPEEDS}) WHERE base_model = ? ORDER BY epoch",
        base_model,
    ).fetchall()
    workers = [each for each in workers if each[2]] or workers
    if not workers:
        return None
    row = tx.execute(
        "SELECT jobs.scope, IFNULL(jobs.sequences, 1), sampling.sequences, sampling.worker "
        "FROM jobs LEFT JOIN sampling USING (scope) WHERE n = ?",
        n,
    ).fetchone()
    assert row is not None
    scope, sequences, together, kept = row
    chosen = min(workers, key=lambda each: each[1])[0]
    if together is not None and together <= SEQUENCES_TOGETHER:
        first = scope.rpartition(":sample:")[0] + ":train:0"
        home = tx.execute("SELECT worker FROM lanes WHERE model_id = ?", first).fetchone()
        most = SEQUENCES_TOGETHER + sum(samples for _, samples, _ in workers) / len(workers)
        near = [epoch for epoch, samples, _ in workers if samples < most]
        wanted = (kept, home[0] if home else None)
        chosen = next((epoch for epoch in wanted if epoch in near), chosen)
        tx.execute("UPDATE sampling SET worker = ? WHERE scope = ?", chosen, scope)
    tx.execute("UPDATE workers SET samples = samples + ? WHERE epoch = ?", sequences, chosen)
    return (chosen,)


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
