"""The timed clean-up is patient after a start and after a failure, and removes old files."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.cleanup.unused_case import NOW_S, A, B, C, Names, files_of
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.store.base import Soundness
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.files import FileStore
from tuneserve_server.cleanup.awake import AwakeTime
from tuneserve_server.cleanup.sweeper import sweep_forever
from tuneserve_server.cleanup.unused_files import UnusedFiles

pytestmark = pytest.mark.anyio


class FailingStore(Names):
    """A store whose sweeps take a minute each, and some of them fail."""

    files: FileStore

    def __init__(self, *fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.now_s = 0.0
        # whether the sweep was patient, and the number of files
        self.seen: list[tuple[bool, int]] = []

    async def sweep(self, now_s: float, policy: SweepPolicy) -> None:
        self.now_s += 60
        self.seen.append((policy.session_ttl_s > 1e8, len(self.files.ids())))
        if len(self.seen) in self.fails:
            raise StoreFailed("no room")


def awake(store: FailingStore) -> AwakeTime:
    return AwakeTime(60, wall=lambda: NOW_S + store.now_s, clock=lambda: store.now_s)


class Noting(UnusedFiles):
    proved = 0

    async def prove(self) -> bool:
        self.proved += 1
        return await super().prove()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FailingStore]:
    store = FailingStore(2, 7)
    store.files = await files_of(store, tmp_path / "files")
    yield store
    await store.close()


async def test_a_sweep_is_patient_after_a_start_and_after_a_failure(
    store: FailingStore, caplog: Any
) -> None:
    """Heartbeats cannot arrive, and finished files cannot be named, while the store is away."""
    unused = UnusedFiles(store, store.files)
    sweeping = asyncio.create_task(sweep_forever(store, unused, SweepPolicy(), 0.001, awake(store)))
    with caplog.at_level(logging.WARNING):
        while len(store.seen) < 11:
            await asyncio.sleep(0.001)
    sweeping.cancel()
    # Two minutes from the start, and again from the failures at the end of minutes 2 and 7.
    assert store.seen[:7] == [(True, 3)] * 5 + [(False, 3), (False, 0)]
    assert store.seen[7:11] == [(True, 0)] * 3 + [(False, 0)]
    assert "the clean-up is waiting for the store: no room" in caplog.text
    assert "Traceback" not in caplog.text


async def test_no_file_is_removed_while_the_store_is_checked_and_the_lease_is_renewed(
    store: FailingStore,
) -> None:
    """A damaged store may not know the files in use."""
    store.fails = ()
    store.soundness = Soundness("checking")
    unused = Noting(store, store.files)
    sweeping = asyncio.create_task(sweep_forever(store, unused, SweepPolicy(), 0.001, awake(store)))
    while len(store.seen) < 6:
        await asyncio.sleep(0.001)
    assert store.files.ids() == {A, B, C} and unused.proved >= 5
    store.soundness = Soundness("sound")
    while store.files.ids():
        await asyncio.sleep(0.001)
    sweeping.cancel()
