"""A worker's results in SQLite, stored together with their record changes and their usage."""

from collections.abc import Sequence

from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.records import CheckpointRecord, ModelRecord, ModelStatus, SessionRecord
from tuneserve_engine.core.usage import Totals
from tuneserve_engine.store import refusals
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.sqlite import placement, recordings, records
from tuneserve_engine.store.sqlite import recovery_points as points
from tuneserve_engine.store.sqlite import usage as usages
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.jobs import end_job, end_model, is_unfinished
from tuneserve_engine.store.sqlite.schema import UNFINISHED


def finish(tx: Transaction, epoch: int, outcomes: Sequence[Outcome]) -> None:
    placement.check_epoch(tx, epoch)
    owners: dict[str, tuple[str, str]] = {}
    for each in outcomes:
        row = tx.execute(
            "SELECT tenant, COALESCE(model_id, base_model), "
            f"worker IS NOT ? AND {UNFINISHED} FROM jobs WHERE request_id = ?",
            epoch,
            each.request_id,
        ).fetchone()
        if row is None:
            continue
        tenant, name, is_elsewhere = row
        owners[each.request_id] = tenant, name
        if is_elsewhere:
            raise Fenced(
                f"request {each.request_id} is not placed with lease epoch {epoch} any more: "
                "its model was given up, or moved; stop this worker"
            )
    spent: dict[tuple[str, str], Totals] = {}
    for each in outcomes:
        if is_unfinished(tx, each.request_id):
            _finish_one(tx, each)
        elif not usages.comes_late(tx, each):
            continue
        if each.usage is not None:
            owner = owners[each.request_id]
            spent[owner] = spent.get(owner, Totals()) + Totals.from_usage(each.usage)
    usages.add_usage(tx, spent)


def _finish_one(tx: Transaction, result: Outcome) -> None:
    result = _unless_taken(tx, result)
    checkpoint, sampler = result.checkpoint, result.sampler
    if checkpoint is not None and result.rejection is None:
        records.delete_record(tx, CheckpointRecord, checkpoint.key)  # overwritten: listed as new
        records.put_record(tx, checkpoint)
    if sampler is not None and result.rejection is None:
        session = records.get_record(tx, SessionRecord, sampler.parent)
        if session is None or not session.ended:
            records.put_record(tx, sampler)
        else:
            records.release(tx, sampler.file_id)
    end_job(tx, result)
    if result.recording and result.rejection is None:
        recordings.put_recording(tx, result.request_id, result.recording)
    for change in result.updates:
        record = records.update_record(tx, change)
        status = change.changes.get("status")
        if not isinstance(record, ModelRecord):
            continue
        if status == ModelStatus.FAILED:
            end_model(tx, record.key, refusals.failed(record.key))
            points.forget(tx, record.key)
        elif status == ModelStatus.LOST:
            end_model(tx, record.key, refusals.lost(record.key))


def _unless_taken(tx: Transaction, result: Outcome) -> Outcome:
    """Return the outcome, or a rejection if another checkpoint has its name."""
    checkpoint = result.checkpoint
    if checkpoint is None or result.overwrite or result.rejection is not None:
        return result
    taken = records.get_record(tx, CheckpointRecord, checkpoint.key)
    if taken is None or taken.has_expired(tx.now_s):
        return result
    exists = refusals.checkpoint_exists(checkpoint.key)
    return Outcome(result.request_id, rejection=exists, updates=result.updates, usage=result.usage)
