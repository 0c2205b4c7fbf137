"""Samples wait for their snapshots beside the device, and few snapshots are in memory."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.engine.worker.models.test_recovery import NEVER, train
from tests.support.worker_bench import Bench, run, until
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.jobs import Job, JobKind, SampleCommand, SaveWeights, encode
from tuneserve_engine.core.records import CheckpointKind, SamplerRecord
from tuneserve_engine.worker.execution.read_ahead import MOST_READ, ReadSnapshots, SnapshotReader
from tuneserve_engine.worker.pending import PendingJobs


def sample(seq: int, file_id: str | None) -> Job:
    payload = encode(SampleCommand([1, 2], seed=seq, file_id=file_id, max_tokens=2))
    name = f"sample-{seq}"
    return Job("a", JobKind.SAMPLE, "s", seq, payload, request_id=name, release=seq)


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

    def _state(self, file_id: str) -> AdapterState:
        self.read.append(file_id)
        if file_id == "missing":
            raise FileNotFoundError(file_id)
        return AdapterState(None, {})  # type: ignore[arg-type]

    async def _on_reader(self, call: Callable[[], None]) -> None:
        await self.may_read.wait()
        call()

    def waiting(self) -> list[int]:
        return [job.seq for job in self.pending.in_order()]


def play(scenario: Callable[[Files], Awaitable[None]]) -> None:
    async def main() -> None:
        files = Files()
        async with asyncio.timeout(20):
            await scenario(files)
        assert all(task.done() and task.exception() is None for task in files.tasks)

    asyncio.run(main())


def test_a_sample_waits_until_its_snapshot_is_read_once() -> None:
    async def scenario(files: Files) -> None:
        files.reader.route(sample(1, "one"))
        files.reader.route(sample(2, None))
        files.reader.route(sample(3, "one"))
        await asyncio.sleep(0)
        assert files.waiting() == [2]
        files.may_read.set()
        await until(lambda: files.waiting() == [1, 2, 3])
        files.reader.route(sample(4, "one"))
        assert files.waiting() == [1, 2, 3, 4]
        files.snapshots.take_state("one")
        assert files.read == ["one"] and len(files.snapshots) == 0
        files.snapshots.take_state("one")  # evicted from the device meanwhile
        assert files.read == ["one", "one"]

    play(scenario)


def test_few_snapshots_are_in_memory_and_each_that_is_taken_makes_room() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        for seq in range(6):
            files.reader.route(sample(seq, f"file-{seq}"))
        await until(lambda: len(files.waiting()) == MOST_READ)
        await asyncio.sleep(0.05)
        assert files.read == ["file-0", "file-1"]
        for seq in range(6):
            await until(lambda: seq in files.waiting())  # noqa: B023
            await asyncio.to_thread(files.snapshots.take_state, f"file-{seq}")
            assert len(files.snapshots) <= MOST_READ
        assert files.read == [f"file-{seq}" for seq in range(6)]

    play(scenario)


def test_cancelled_samples_leave_their_room_to_others() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        for seq in range(4):
            files.reader.route(sample(seq, f"file-{seq}"))
        await until(lambda: len(files.waiting()) == MOST_READ)
        files.pending.drop_requests(["sample-0", "sample-1", "sample-2"])
        await until(lambda: files.waiting() == [3])
        assert files.read == ["file-0", "file-1", "file-3"]
        assert not files.pending.held

    play(scenario)


def test_a_missing_snapshot_fails_with_its_sample() -> None:
    async def scenario(files: Files) -> None:
        files.may_read.set()
        files.reader.route(sample(1, "missing"))
        await until(lambda: files.waiting() == [1])
        files.reader.route(Job("a", JobKind.SAMPLE, "s", 2, b"\xff", request_id="x", release=2))
        assert files.waiting() == [1, 2]

    play(scenario)


def test_others_train_while_a_snapshot_is_read(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for model in "ab":
            await bench.ok(await bench.create(model))
        await train(bench, "a", 1)
        file_id = "0" * 32
        sampler = SamplerRecord("s:sample:0", "a", "s", "tuneserve/fake", 0.0, file_id=file_id)
        save = SaveWeights(CheckpointKind.SAMPLER, file_id, None, sampler=sampler)
        await bench.ok(await bench.submit(JobKind.SAVE_WEIGHTS, encode(save), "a"))
        snapshots, may_read = bench.worker._samples._snapshots, threading.Event()
        read, threads = snapshots._read, []

        def slow(name: str) -> AdapterState:
            threads.append(threading.current_thread())
            assert may_read.wait(20)
            return read(name)

        snapshots._read = slow
        job = sample(1, file_id)
        job = Job("a", JobKind.SAMPLE, "s:sample:0", 1, job.payload, base_model="tuneserve/fake")
        waiting = (await bench.store.submit(job)).request_id
        await until(lambda: len(threads) == 1)
        await bench.ok(await bench.gradient("b"))
        await bench.ok(await bench.step("b"))
        assert bench.worker._device_loop.sequences == 1
        may_read.set()
        await bench.ok(waiting)
        assert len(threads) == 1

    run(tmp_path, scenario, NEVER)
