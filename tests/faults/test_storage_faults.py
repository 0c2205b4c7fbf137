"""Disks that are full or fail: a save or a commit ends in an error, and everything else stays.

``test_crash_states`` covers the states after a power loss.
"""

import asyncio
import errno
import resource
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hooked_fs import HookedFs, every, failing
from tests.server.conftest import forward_backward
from tests.support.fake_backend import FakeBackend
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    LoadWeights,
    OptimStep,
    Outcome,
    SaveWeights,
    encode,
)
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, SessionRecord
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.files import FileStore, LocalFs, new_file_id
from tuneserve_engine.store.sqlite.store import SqliteStore
from tuneserve_engine.worker.execution.executor import JobExecutor

OLD, NEW = "0" * 32, "1" * 32
MEMBERS = {"adapter.safetensors": b"weights", "config.json": b"{}"}
ERRORS = [errno.ENOSPC, errno.EIO]
STEPS = 40
"""More calls than a save makes."""


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_no_file_is_torn_at_any_rate_of_failing_calls(tmp_path: Path, error: int) -> None:
    fs = HookedFs(LocalFs(), chunk=3)
    files = FileStore(tmp_path / "files", fs)
    files.write(OLD, MEMBERS)
    for n in range(1, STEPS):
        stored = {OLD}
        fs.before, fs.calls = every(n, error), 0
        for deletes in (False, True, False, True, False):
            file_id = new_file_id()
            try:
                files.write(file_id, MEMBERS)
                stored.add(file_id)
                if deletes:
                    stored.remove(file_id)  # from here on it may exist or not
                    files.delete(file_id)
            except OSError as caught:
                assert caught.errno == error
        whole = FileStore(tmp_path / "files")
        assert stored <= whole.ids()
        for file_id in whole.ids():
            assert contents(whole.path(file_id)) == MEMBERS
        for file_id in whole.ids() - {OLD}:
            whole.delete(file_id)


@pytest.mark.parametrize("n", range(1, 4))
def test_short_writes_are_continued(tmp_path: Path, n: int) -> None:
    class ShortFs(LocalFs):
        """Accepts one byte at every n-th write."""

        writes = 0

        def write(self, descriptor: int, data: memoryview) -> int:
            self.writes += 1
            return super().write(descriptor, data[:1] if self.writes % n == 0 else data)

    fs = ShortFs()
    files = FileStore(tmp_path / "files", fs)
    members = {name: bytes(range(256)) * 5 for name in "abc"}
    assert files.write(NEW, members) == 3 * 1280
    assert contents(files.path(NEW)) == members
    assert fs.writes > 3


# --- saves ----------------------------------------------------------------------------------------


class Saver:
    """A trained model whose checkpoint OLD is stored, on a disk that will fail."""

    def __init__(self, root: Path) -> None:
        self.fs = HookedFs(LocalFs())
        self.files = FileStore(root, self.fs)
        self.backend = FakeBackend()
        self.executor = JobExecutor(self.backend, self.files)
        self.position = 0
        config = AdapterConfig(rank=2, alpha=1.0, seed=7)
        self.run(JobKind.CREATE_MODEL, encode(CreateModel("tuneserve/fake", config)))
        self.train()
        assert self.save(OLD).rejection is None
        self.saved = self.state()
        self.train()

    def run(self, kind: JobKind, payload: bytes) -> Outcome:
        job = Job("t", kind, "m", self.position, payload, "m", self.position)
        job = replace(job, request_id=f"r{self.position}", release=self.position)
        self.position += 1
        return self.executor.execute_batch([job]).outcomes()[0]

    def train(self) -> None:
        for kind, payload in (
            (JobKind.FORWARD_BACKWARD, forward_backward("m", 1)),
            (JobKind.OPTIM_STEP, encode(OptimStep(AdamwParams(learning_rate=0.1)))),
        ):
            assert self.run(kind, payload).rejection is None

    def save(self, file_id: str) -> Outcome:
        kind = CheckpointKind.TRAINING
        record = CheckpointRecord(
            key="tinker://m/weights/a",
            tenant="t",
            parent="m",
            kind=kind,
            name="a",
            file_id=file_id,
            base_model="tuneserve/fake",
            config=AdapterConfig(rank=2, alpha=1.0, seed=7),
            created_s=1.0,
        )
        return self.run(JobKind.SAVE_WEIGHTS, encode(SaveWeights(kind, file_id, record)))

    def load(self, file_id: str) -> Outcome:
        command = LoadWeights(file_id, "tinker://m/weights/a", optimizer=True)
        return self.run(JobKind.LOAD_WEIGHTS, encode(command))

    def state(self) -> AdapterState:
        return self.backend.adapter_state("m", optimizer=True)


def assert_same(a: AdapterState, b: AdapterState) -> None:
    assert a.step == b.step
    for group in ("weights", "first_moment", "second_moment"):
        ours, theirs = getattr(a, group), getattr(b, group)
        assert {k: v.tobytes() for k, v in ours.items()} == {
            k: v.tobytes() for k, v in theirs.items()
        }


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_save_that_fails_at_any_call_ends_in_an_error_and_can_be_repeated(
    tmp_path: Path, error: int, lasting: bool
) -> None:
    saver = Saver(tmp_path / "files")
    failed = 0
    for call in range(STEPS):
        trained = saver.state()
        file_id = new_file_id()
        saver.fs.before = failing(range(call, STEPS if lasting else call + 1), error)
        saver.fs.calls = 0
        rejection = saver.save(file_id).rejection
        calls, saver.fs.before = saver.fs.calls, failing((), error)
        if rejection is None:
            break
        failed += 1
        assert rejection.category == "server"
        assert "earlier checkpoints are intact" in rejection.message
        assert_same(saver.state(), trained)  # the model trains on as if no save had been requested
        assert saver.load(OLD).rejection is None
        assert_same(saver.state(), saver.saved)
        saver.train()
        for again in (file_id, new_file_id()):
            assert saver.save(again).rejection is None
            assert saver.load(again).rejection is None
            assert_same(saver.state(), trained)
    assert (failed, calls) == (10, 10)  # each call of a save was made to fail


