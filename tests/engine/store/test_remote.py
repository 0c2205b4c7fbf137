"""The worker's socket adds connections to the queue's contract (``test_base``)."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.core.records import Update
from tuneserve_engine.store import remote
from tuneserve_engine.store.base import Lease
from tuneserve_engine.store.errors import Fenced, StoreFailed
from tuneserve_engine.store.remote import RemoteQueue, serve
from tuneserve_engine.store.sqlite.store import SqliteStore

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")


class Parking:
    """A queue whose takes wait for ever. It records its calls."""

    def __init__(self) -> None:
        self.parked = 0
        self.cancelled = asyncio.Event()
        self.finished: list[Outcome] = []

    async def lease(self, name: str, owner: str, info: BaseModelInfo, speed: float = 1.0) -> Lease:
        raise RuntimeError(f"{owner} broke it")

    async def take_jobs(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        self.parked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.parked -= 1
            self.cancelled.set()
        return []

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        if epoch != 1:
            raise Fenced(f"epoch {epoch} is over")
        self.finished += outcomes

    async def resign(self, epoch: int) -> None:
        raise StoreFailed("the disk is full")


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[RemoteQueue]:
    queue = RemoteQueue(path)
    await queue.connect(5)
    try:
        yield queue
    finally:
        await queue.close()


def sample(seq: int) -> Job:
    return Job("alice", JobKind.SAMPLE, "s:sample:0", seq, b"payload", base_model="tiny")


def test_finish_runs_while_a_take_is_parked(tmp_path: Path) -> None:
    async def main() -> None:
        parking = Parking()
        async with serve(parking, tmp_path / "q"), connected(tmp_path / "q") as queue:
            taking = asyncio.create_task(queue.take_jobs(1, after=0, max_jobs=1))
            await asyncio.sleep(0.02)
            update = Update("model", "m", {"status": "ready", "n": [1, 2.5, None, b"\xff"]})
            sent = [
                Outcome("req_a", b"\x00\xff" * 10**6, "application/x-protobuf", updates=(update,)),
                Outcome("req_b", rejection=Rejection("no", "server")),
            ]
            await asyncio.wait_for(queue.finish(1, sent), 5)
            assert parking.finished == sent
            assert parking.parked == 1
            taking.cancel()

    asyncio.run(main())


def test_a_cancelled_take_is_cancelled_on_the_other_side(tmp_path: Path) -> None:
    async def main() -> None:
        parking = Parking()
        async with serve(parking, tmp_path / "q"), connected(tmp_path / "q") as queue:
            taking = asyncio.create_task(queue.take_jobs(1, after=0, max_jobs=1))
            async with asyncio.timeout(5):
                while parking.parked == 0:
                    await asyncio.sleep(0.001)
            taking.cancel()
            await asyncio.wait_for(parking.cancelled.wait(), 5)
            assert parking.parked == 0
            await queue.finish(1, [])  # the connection is still usable
            assert queue._pending == {}

    asyncio.run(main())


def test_a_worker_that_disappears_leaves_no_call_behind(tmp_path: Path) -> None:
    async def main() -> None:
        parking = Parking()
        async with serve(parking, tmp_path / "q"):
            async with connected(tmp_path / "q") as queue:
                taking = asyncio.create_task(queue.take_jobs(1, after=0, max_jobs=1))
                await asyncio.sleep(0.02)
            with pytest.raises(ConnectionError, match="closed here"):
                await taking
            await asyncio.wait_for(parking.cancelled.wait(), 5)

    asyncio.run(main())


def test_errors_keep_their_type_and_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serve(Parking(), tmp_path / "q"), connected(tmp_path / "q") as queue:
            with pytest.raises(Fenced, match=r"^epoch 2 is over$"):
                await queue.finish(2, [])
            with pytest.raises(StoreFailed, match=r"^RuntimeError: w b"):
                await queue.lease("worker", "w", INFO)
            with pytest.raises(StoreFailed, match=r"^the disk is full$"):
                await queue.resign(1)

    asyncio.run(main())
    assert [each.message for each in caplog.records] == ["the worker's call lease failed"]


def test_a_lost_connection_fails_pending_and_later_calls(tmp_path: Path) -> None:
    async def main() -> None:
        queue = RemoteQueue(tmp_path / "q")
        with pytest.raises(ConnectionError, match="not connected"):
            await queue.finish(1, [])
        async with serve(Parking(), tmp_path / "q"):
            await queue.connect(5)
            takes = [asyncio.create_task(queue.take_jobs(1, after=n, max_jobs=1)) for n in range(3)]
            await asyncio.sleep(0.02)
        for each in await asyncio.gather(*takes, return_exceptions=True):
            assert isinstance(each, ConnectionError)
            assert str(tmp_path / "q") in str(each)
        with pytest.raises(ConnectionError, match="reconnect"):
            await queue.finish(1, [])
        await queue.close()

    asyncio.run(main())


def test_a_worker_continues_from_its_cursor_after_the_api_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        queue = RemoteQueue(tmp_path / "q")
        store = await SqliteStore.open(tmp_path / "store.db")
        async with serve(store, tmp_path / "q"):
            await queue.connect(5)
            lease = await queue.lease("worker", "worker", INFO)
            ids = [(await store.submit(sample(seq))).request_id for seq in (1, 2)]
            first, second = await queue.take_jobs(lease.epoch, after=0, max_jobs=10)
            taking = asyncio.create_task(
                queue.take_jobs(lease.epoch, after=second.release, max_jobs=10)
            )
            await asyncio.sleep(0.02)
        await store.close()
        with pytest.raises(ConnectionError):
            await taking

        connecting = asyncio.create_task(queue.connect(5))  # the socket does not exist yet
        await asyncio.sleep(0.05)
        store = await SqliteStore.open(tmp_path / "store.db")
        async with serve(store, tmp_path / "q"):
            await connecting
            assert await queue.lease("worker", "worker", INFO) == Lease(lease.epoch, resumed=True)
            taking = asyncio.create_task(
                queue.take_jobs(lease.epoch, after=second.release, max_jobs=10)
            )
            await queue.finish(lease.epoch, [Outcome(first.request_id, b"computed before")])
            assert await store.wait(ids[0], 5) == Outcome(ids[0], b"computed before")
            await store.submit(sample(3))
            assert [each.seq for each in await taking] == [3]
            await queue.close()
        await store.close()

    asyncio.run(main())


def test_connecting_without_an_api_process_says_what_to_start(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionError, match="start the API process"):
            await RemoteQueue(tmp_path / "q").connect(0.1)

    asyncio.run(main())


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def main() -> None:
        async with serve(Parking(), path), connected(path) as queue:
            with pytest.raises(FileExistsError, match="another process serves"):
                async with serve(Parking(), path):
                    pass
            await queue.finish(1, [])
        assert not path.exists()
        path.write_text("precious")
        with pytest.raises(FileExistsError, match="is not a socket"):
            async with serve(Parking(), path):
                pass
        assert path.read_text() == "precious"

    asyncio.run(main())


def test_only_the_owner_can_connect(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "run" / "q"
        async with serve(Parking(), path):
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700

    asyncio.run(main())


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 101)

    async def main() -> None:
        async with serve(Parking(), path):
            pass

    with pytest.raises(ValueError, match="choose a shorter data directory"):
        RemoteQueue(path)
    with pytest.raises(ValueError, match="allows at most 100"):
        asyncio.run(main())


def test_a_message_too_large_is_refused_and_the_connection_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Large(Parking):
        async def take_jobs(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
            return [sample(seq) for seq in range(max_jobs)]

    monkeypatch.setattr(remote, "MAX_FRAME_BYTES", 1000)

    async def main() -> None:
        async with serve(Large(), tmp_path / "q"), connected(tmp_path / "q") as queue:
            with pytest.raises(ValueError, match="finish or take fewer jobs"):
                await queue.finish(1, [Outcome("req_a", bytes(1000))])
            with pytest.raises(ValueError, match="which allows 1000"):
                await queue.take_jobs(1, after=0, max_jobs=100)
            assert len(await queue.take_jobs(1, after=0, max_jobs=1)) == 1

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_garbage_ends_only_its_own_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serve(Parking(), tmp_path / "q"), connected(tmp_path / "q") as queue:
            for garbage in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x01"):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "q")
                writer.write(garbage)
                assert await reader.read() == b""
                writer.close()
            await queue.finish(1, [])

    asyncio.run(main())
    assert len(caplog.records) == 3
