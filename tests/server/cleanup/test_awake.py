"""Silence counts in time awake: a stopped process or a changed clock ends nothing early or late."""

import asyncio
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    checkpoint,
    job,
    model,
    sample,
    sampler,
    session,
)
from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import CheckpointRecord, SessionRecord, Update
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.files_mount import check_shared
from tuneserve_server.cleanup.awake import AwakeTime
from tuneserve_server.cleanup.siblings import Siblings
from tuneserve_server.cleanup.sweeper import in_time_awake, sweep_forever
from tuneserve_server.cleanup.unused_files import UnusedFiles

pytestmark = pytest.mark.anyio
SWEEP_S = 5.0
POLICY = SweepPolicy(session_ttl_s=600, sample_ttl_s=120, gap_ttl_s=60)


class Life:
    """A store, and a sweeper on clocks that the test moves.

    The sessions "alive" and "dead" each have a waiting sample. Only "alive" sends heartbeats.
    """

    sweeping: "asyncio.Task[None]"
    files: FileStore

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.wall_s, self.passed_s = START_S, 0.0
        self.samples: dict[str, str] = {}
        self._turns: asyncio.Queue[None] = asyncio.Queue()
        self.slept = asyncio.Event()

    async def sleep(self, _: float) -> None:
        self.slept.set()
        await self._turns.get()

    async def passes(self, seconds: float, heard: str = "alive") -> None:
        """Let time pass awake: a sweep every five seconds, and a heartbeat before each."""
        for _ in range(int(seconds / SWEEP_S)):
            self.wall_s += SWEEP_S
            self.passed_s += SWEEP_S
            await self.store.update_record(Update("session", heard, {"last_seen_s": self.wall_s}))
            await self.sweep()

    async def sweep(self) -> None:
        self.slept.clear()
        self._turns.put_nowait(None)
        await asyncio.wait_for(self.slept.wait(), 10)

    async def begin(self, *names: str) -> None:
        for name in names:
            await self.store.put_record(session(name, last_seen_s=self.wall_s))
            await self.store.put_record(sampler(f"{name}:sample:0"))
            job = sample(1, scope=f"{name}:sample:0")
            self.samples[name] = (await self.store.submit(job)).request_id

    async def are_there(self, name: str) -> tuple[bool, bool]:
        """Whether the session lives, and whether its sample waits."""
        found = await self.store.get_record(SessionRecord, name)
        assert found is not None
        return found.ended is None, await self.store.wait(self.samples[name], 0) is None


@pytest.fixture
async def life(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Life]:
    store = MemoryStore(clock=lambda: life.wall_s)
    life = Life(store)
    patched = SimpleNamespace(sleep=life.sleep, to_thread=asyncio.to_thread)
    monkeypatch.setattr("tuneserve_server.cleanup.sweeper.asyncio", patched)
    awake = AwakeTime(SWEEP_S, wall=lambda: life.wall_s, clock=lambda: life.passed_s)
    await check_shared(FileStore(tmp_path / "files"), store)
    life.files = FileStore(tmp_path / "files", clock=lambda: life.wall_s)
    unused = UnusedFiles(store, life.files)
    life.sweeping = asyncio.create_task(sweep_forever(store, unused, POLICY, SWEEP_S, awake))
    await asyncio.wait_for(life.slept.wait(), 10)
    await life.begin("alive")
    await life.passes(150)  # for a while after a start, no session counts as silent
    await life.begin("dead")
    yield life
    life.sweeping.cancel()
    await asyncio.gather(life.sweeping, return_exceptions=True)


async def test_silent_samples_and_sessions_end_by_time_awake(life: Life) -> None:
    await life.passes(115)
    assert await life.are_there("dead") == (True, True)
    await life.passes(15)
    assert await life.are_there("dead") == (True, False)
    await life.passes(460)
    assert await life.are_there("dead") == (True, False)
    await life.passes(20)
    assert await life.are_there("dead") == (False, False)
    assert await life.are_there("alive") == (True, True)


@pytest.mark.parametrize(
    ("wall_s", "passed_s"),
    [(3600.0, 3600.0), (3600.0, 0.0), (-3600.0, 0.0)],
    ids=["SIGSTOP", "set ahead, or a paused machine", "set back"],
)
async def test_a_stopped_process_or_a_changed_clock_ends_nothing_early_or_late(
    life: Life, wall_s: float, passed_s: float
) -> None:
    await life.passes(100)
    life.wall_s += wall_s
    life.passed_s += passed_s
    await life.sweep()
    assert await life.are_there("dead") == (True, True)
    assert await life.are_there("alive") == (True, True)
    await life.passes(10)
    assert await life.are_there("dead") == (True, True)
    await life.passes(20)
    assert await life.are_there("dead") == (True, False)
    await life.passes(450)
    assert await life.are_there("dead") == (True, False)
    await life.passes(50)
    assert await life.are_there("dead") == (False, False)
    assert await life.are_there("alive") == (True, True)


async def test_a_missing_request_has_its_full_time_awake_to_arrive(life: Life) -> None:
    await life.store.put_record(session("s", last_seen_s=life.wall_s))
    await life.store.put_record(model())
    held = (await life.store.submit(job(2, "s:train:0"))).request_id
    await life.passes(40)
    life.wall_s += 3600
    life.passed_s += 3600
    await life.passes(10)
    assert await life.store.wait(held, 0) is None
    await life.passes(15)
    outcome = await life.store.wait(held, 0)
    assert outcome is not None and outcome.rejection is not None


