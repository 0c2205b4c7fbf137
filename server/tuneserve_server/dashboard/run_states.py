"""The states of runs: as their training loops said, else as their sessions are."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import get_args

from tuneserve_client.runs import RunOutcome, RunState
from tuneserve_engine.core.records import ModelRecord, ModelStatus, SessionRecord
from tuneserve_engine.store.base import Store, StoreStats

OUTCOMES: tuple[RunOutcome, ...] = get_args(RunOutcome)
SILENT_S = 120.0  # clients send heartbeats every 10 s; polls count every 30 s
_FRESH_S = 10.0  # between two look-ups of a silent session
_KEPT = 65_536


class RunStates:
    """The states of runs, from their records and from the last signs of life of their sessions.

    A client that was killed ends no session. Its run counts as stopped while the session is silent,
    and as running again once the client is back.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        # By session: when it was looked up, and when it had given its last sign of life.
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def states_of(self, models: Sequence[ModelRecord], stats: StoreStats) -> list[RunState]:
        """Return the states of the models, in order.

        Sessions are looked up only for open runs without a recent or unfinished request.
        """
        now_s = time.time()
        told = [_told_state(model) for model in models]
        quiet = {
            model.key: model.parent
            for model, state in zip(models, told, strict=True)
            if state == "running"
            and now_s - model.last_request_s > SILENT_S
            and model.key not in stats.busy
        }
        silent = await self._silent(set(quiet.values()), now_s)
        return [
            "stopped" if quiet.get(model.key) in silent else state
            for model, state in zip(models, told, strict=True)
        ]

    async def _silent(self, sessions: set[str], now_s: float) -> set[str]:
        """Return the sessions without a recent sign of life."""
        clock_s, never = self._clock(), (-math.inf, -math.inf)
        seen = {key: self._seen.get(key, never) for key in sessions}
        due = [
            key
            for key, (looked_s, seen_s) in seen.items()
            if clock_s - looked_s > _FRESH_S and now_s - seen_s > SILENT_S
        ]
        found = await asyncio.gather(*(self._store.get_record(SessionRecord, key) for key in due))
        for key, session in zip(due, found, strict=True):
            self._seen[key] = seen[key] = clock_s, session.last_seen_s if session else -math.inf
            self._seen.move_to_end(key)
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)
        return {key for key, (_, seen_s) in seen.items() if now_s - seen_s > SILENT_S}


def _told_state(model: ModelRecord) -> RunState:
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
