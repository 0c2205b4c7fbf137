"""SQLite adds to the store's contract (``test_base``): one file, one thread, one fsync."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.core.adapter import AdapterConfig, BaseModelInfo
from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import ModelRecord, ModelStatus
from tuneserve_engine.store.base import RecoveryPoint, SamplerClient
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.sqlite.store import SqliteStore

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")
CONFIG = AdapterConfig(rank=4, alpha=32.0, seed=1)
MODEL = ModelRecord("m", "alice", "s", "tiny", CONFIG, 0.0, 0.0, status=ModelStatus.READY)
ALL: dict[str, Any] = {"after": 0, "max_jobs": 10}


def job(seq: int) -> Job:
    """The ``seq``-th request of a model, counted from 1 as in the SDK."""
    kind, place = JobKind.OPTIM_STEP, {"model_id": "m", "position": seq - 1}
    return Job("alice", kind, "m", seq, b"payload", base_model="tiny", **place)


async def lease(store: SqliteStore) -> int:
    return (await store.lease("worker", "process", INFO)).epoch


def test_an_idle_store_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked take costs neither statements nor timers, and a parked wait only its time-out."""
    statements: list[str] = []
    timers: list[float] = []

    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", trace=statements.append)
        loop = asyncio.get_running_loop()
        epoch = await lease(store)
        waited = (await store.submit(job(2))).request_id
        taking = asyncio.create_task(store.take_jobs(epoch, after=0, max_jobs=1))
        await asyncio.sleep(0.05)
        schedule = loop.call_at

        def call_at(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            timers.append(when - loop.time())
            return schedule(when, *args, **kwargs)

        monkeypatch.setattr(loop, "call_at", call_at)
        waiting = asyncio.create_task(store.wait(waited, 99))
        await asyncio.sleep(0.05)
        statements.clear()
        await asyncio.sleep(0.3)
        assert statements == []
        assert len(timers) == 3  # these two sleeps and the wait's time-out
        await store.submit(job(1))
        assert len(await taking) == 1
        await store.close()
        assert await waiting is None

    asyncio.run(main())


def test_concurrent_calls_share_a_commit(tmp_path: Path) -> None:
    statements: list[str] = []

    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", trace=statements.append)
        submits = [store.submit(job(seq)) for seq in range(64, 0, -1)]
        ids = {each.request_id for each in await asyncio.gather(*submits)}
        assert len(ids) == 64
        assert 1 <= statements.count("COMMIT") < 64
        await store.close()

    asyncio.run(main())


def test_waits_leave_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db")
        request_id = (await store.submit(job(1))).request_id
        cancelled = [asyncio.create_task(store.wait(request_id, 10)) for _ in range(100)]
        await asyncio.sleep(0.02)
        for task in cancelled:
            task.cancel()
        timed_out = await asyncio.gather(*(store.wait(request_id, 0.01) for _ in range(100)))
        assert timed_out == [None] * 100
        await asyncio.gather(*cancelled, return_exceptions=True)
        with pytest.raises(KeyError):
            await store.wait("req_unknown", 1)
        assert store._waiting == {}
        await store.close()

    asyncio.run(main())


def test_a_closed_store_releases_parked_calls_and_refuses_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db")
        epoch = await lease(store)
        request_id = (await store.submit(job(2))).request_id
        waiting = asyncio.create_task(store.wait(request_id, 10))
        taking = asyncio.create_task(store.take_jobs(epoch, after=0, max_jobs=1))
        await asyncio.sleep(0.02)
        last = asyncio.create_task(store.submit(job(3)))
        await asyncio.sleep(0)
        await store.close()
        assert not (await last).duplicate
        assert await waiting is None
        with pytest.raises(ConnectionError, match="closed"):
            await taking
        with pytest.raises(ConnectionError, match="closed"):
            await store.submit(job(4))
        await store.close()

    asyncio.run(main())


def test_an_ended_job_keeps_its_key_but_not_its_payload(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db")
        epoch = await lease(store)
        request_id = (await store.submit(job(1))).request_id
        await store.submit(replace(job(2), rejection=Rejection("bad")))
        await store.finish(epoch, [Outcome(request_id, b"result")])
        rows = await store._call(lambda tx: tx.execute("SELECT seq, body FROM jobs").fetchall())
        assert rows == [(1, b"result"), (2, b"")]
        assert await store._call(lambda tx: tx.execute("SELECT * FROM payloads").fetchall()) == []
        await store.close()

    asyncio.run(main())


def test_a_full_disk_acknowledges_nothing_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db")
        before = (await store.submit(job(1))).request_id
        row = await store._call(lambda tx: tx.execute("PRAGMA page_count").fetchone())
        assert row is not None
        await store._call(lambda tx: tx.execute(f"PRAGMA max_page_count = {row[0] + 2}").fetchone())
        large = replace(job(2), payload=bytes(10**6))
        with pytest.raises(StoreFailed, match="disk is full; nothing was changed; free some"):
            await store.submit(large)
        assert await store.job_key(before) == ("alice", "m")
        await store._call(lambda tx: tx.execute("PRAGMA max_page_count = 1000000").fetchone())
        assert not (await store.submit(large)).duplicate
        await store.close()

    asyncio.run(main())


async def plans(store: SqliteStore, statements: list[str], table: str) -> list[tuple[str, str]]:
    """Every statement so far that names the table, with SQLite's plan for finding its rows."""
    found = []
    for each in [each for each in statements if f" {table} " in each]:
        if not each.startswith(("INSERT", "CREATE")):
            plan = await store._call(
                lambda tx, sql=each: tx.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall()
            )
            found += [(each, step) for *_, step in plan if table in step]
    assert found
    return found


def test_the_sweep_reads_no_ended_job(tmp_path: Path) -> None:
    """Their rows stay for days, and a sweep every few seconds must not read all of them."""
    statements: list[str] = []

    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", trace=statements.append)
        statements.clear()
        await store.sweep(time.time(), SweepPolicy())
        await store.files_in_use()
        assert len([each for each in statements if " jobs " in each]) >= 5
        for statement, step in await plans(store, list(statements), "jobs"):
            assert "INDEX jobs_" in step or "(rowid=?)" in step, statement
        await store.close()

    asyncio.run(main())


def test_routine_calls_cost_a_few_look_ups(tmp_path: Path) -> None:
    """This holds for any number of jobs: of this model, of others, ended or waiting."""
    statements: list[str] = []

    async def main() -> None:
        policy = StorePolicy(model_jobs=1)
        path = tmp_path / "store.db"
        store = await SqliteStore.open(path, policy=policy, trace=statements.append)
        epoch = await lease(store)
        await store.put_record(MODEL)
        await store.submit(Job("alice", JobKind.SAMPLE, "s", 1, base_model="tiny"))
        statements.clear()
        await store.submit(job(2))
        await store.submit(job(1))  # others wait for it, so the limit does not apply
        await store.note_running(
            epoch, [each.request_id for each in await store.take_jobs(epoch, **ALL)]
        )
        await store.renew(epoch)
        await store.unassign(epoch, "m")
        taken = await store.take_jobs(epoch, **ALL)
        await store.finish(epoch, [Outcome(each.request_id, changed=True) for each in taken])
        await store.wait(taken[0].request_id, 0)
        for position in (1, 2, 2):
            await store.save_point(epoch, RecoveryPoint("m", position, "file", "numerics"))
        await store.read_log(epoch, "m", start=0)
        await store.submit(job(3), replace(MODEL, key="another"))
        client = SamplerClient("alice", "s", 0)
        for seq in (2, 3):
            sampled = await store.submit(Job("alice", JobKind.SAMPLE, "s", seq, base_model="tiny"))
            await store.cancel(sampled.request_id)
        await store.completions(client, after=0, limit=10, timeout_s=0)
        await store.acknowledge(client, [sampled.request_id])
        await store.resign(epoch)
        for table in ("jobs", "payloads", "lanes", "counts", "points", "records"):
            for statement, step in await plans(store, list(statements), table):
                assert step.startswith("SEARCH"), (statement, step)
                if "completion > " in statement:
                    assert "INDEX jobs_completed" in step and "completion>" in step
        await store.close()

    asyncio.run(main())


def test_a_renewal_without_news_writes_one_row(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "store.db")
        epoch = await lease(store)
        request_id = (await store.submit(job(1))).request_id

        async def changes() -> int:
            return await store._call(lambda tx: tx.connection.total_changes)

        before = await changes()
        for _ in range(10):
            await store.renew(epoch)
        assert await changes() == before + 10
        for _ in range(10):
            await store.note_running(epoch, [request_id])
        assert await changes() == before + 10
        await store.close()

    asyncio.run(main())


CHILD = """
import asyncio, sys
from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.store.sqlite.store import SqliteStore

async def submit(store, worker):
    for n in range(10**6):
        key = f"scope {worker}", n
        job = Job("alice", JobKind.SAMPLE, *key, bytes(10_000), base_model="tiny")
        print((await store.submit(job)).request_id, flush=True)

async def main():
    policy = StorePolicy(tenant_jobs=10**9, server_jobs=10**9)
    store = await SqliteStore.open(sys.argv[1], policy=policy)
    await asyncio.gather(*(submit(store, worker) for worker in range(8)))

asyncio.run(main())
"""


def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = [child.stdout.readline().strip() for _ in range(300)]
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().splitlines(keepends=True)
        acknowledged += [line.strip() for line in rest if line.endswith("\n")]

    async def main() -> None:
        store = await SqliteStore.open(path)
        owners = await asyncio.gather(*(store.job_key(each) for each in acknowledged))
        assert {owner[0] for owner in owners if owner} == {"alice"} and None not in owners
        epoch = await lease(store)
        taken = await store.take_jobs(epoch, after=0, max_jobs=10**6)
        assert {each.request_id for each in taken} >= set(acknowledged)
        await store.close()

    asyncio.run(main())
