"""Samples wait for their snapshots beside the device, and few snapshots are in memory."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.engine.worker.models.test_recovery import NEVER, train
from tests.support.worker_bench import Bench, run, until
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.jobs import Job, JobKind, SampleCommand, SaveWeights, encode
from tuneserve_engine.core.records import CheckpointKind, SamplerRecord
from tuneserve_engine.worker.execution.read_ahead import MOST_READ, ReadSnapshots, SnapshotReader
from tuneserve_engine.worker.pending import PendingJobs

FILE = "0" * 32


def sample(seq: int, file_id: str | None, sequences: int = 1) -> Job:
    command = SampleCommand([1, 2], seed=seq, file_id=file_id, max_tokens=2, num_samples=sequences)
    name = f"sample-{seq}"
    return Job("a", JobKind.SAMPLE, "s", seq, encode(command), request_id=name, release=seq)


class Files:
    """Files that are read once ``may_read`` allows it."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.may_read = asyncio.Event()
        self.pending = PendingJobs()
        self.snapshots = ReadSnapshots(self._state)
        self.tasks: list[asyncio.Task[None]] = []
        spawn = lambda call: self.tasks.append(asyncio.create_task(call))  # noqa: E731
        self.reader = SnapshotReader(self.snapshots, self.pending, spawn, self._on_reader)
        self.reader.start()

    def _state(self, file_id: str) -> AdapterState:
        self.read.append(file_id)
        if file_id == "missing":
            raise FileNotFoundError(file_id)
        return AdapterState(None, {})  # type: ignore[arg-type]

    async def _on_reader(self, call: Callable[[], None]) -> None:
        await self.may_read.wait()
        call()

    async def route(self, *files: str | None) -> None:
        """Route samples 0, 1, … of these files, then let everything happen that can."""
        for seq, file_id in enumerate(files):
            self.reader.route(sample(seq, file_id))
        await asyncio.sleep(0.01)

    def waiting(self) -> list[int]:
        return [job.seq for job in self.pending.in_order()]

    async def begin(self, seq: int, file_id: str) -> None:
        """Begin the sample on the device's thread."""
        (job,) = (job for job in self.pending.in_order() if job.seq == seq)
        self.pending.remove_jobs([job])
        if file_id not in self.snapshots._begun:
            await asyncio.to_thread(self.snapshots.take_state, file_id)
        await self.end(seq, file_id, is_loaded=True)

    async def end(self, seq: int, file_id: str, *, is_loaded: bool) -> None:
        await asyncio.to_thread(
            self.snapshots.note_begun, f"sample-{seq}", file_id, is_loaded=is_loaded
        )
        await asyncio.sleep(0.01)


def play(scenario: Callable[[Files], Awaitable[None]]) -> None:
    async def main() -> None:
        files = Files()
        async with asyncio.timeout(20):
            await scenario(files)
        assert all(task.done() and task.exception() is None for task in files.tasks)

    asyncio.run(main())


def test_a_sample_waits_until_its_snapshot_is_read_once() -> None:
    async def scenario(files: Files) -> None:
        await files.route("one", None, "one")
        assert files.waiting() == [1]
        assert files.reader.sequences == 2
        files.may_read.set()
        await until(lambda: files.waiting() == [0, 1, 2])
        assert files.reader.sequences == 0
        files.reader.route(sample(3, "one"))
        assert files.waiting() == [0, 1, 2, 3]
        for seq in (0, 2, 3):
            await files.begin(seq, "one")
        assert files.read == ["one"] and len(files.snapshots) == 0
        files.reader.route(sample(4, "one"))  # on the device
        assert files.waiting() == [1, 4]
        files.snapshots.take_state("one")  # evicted from the device meanwhile
        assert files.read == ["one", "one"]

    play(scenario)


def test_samples_without_room_wait_for_the_device_until_there_is_room() -> None:
    async def scenario(files: Files) -> None:
        await files.route("a", "b", "c", "d", "c")
        assert files.waiting() == [2, 3, 4]
        files.may_read.set()
        await until(lambda: files.waiting() == [0, 1, 2, 3, 4])
        assert files.read == ["a", "b"]
        files.may_read.clear()
        await files.begin(0, "a")
        assert files.waiting() == [1, 3]  # those of the next file are held while it is read
        files.may_read.set()
        await until(lambda: files.waiting() == [1, 2, 3, 4])
        assert files.read == ["a", "b", "c"] and len(files.snapshots) == MOST_READ
        await files.begin(3, "d")  # the device's turn came before there was room
        assert files.read == ["a", "b", "c", "d"]
        for seq, file_id in ((1, "b"), (2, "c"), (4, "c")):
            await files.begin(seq, file_id)
        assert files.read == ["a", "b", "c", "d"]
        assert len(files.snapshots) == 0 and not files.reader._unread and not files.reader._read

    play(scenario)


