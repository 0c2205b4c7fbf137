"""Heartbeats by polls are written to the store once every half minute."""

from typing import cast

import pytest

from tuneserve_engine.core.records import Update
from tuneserve_engine.store.base import Store
from tuneserve_server.heartbeats import Heartbeats

pytestmark = pytest.mark.anyio


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Updates:
    """The part of a store that receives heartbeats."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.fails = False

    async def update_record(self, update: Update) -> None:
        if self.fails:
            raise ConnectionError("away")
        self.updates.append(update)


async def test_a_session_is_recorded_up_to_once_every_half_minute() -> None:
    store, clock = Updates(), Clock()
    seen = Heartbeats(cast(Store, store), clock, clock)
    for now_s in (100.0, 101.0, 129.9, 130.0, 159.0):
        clock.now_s = now_s
        await seen.record_sign("session", "s-1")
    await seen.record_sign("session", "s-2")
    assert store.updates == [
        Update("session", "s-1", {"last_seen_s": 100.0}),
        Update("session", "s-1", {"last_seen_s": 130.0}),
        Update("session", "s-2", {"last_seen_s": 159.0}),
    ]


async def test_a_heartbeat_that_the_store_missed_is_sent_again() -> None:
    store, clock = Updates(), Clock()
    seen = Heartbeats(cast(Store, store), clock, clock)
    store.fails = True
    with pytest.raises(ConnectionError):
        await seen.record_sign("session", "s-1")
    store.fails = False
    await seen.record_sign("session", "s-1")
    assert len(store.updates) == 1
