"""A worker's results in SQLite, stored together with their record changes and their usage."""

from collections.abc import Sequence

from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.records import (
    CheckpointRecord,
    ModelRecord,
    ModelStatus,
    SessionRecord,
    Update,
)
from tuneserve_engine.core.usage import Usage
from tuneserve_engine.store import refusals
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.sqlite import placement, recordings, records
from tuneserve_engine.store.sqlite import recovery_points as points
from tuneserve_engine.store.sqlite import usage as usages
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.jobs import end_job, end_model
from tuneserve_engine.store.sqlite.schema import UNFINISHED


def finish(tx: Transaction, epoch: int, outcomes: Sequence[Outcome]) -> None:
    placement.check_epoch(tx, epoch)
    spent: dict[tuple[str, str], list[Usage]] = {}
    for result in outcomes:
        row = tx.execute(
            f"SELECT tenant, COALESCE(model_id, base_model), worker IS NOT ?, {UNFINISHED} "
            "FROM jobs WHERE request_id = ?",
            epoch,
            result.request_id,
        ).fetchone()
        if row is None:
            continue
        tenant, name, is_elsewhere, is_unfinished = row
        if is_unfinished and is_elsewhere:
            raise Fenced(
                f"request {result.request_id} is not placed with lease epoch {epoch} any more: "
                "its model was given up, or moved; stop this worker"
            )
        if is_unfinished:
            if result.checkpoint is not None or result.sampler is not None:
                result = _put_records(tx, result)
            end_job(tx, result)
            if result.recording and result.rejection is None:
                recordings.put_recording(tx, result.request_id, result.recording)
            for change in result.updates:
                _update(tx, change)
        elif not usages.comes_late(tx, result):
            continue
        if result.usage is not None:
            spent.setdefault((tenant, name), []).append(result.usage)
    usages.add_usage(tx, spent)


def _put_records(tx: Transaction, result: Outcome) -> Outcome:
    """Store the outcome's records and return it; a rejection if another checkpoint has its name."""
    checkpoint, sampler = result.checkpoint, result.sampler
    if result.rejection is not None:
        return result
    if checkpoint is not None:
        taken = None
        if not result.overwrite:
            taken = records.get_record(tx, CheckpointRecord, checkpoint.key)
        if taken is not None and not taken.has_expired(tx.now_s):
            return Outcome(
                result.request_id,
                rejection=refusals.checkpoint_exists(checkpoint.key),
                updates=result.updates,
                usage=result.usage,
            )
        records.delete_record(tx, CheckpointRecord, checkpoint.key)  # overwritten: listed as new
        records.put_record(tx, checkpoint)
    if sampler is not None:
        session = records.get_record(tx, SessionRecord, sampler.parent)
        if session is None or not session.ended:
            records.put_record(tx, sampler)
        else:
            records.release(tx, sampler.file_id)
    return result


def _update(tx: Transaction, change: Update) -> None:
    """Update a record. A model that has failed or is lost ends, with its jobs."""
    record = records.update_record(tx, change)
    status = change.changes.get("status")
    if not isinstance(record, ModelRecord):
        return
    if status == ModelStatus.FAILED:
        end_model(tx, record.key, refusals.failed(record.key))
        points.forget(tx, record.key)
    elif status == ModelStatus.LOST:
        end_model(tx, record.key, refusals.lost(record.key))
