"""The limits of the store, as the answers of its scripts in Redis."""

from collections.abc import Sequence
from typing import Any

from tuneserve_engine.core.jobs import Job
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.store import refusals
from tuneserve_engine.store.errors import LimitReached


def check_limits(new: Job, answer: Sequence[Any], policy: StorePolicy) -> None:
    """Raise ``LimitReached`` if the script's answer to a new job is a limit."""
    rule, *values = answer
    if rule == b"over":
        raise _overloaded(new, *values)
    if rule == b"ahead":
        refusals.check_window(new, int(values[0]), policy)
    if rule == b"refusals" and new.rejection is not None:
        level_s, now_s = map(float, values)
        _, wait_s = refusals.level_of_refusals(level_s, now_s, policy)
        raise refusals.too_many_refusals(new.rejection, policy.tenant_refusals, wait_s)


def _overloaded(new: Job, scope: bytes, what: bytes, held: int, limit: int) -> LimitReached:
    """Return the error for a limit that a job would pass."""
    if what == b"models":
        return refusals.too_many_models(limit, held)
    whose = {b"server": "the server", b"tenant": "your key", b"model": f"model {new.model_id}"}
    retry_after_s = {b"server": 10, b"tenant": 5, b"model": 2}[scope]
    if what == b"jobs":
        return refusals.too_many_jobs(whose[scope], limit, retry_after_s)
    return refusals.too_many_bytes(whose[scope], len(new.payload), held, limit, retry_after_s)