def test_cancelled_samples_leave_their_room_to_others() -> None:
    async def scenario(files: Files) -> None:
        await files.route("a", "b", "c", "d", "e", "e")
        assert files.waiting() == [2, 3, 4, 5]
        files.may_read.set()
        await until(lambda: files.waiting() == [0, 1, 2, 3, 4, 5])
        files.may_read.clear()

        def cancel(*requests: int) -> None:
            names = [f"sample-{each}" for each in requests]
            files.pending.drop_requests(names)
            files.reader.drop_requests(names)

        cancel(2, 4)  # without room for their files
        cancel(0)  # whose file has been read
        await asyncio.sleep(0.01)
        assert files.waiting() == [1, 5] and files.reader._held.keys() == {"d"}
        cancel(3)  # while its file is being read
        files.may_read.set()
        await until(lambda: files.read == ["a", "b", "d", "e"])
        await until(lambda: files.waiting() == [1, 5])
        assert set(files.snapshots._states) == {"b", "e"}
        cancel(1, 5)
        assert len(files.snapshots) == 0 and not files.reader._read and not files.reader._held

    play(scenario)


def test_a_sample_that_comes_later_keeps_what_a_cancelled_one_had_read() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        await files.route("a")
        files.reader.route(sample(1, "a"))
        files.pending.drop_requests(["sample-0"])
        files.reader.drop_requests(["sample-0"])
        await files.begin(1, "a")
        assert files.read == ["a"]

    play(scenario)


def test_a_snapshot_that_cannot_be_read_fails_with_its_sample() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        await files.route("missing")
        assert files.waiting() == [0]
        with pytest.raises(FileNotFoundError, match="missing"):
            files.snapshots.take_state("missing")
        assert files.read == ["missing"]
        await files.end(0, "missing", is_loaded=False)
        assert not files.snapshots.has_read("missing") and not files.reader._read
        files.reader.route(Job("a", JobKind.SAMPLE, "s", 2, b"\xff", request_id="x", release=2))
        assert files.waiting() == [0, 2]

    play(scenario)


def test_a_sample_that_comes_while_its_snapshot_is_loaded_has_nothing_read_again() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        await files.route("a")
        await until(lambda: files.waiting() == [0])
        await asyncio.to_thread(files.snapshots.take_state, "a")
        files.reader.route(sample(1, "a"))
        assert files.waiting() == [0, 1]
        await files.end(0, "a", is_loaded=True)
        assert files.read == ["a"]

    play(scenario)


def test_a_refused_sample_leaves_the_snapshot_to_others() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        await files.route("a", "a")
        await until(lambda: files.waiting() == [0, 1])
        await files.end(0, "a", is_loaded=False)
        assert len(files.snapshots) == 1
        await files.begin(1, "a")
        assert files.read == ["a"]

    play(scenario)


def test_a_stopped_reader_reads_nothing() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        await files.route("a", "b", "c")
        files.reader.stop()
        await files.begin(0, "a")
        assert files.waiting() == [1, 2] and files.read == ["a", "b"]

    play(scenario)


async def saved_snapshot(bench: Bench) -> None:
    for model in "ab":
        await bench.ok(await bench.create(model))
    await train(bench, "a", 1)
    sampler = SamplerRecord("s:sample:0", "a", "s", "tuneserve/fake", 0.0, file_id=FILE)
    save = SaveWeights(CheckpointKind.SAMPLER, FILE, None, sampler=sampler)
    await bench.ok(await bench.submit(JobKind.SAVE_WEIGHTS, encode(save), "a"))


async def submit(bench: Bench, seq: int, payload: bytes) -> str:
    job = Job("a", JobKind.SAMPLE, "s:sample:0", seq, payload, base_model="tuneserve/fake")
    return (await bench.store.submit(job)).request_id


def test_others_train_while_a_snapshot_is_read(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await saved_snapshot(bench)
        snapshots, may_read = bench.worker._snapshots._snapshots, threading.Event()
        read, threads = snapshots._read, []

        def slow(name: str) -> AdapterState:
            threads.append(threading.current_thread())
            assert may_read.wait(20)
            return read(name)

        snapshots._read = slow
        waiting = await submit(bench, 1, sample(1, FILE, sequences=3).payload)
        await until(lambda: len(threads) == 1)
        await bench.ok(await bench.gradient("b"))
        await bench.ok(await bench.step("b"))
        assert bench.worker._metrics()["sequences_unfinished"] == 3
        may_read.set()
        await bench.ok(waiting)
        assert len(threads) == 1
        assert bench.worker._metrics()["sequences_unfinished"] == 0

    run(tmp_path, scenario, NEVER)


def test_a_sample_that_is_refused_leaves_its_room(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await saved_snapshot(bench)
        invalid = SampleCommand([10**6], seed=1, file_id=FILE, max_tokens=2)
        refused = await submit(bench, 1, encode(invalid))
        assert (await bench.outcome(refused)).rejection is not None
        assert len(bench.worker._snapshots._snapshots) == 0
        await bench.ok(await submit(bench, 2, sample(2, FILE).payload))
        assert len(bench.worker._snapshots._snapshots) == 0

    run(tmp_path, scenario, NEVER)
