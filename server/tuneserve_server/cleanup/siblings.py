"""The other API processes on the same store.

A stopped process hears none of its clients, and no other process knows which clients these are. So
no silence counts until the process is back, or has been away long enough to count as dead.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tuneserve_engine.core.records import ProcessRecord, Update
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreFailed

LATE_S = 15.0
"""The silence (at least three sweeps) below which a process may just be busy."""
DEAD_S = 600.0
"""The silence after which a process counts as dead; its clients had time to find another."""


class Absence(NamedTuple):
    """The absences: whether a process is silent now, and the longest silence that just ended."""

    lasts: bool
    over_s: float


class _Sign(NamedTuple):
    """The last heartbeat of another process, and when this process saw it, by its own clock."""

    seen_s: float
    at_s: float


class Siblings:
    """The heartbeats of this process, and its watch for those of the others."""

    def __init__(
        self,
        store: Store,
        interval_s: float,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._late_s = max(LATE_S, 3 * interval_s)
        self._wall = wall
        self._clock = clock
        self._key = uuid.uuid4().hex
        self._signs: dict[str, _Sign] = {}

    async def look(self, *, was_away: bool) -> Absence:
        """Write a heartbeat and return the absence of the others; call this every sweep.

        ``was_away`` says that this process could not hear the others since the last call.
        """
        found = {
            each.key: each for each in (await self._store.page_of_records(ProcessRecord)).items
        }
        await self._note(found.pop(self._key, None))
        lasts, over_s, now_s = False, 0.0, self._clock()
        for each in found.values():
            sign = self._signs.get(each.key)
            if sign is None:
                age_s = max(self._wall() - each.seen_s, 0.0)
                sign = self._signs[each.key] = _Sign(each.seen_s, now_s - age_s)
            silent_s = now_s - sign.at_s
            if each.seen_s != sign.seen_s or was_away:
                self._signs[each.key] = _Sign(each.seen_s, now_s)
                if silent_s > self._late_s and not was_away:
                    over_s = max(over_s, silent_s)
            elif silent_s > DEAD_S:
                await self._store.delete_record(ProcessRecord, each.key)
            elif silent_s > self._late_s:
                lasts = True
        self._signs = {key: sign for key, sign in self._signs.items() if key in found}
        return Absence(lasts, over_s)

    async def _note(self, known: ProcessRecord | None) -> None:
        seen_s = self._wall()
        if known is not None:  # an update is possible even in a full store
            await self._store.update_record(Update("process", self._key, {"seen_s": seen_s}))
            return
        with suppress(StoreFailed):
            await self._store.put_record(ProcessRecord(self._key, seen_s))

    async def leave(self) -> None:
        """Delete the record of this process, which ends for good."""
        with suppress(StoreFailed, ConnectionError):
            await self._store.delete_record(ProcessRecord, self._key)
