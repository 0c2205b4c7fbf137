"""Memory adds reproducible runs to the store's contract (``test_base``)."""

import asyncio
import sqlite3
import threading

import pytest

from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.store.errors import StoreFailed

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")


def sample(seq: int) -> Job:
    return Job("alice", JobKind.SAMPLE, "s", seq, b"payload", base_model="tiny")


def test_two_runs_are_alike() -> None:
    async def run() -> list[Job]:
        store = MemoryStore(clock=lambda: 5.0)
        epoch = (await store.lease("worker", "process", INFO)).epoch
        await asyncio.gather(*(store.submit(sample(seq)) for seq in (3, 1, 2)))
        taken = await store.take_jobs(epoch, after=0, max_jobs=10)
        await store.close()
        return taken

    first = asyncio.run(run())
    assert [each.seq for each in first] == [3, 1, 2]
    assert asyncio.run(run()) == first


def test_stores_share_nothing_and_need_no_thread() -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        one, other = MemoryStore(), MemoryStore()
        request_id = (await one.submit(sample(1))).request_id
        assert await one.job_key(request_id) == ("alice", "s")
        assert await other.job_key(request_id) is None
        assert set(threading.enumerate()) <= before
        await one.close()
        await other.close()

    asyncio.run(main())


def test_an_operation_takes_effect_when_it_is_called() -> None:
    """A simulation can order all effects, because nothing happens between a call and its effect."""

    async def main() -> None:
        store = MemoryStore()
        call = store.submit(sample(1))
        with pytest.raises(StopIteration) as returned:
            call.send(None)
        request_id = returned.value.value.request_id
        waiting = asyncio.create_task(store.wait(request_id, 10))
        await asyncio.sleep(0)
        epoch = (await store.lease("worker", "process", INFO)).epoch
        await store.finish(epoch, [Outcome(request_id, b"x")])
        assert await waiting == Outcome(request_id, b"x")
        await store.close()

    asyncio.run(main())


def test_a_closed_store_refuses_calls_and_reports_an_sqlite_error_as_a_failure() -> None:
    async def main() -> None:
        store = MemoryStore()
        with pytest.raises(StoreFailed, match="no such table: absent") as failed:
            await store._call(lambda tx: tx.execute("DELETE FROM absent").rowcount)
        assert isinstance(failed.value.__cause__, sqlite3.Error)
        await store.close()
        with pytest.raises(ConnectionError, match="closed"):
            await store.submit(sample(1))
        await store.close()

    asyncio.run(main())