@pytest.mark.parametrize("passed_s", [3600.0, 0.0], ids=["SIGSTOP", "set ahead"])
async def test_a_new_file_has_its_full_time_awake_to_be_named(life: Life, passed_s: float) -> None:
    file_id = "a" * 32
    life.files.write(file_id, {"a": b"x"})
    os.utime(life.files.path(file_id), (life.wall_s, life.wall_s))
    await life.passes(10)
    life.wall_s += 3600
    life.passed_s += passed_s
    await life.sweep()
    await life.passes(870)
    assert life.files.ids() == {file_id}
    await life.passes(40)
    assert life.files.ids() == set()


async def test_after_a_pause_files_are_left_alone_for_a_while(life: Life) -> None:
    """A worker that waited for this process has written its file and names it now."""
    file_id = "a" * 32
    life.files.write(file_id, {"a": b"x"})
    os.utime(life.files.path(file_id), (life.wall_s, life.wall_s))
    await life.passes(895)
    life.wall_s += 3600
    life.passed_s += 3600
    await life.sweep()
    await life.passes(115)
    assert life.files.ids() == {file_id}
    await life.passes(20)
    assert life.files.ids() == set()


def test_ages_skip_several_absences() -> None:
    now = [START_S, 0.0]
    awake = AwakeTime(5, wall=lambda: now[0], clock=lambda: now[1])
    assert awake.age_s(100) == 100
    for stopped_s in (1000, 2000):
        now[:] = now[0] + stopped_s, now[1] + stopped_s
        assert awake.tick() == stopped_s - 5
        for _ in range(6):
            now[:] = now[0] + 5, now[1] + 5
            assert awake.tick() == 0
    assert [awake.age_s(each) for each in (30, 31, 64, 66)] == [30, 2026, 2059, 3056]
    now[0] -= 10_000  # earlier absences keep their age
    assert awake.tick() == -10_000
    assert [awake.age_s(each) for each in (30, 31, 64, 66)] == [30, 2026, 2059, 3056]


def test_short_pauses_add_up() -> None:
    """A silent sample loses 60 s to six pauses of 10 s."""
    now = [START_S, 0.0]
    awake = AwakeTime(5, wall=lambda: now[0], clock=lambda: now[1])
    for _ in range(6):
        now[:] = now[0] + 9.5, now[1] + 9.5
        assert awake.tick() == 0  # the process may be busy for that long
    assert awake.age_s(60) >= 60 + 6 * 4.5 - 5
    for _ in range(10):
        now[:] = now[0] + 4, now[1] + 4  # its own work is not an absence
        assert awake.tick(worked=True) == 0
        now[:] = now[0] + 5, now[1] + 5
        assert awake.tick() == 0
    assert awake.age_s(60) == 60


def test_clock_drift_is_not_an_absence() -> None:
    now = [START_S, 0.0]
    awake = AwakeTime(5, wall=lambda: now[0], clock=lambda: now[1])
    for _ in range(1000):
        now[:] = now[0] + 5.001, now[1] + 5.0
        assert awake.tick() == 0
    assert awake.age_s(60) == 60


async def test_times_in_the_future_are_dated_back_after_a_start(life: Life) -> None:
    """The clock was set back while no process ran, so records would last longer by that much."""
    later_s = life.wall_s + 3600
    await life.store.put_record(session("s", last_seen_s=later_s))
    await life.store.put_record(checkpoint("c", created_s=later_s, expires_s=later_s + 100))
    unused = UnusedFiles(life.store, life.files)
    awake = AwakeTime(SWEEP_S, wall=lambda: life.wall_s, clock=lambda: life.passed_s)
    again = asyncio.create_task(sweep_forever(life.store, unused, POLICY, SWEEP_S, awake))
    await asyncio.sleep(0)
    await life.sweep()
    await life.sweep()
    found = await life.store.get_record(CheckpointRecord, checkpoint("c").key)
    assert found is not None and found.expires_s is not None
    assert found.created_s <= life.wall_s
    assert 90 <= found.expires_s - life.wall_s <= 100
    seen = await life.store.get_record(SessionRecord, "s")
    assert seen is not None and seen.last_seen_s <= life.wall_s
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_samples_of_a_stopped_process_have_their_full_time_awake(life: Life) -> None:
    other = Siblings(life.store, SWEEP_S, wall=lambda: life.wall_s, clock=lambda: life.passed_s)
    mine = Siblings(life.store, SWEEP_S, wall=lambda: life.wall_s, clock=lambda: life.passed_s)
    await other.look(was_away=False)
    life.sweeping.cancel()
    await asyncio.gather(life.sweeping, return_exceptions=True)
    unused = UnusedFiles(life.store, life.files)
    awake = AwakeTime(SWEEP_S, wall=lambda: life.wall_s, clock=lambda: life.passed_s)
    life.sweeping = asyncio.create_task(
        sweep_forever(life.store, unused, POLICY, SWEEP_S, awake, siblings=mine)
    )
    await asyncio.sleep(0)
    for _ in range(26):  # until silence counts again after the start
        await other.look(was_away=False)
        await life.passes(SWEEP_S)
    await life.begin("late")
    await life.passes(180)
    assert await life.are_there("late") == (True, True)
    await other.look(was_away=True)
    await life.passes(SWEEP_S)
    assert await life.are_there("late") == (True, True)
    for _ in range(26):
        await other.look(was_away=False)
        await life.passes(SWEEP_S)
    assert await life.are_there("late") == (True, False)


def test_results_and_recordings_are_retained_for_time_awake() -> None:
    wall_s, passed_s = 1000.0, 0.0
    awake = AwakeTime(SWEEP_S, wall=lambda: wall_s, clock=lambda: passed_s)
    wall_s, passed_s = wall_s + 90_000, passed_s + SWEEP_S  # over a day in a paused machine
    awake.tick()
    policy = in_time_awake(SweepPolicy(), awake)
    assert policy.result_ttl_s > 86_400 + 89_000
    assert policy.recording_ttl_s > 86_400 + 89_000
