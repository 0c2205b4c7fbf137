"""Heartbeats by polls: a client that polls is alive, even if its heartbeats are delayed."""

import time
from collections.abc import Callable

from tuneserve_engine.core.records import Update
from tuneserve_engine.store.base import Store

EVERY_S = 30.0
_MOST_NOTED = 10_000


class Heartbeats:
    """The times at which polls were heard from sessions and from samplers of unnamed saves.

    Each is written to the store no more than once every ``EVERY_S`` seconds.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        passing: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._passing = passing  # monotonic: it advances even when the clock is set back
        self._noted_s: dict[str, float] = {}  # by session, the oldest first

    async def note_sampler(self, key: str) -> None:
        """Note that a sampler is in use; does nothing if the sampler does not exist."""
        await self._note("sampler", key, "used_s")

    async def record_sign(self, session_id: str) -> None:
        await self._note("session", session_id, "last_seen_s")

    async def _note(self, record: str, key: str, field: str) -> None:
        now_s = self._passing()
        if now_s - self._noted_s.get(key, -EVERY_S) < EVERY_S:
            return
        self._noted_s.pop(key, None)
        self._noted_s[key] = now_s
        if len(self._noted_s) > _MOST_NOTED:
            del self._noted_s[next(iter(self._noted_s))]
        try:
            await self._store.update_record(Update(record, key, {field: self._clock()}))
        except BaseException:
            self._noted_s.pop(key, None)  # the next poll tries again
            raise
