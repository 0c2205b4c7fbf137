"""The steps whose error messages depend on what they read: the end of a session, and the sweep.

Python reads first and writes the messages. The script that acts compares what was read again, so
that no change in between is overlooked.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.redis import encoding as forms

Run = Callable[..., Awaitable[Any]]
_CHUNK = 1000  # requests that one script forgets: Redis serves no other call meanwhile


async def end_session(
    store: Store, run: Run, key: str, reason: str, before_s: float = float("inf")
) -> None:
    """End a session that was last seen before ``before_s``."""
    secret = await store.secret()
    while True:
        models = (await store.page_of_records(ModelRecord, parent=key)).items
        held = forms.rejection(refusals.gap_at_end(key, reason))
        known = {each.key: {"unload": _unload(secret, each), "held": held} for each in models}
        text = msgspec.json.encode(reason)
        packed = forms.pack(known)
        (answer,) = await run("end_session", key, text, before_s, packed, refusals.RECORDS_AT_ONCE)
        if answer == b"ended":
            return


def _unload(secret: bytes, model: ModelRecord) -> dict[str, Any]:
    """Return the job that unloads the model, behind its log. No limit applies to it."""
    job = Job(model.tenant, JobKind.UNLOAD_MODEL, f"{model.key}/unload", 0, model_id=model.key)
    return forms.job(job, refusals.request_id(secret, job))


async def sweep(
    store: Store, run: Run, now_s: float, policy: SweepPolicy, tenant_models: int
) -> None:
    """Run the sweep; see ``Store.sweep``."""
    while await run("date_back", now_s, policy.set_back_s, refusals.RECORDS_AT_ONCE):
        pass
    session_before, sample_before, gap_before = (
        now_s - ttl_s for ttl_s in (policy.session_ttl_s, policy.sample_ttl_s, policy.gap_ttl_s)
    )
    sessions, samples, gaps = await run(
        "stale", session_before, sample_before, gap_before, refusals.ENDED_AT_ONCE
    )
    for key in sessions:
        await end_session(store, run, key.decode(), "expired", session_before)
    silent = [_silent(request_id, session, policy.sample_ttl_s) for request_id, session in samples]
    for start in range(0, len(silent), refusals.RECORDS_AT_ONCE):
        chunk = silent[start : start + refusals.RECORDS_AT_ONCE]
        await run("drop_samples", sample_before, forms.pack(chunk))
    for model, following, ahead in gaps:
        rejection = refusals.gap(_missing(int(following), ahead), policy.gap_ttl_s)
        args = (model, following, len(ahead), rejection.message, rejection.category)
        await run("give_up_gap", *args)
    await run("park", now_s - policy.park_s)
    await run("create_waiting", tenant_models)
    while await run("expire", now_s - policy.result_ttl_s, now_s, refusals.RECORDS_AT_ONCE):
        pass
    await _drop_recordings(run, now_s, policy)
    await _forget(run, now_s - 2 * policy.result_ttl_s)
    for _ in range(refusals.ENDED_AT_ONCE // refusals.RECORDS_AT_ONCE):
        before_s = now_s - policy.ended_session_ttl_s
        if (
            await run("forget_sessions", before_s, refusals.RECORDS_AT_ONCE)
            < refusals.RECORDS_AT_ONCE
        ):
            break


async def _drop_recordings(run: Run, now_s: float, policy: SweepPolicy) -> None:
    ttl_s = policy.recording_ttl_s
    limits = (policy.recording_bytes, refusals.DROPPED_AT_ONCE, refusals.DROPPED_BYTES)
    while await run("recordings_drop", now_s - ttl_s, now_s - 2 * ttl_s, *limits):
        pass


async def _forget(run: Run, before_s: float) -> None:
    left = refusals.FORGOTTEN_AT_ONCE
    while left > 0:
        most = min(left, _CHUNK)
        if await run("forget", before_s, most) < most:
            return
        left -= most


def _silent(request_id: bytes, session: bytes, ttl_s: float) -> dict[str, Any]:
    rejection = refusals.silent(session.decode(), ttl_s)
    return {"id": request_id.decode(), "session": session.decode()} | forms.rejection(rejection)


def _missing(expected: int, ahead: Iterable[list[Any]]) -> list[tuple[int, int]]:
    """Return the inclusive ranges of missing seq_ids, from ``expected`` to the last position."""
    missing = []
    for position, seq in ((int(p), int(s)) for p, s in ahead):
        if position > expected:
            offset = seq - position
            missing.append((expected + offset, position - 1 + offset))
        expected = position + 1
    return missing
