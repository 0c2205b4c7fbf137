"""The states of runs: as their training loops said, else as their sessions ended."""

from typing import get_args

from tuneserve_client.runs import RunOutcome, RunState
from tuneserve_engine.core.records import ModelRecord, ModelStatus

OUTCOMES: tuple[RunOutcome, ...] = get_args(RunOutcome)


def told_state(model: ModelRecord) -> RunState:
    """Return the state of a run by its record alone; a run whose session is open is running."""
    if model.status in (ModelStatus.FAILED, ModelStatus.LOST):
        return "failed"
    outcome = model.user_metadata.get("outcome")
    for known in OUTCOMES:
        if outcome == known:
            return known
    if model.status is not ModelStatus.ENDED:
        return "running"
    return "finished" if model.ended in (None, "success") else "stopped"