@pytest.mark.anyio
async def test_a_name_whose_save_failed_is_free(service: Any) -> None:
    """Through the API: the client gets the reason, loads its earlier checkpoint and saves again."""
    model = await service.model(await service.session())
    fs = HookedFs(LocalFs())
    service.services.files._fs = fs

    async def save(seq: int, name: str) -> Any:
        head = {"model_id": model, "seq_id": seq, "path": name}
        return await service.result(await service.post("/save_weights", head))

    kept = (await save(1, "kept"))["path"]
    for at, error in enumerate(ERRORS):
        seq, name = 2 + 3 * at, f"name{at}"
        fs.before = every(1, error)
        failed = await save(seq, name)
        fs.before = failing((), error)
        assert failed["category"] == "server"
        assert "free some disk and save again" in failed["error"]
        load = {"model_id": model, "seq_id": seq + 1, "path": kept, "optimizer": True}
        assert (await service.result(await service.post("/load_weights", load)))["path"] == kept
        assert (await save(seq + 2, name))["path"].endswith(f"/weights/{name}")


# --- the store ------------------------------------------------------------------------------------

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")
POLICY = StorePolicy(model_jobs=8)


def job(seq: int) -> Job:
    """The ``seq``-th request of a model, counted from 1. It is large enough to need room."""
    payload = bytes([seq]) * 50_000
    return Job(
        "alice", JobKind.OPTIM_STEP, "m", seq, payload, "m", position=seq - 1, base_model="tiny"
    )


class FillingDisk(sqlite3.Connection):
    """A real connection whose database may not grow while ``full``."""

    full = False

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            pages = 1 if FillingDisk.full else 2**30 - 2  # 1: no more than exist
            super().execute(f"PRAGMA max_page_count = {pages}").fetchall()
        return super().execute(sql, *values)


@contextmanager
def no_more_pages() -> Iterator[None]:
    """Let SQLite find no room for another page: SQLITE_FULL."""
    FillingDisk.full = True
    try:
        yield
    finally:
        FillingDisk.full = False


@contextmanager
def no_longer_files() -> Iterator[None]:
    """Let the operating system refuse to make any file longer: an I/O error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def filling_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def connected(*args: Any, **options: Any) -> sqlite3.Connection:
        return connect(*args, **options, factory=FillingDisk)

    monkeypatch.setattr(sqlite3, "connect", connected)


@pytest.mark.parametrize("full", [no_more_pages, no_longer_files])
@pytest.mark.anyio
async def test_a_full_disk_acknowledges_nothing_and_the_store_continues_when_there_is_room(
    tmp_path: Path, filling_disk: None, full: Callable[[], Any]
) -> None:
    store = await SqliteStore.open(tmp_path / "store.db", policy=POLICY)
    epoch = (await store.lease("worker", "process", INFO)).epoch
    first = await store.submit(job(1))
    waiting = asyncio.create_task(store.wait(first.request_id, 10))
    await asyncio.sleep(0)
    assert (
        await store.get_record(SessionRecord, "s") is None
    )  # by now the wait has queried too, and is parked
    session = SessionRecord("s", "alice", 1.0, 1.0, user_metadata={"about": "x" * 50_000})
    for _ in range(3):
        with full():
            for refused in (
                lambda: store.submit(job(2)),
                lambda: store.finish(epoch, [Outcome(first.request_id, b"r" * 50_000)]),
                lambda: store.put_record(session),
            ):
                with pytest.raises(StoreFailed):
                    await refused()
            assert [each.seq for each in await store.take_jobs(epoch, after=0, max_jobs=9)] == [1]
            assert await store.get_record(SessionRecord, "s") is None
            assert not waiting.done()
    # The refused request left nothing behind, not even in the counters of the limits.
    seqs = range(2, POLICY.model_jobs + 1)
    assert [(await store.submit(job(seq))).duplicate for seq in seqs] == [False] * len(seqs)
    await store.finish(epoch, [Outcome(first.request_id, b"result")])
    outcome = await waiting
    assert outcome is not None and outcome.body == b"result"
    await store.close()
    again = await SqliteStore.open(tmp_path / "store.db", policy=POLICY)
    assert (await again.submit(job(8))).duplicate
    epoch = (await again.lease("worker", "another process", INFO)).epoch
    left = await again.take_jobs(epoch, after=0, max_jobs=9)
    assert [(each.seq, each.payload) for each in left] == [(n, job(n).payload) for n in seqs]
    await again.close()


@pytest.mark.parametrize("full", [no_more_pages, no_longer_files])
@pytest.mark.anyio
async def test_calls_that_share_a_full_commit_all_fail_and_can_all_be_repeated(
    tmp_path: Path, filling_disk: None, full: Callable[[], Any]
) -> None:
    store = await SqliteStore.open(tmp_path / "store.db", policy=POLICY)

    async def submit_all() -> Sequence[Any]:
        calls = [store.submit(job(seq)) for seq in range(1, 6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with full():
        assert {type(each) for each in await submit_all()} == {StoreFailed}
    assert [each.duplicate for each in await submit_all()] == [False] * 5
    epoch = (await store.lease("worker", "process", INFO)).epoch
    taken = await store.take_jobs(epoch, after=0, max_jobs=9)
    assert [each.seq for each in taken] == [1, 2, 3, 4, 5]
    await store.close()
