"""Heartbeats by polls: a client that polls is alive, even if its heartbeats are delayed."""

import time
from collections.abc import Callable
from typing import Literal

from tuneserve_engine.core.records import Update
from tuneserve_engine.store.base import Store

EVERY_S = 30.0
_MOST_NOTED = 10_000
_FIELD = {"session": "last_seen_s", "sampler": "used_s"}


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

    async def record_sign(self, record: Literal["session", "sampler"], key: str) -> None:
        """Note that a session or sampler is in use; does nothing if it does not exist."""
        now_s = self._passing()
        if now_s - self._noted_s.get(key, -EVERY_S) < EVERY_S:
            return
        self._noted_s.pop(key, None)
        self._noted_s[key] = now_s
        if len(self._noted_s) > _MOST_NOTED:
            del self._noted_s[next(iter(self._noted_s))]
        try:
            used = {_FIELD[record]: self._clock()}
            await self._store.update_record(Update(record, key, used))
        except BaseException:
            self._noted_s.pop(key, None)  # the next poll tries again
            raise
