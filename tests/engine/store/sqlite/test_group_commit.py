"""Commits that fail, and processes that die just before or after one."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.store.sqlite.group_commit import (
    GROUP_BYTES,
    LARGE_BYTES,
    CommitEvents,
    GroupCommit,
    Transaction,
)
from tuneserve_engine.store.sqlite.store import SqliteStore


def test_a_failed_commit_fails_its_calls_and_no_later_one() -> None:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("CREATE TABLE a (id INTEGER PRIMARY KEY)")
        deferred = "REFERENCES a (id) DEFERRABLE INITIALLY DEFERRED"
        connection.execute(f"CREATE TABLE b (a INTEGER {deferred})")
        return connection

    def insert(tx: Transaction) -> int:
        tx.news.take = True
        return tx.execute("INSERT INTO a VALUES (NULL)").rowcount

    async def main() -> None:
        news: list[CommitEvents] = []
        commit = GroupCommit(time.time, news.append)
        await commit.start(connect)
        calls = [
            commit.run_operation(insert),
            commit.run_operation(lambda tx: tx.execute("INSERT INTO b VALUES (99)").rowcount),
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [sqlite3.IntegrityError] * 2
        assert not any(each.take for each in news)
        assert await commit.run_operation(
            lambda tx: tx.execute("SELECT COUNT(*) FROM a").fetchone()
        ) == (0,)
        assert await commit.run_operation(insert) == 1
        assert news[-1].take
        await commit.stop()

    asyncio.run(main())


def test_a_failed_rollback_does_not_stop_later_calls() -> None:
    """The thread must survive, or every later call would wait for ever."""

    class Broken(sqlite3.Connection):
        refuses: frozenset[str] = frozenset()

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql in self.refuses:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *values)

    async def main() -> None:
        commit = GroupCommit(time.time, lambda news: None)
        await commit.start(
            lambda: sqlite3.connect(":memory:", isolation_level=None, factory=Broken)
        )
        await commit.run_operation(lambda tx: tx.execute("CREATE TABLE a (id)").rowcount)
        Broken.refuses = frozenset({"COMMIT", "ROLLBACK"})
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="I/O"):
                await commit.run_operation(
                    lambda tx: tx.execute("INSERT INTO a VALUES (1)").rowcount
                )
        Broken.refuses = frozenset()
        assert await commit.run_operation(
            lambda tx: tx.execute("SELECT COUNT(*) FROM a").fetchone()
        ) == (0,)
        await commit.stop()

    async def limited() -> None:
        async with asyncio.timeout(10):
            await main()

    asyncio.run(limited())


def test_large_bodies_are_committed_apart_and_let_others_go_first() -> None:
    """Another tenant's poll once waited 0.8 s, behind 64 bodies of 5 MB in one transaction."""
    ran: list[str] = []

    class Traced(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "BEGIN":
                ran.append("begin")
            return super().execute(sql, *values)

    async def main() -> None:
        commit = GroupCommit(time.time, lambda news: None)
        await commit.start(
            lambda: sqlite3.connect(":memory:", isolation_level=None, factory=Traced)
        )
        is_busy, go_on = threading.Event(), threading.Event()

        def busy(tx: Transaction) -> None:
            is_busy.set()
            go_on.wait(10)

        def note(tx: Transaction, what: str) -> None:
            ran.append(what)

        calls = [commit.run_operation(busy)]
        assert await asyncio.to_thread(is_busy.wait, 10)
        for number in range(3):
            body = commit.run_operation(note, f"body {number}", grows_by=GROUP_BYTES - 1)
            row = commit.run_operation(note, f"row {number}", grows_by=LARGE_BYTES - 1)
            calls += [body, commit.run_operation(note, f"poll {number}"), row]
        calls += [commit.run_operation(note, "least", grows_by=LARGE_BYTES) for _ in range(2)]
        go_on.set()
        await commit.stop()  # it finishes all calls
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert ran == [
        *("begin", "begin", "row 0", "poll 0", "row 1", "poll 1", "row 2", "poll 2"),
        *("body 0", "body 1", "begin", "body 2", "least", "begin", "least"),
    ]


CHILD_AT_A_KILL_POINT = """
import asyncio, sys
from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.process import failpoints
from tuneserve_engine.store.sqlite.store import SqliteStore

async def main():
    store = await SqliteStore.open(sys.argv[1])
    failpoints.arm(sys.argv[2], nth=3)
    for n in range(1, 10):
        job = Job("alice", JobKind.SAMPLE, "scope", n, b"payload")
        request_id = (await store.submit(job)).request_id
        await store.wait(request_id, 0)  # what writes nothing passes no kill point
        print(request_id, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("point", "stored"), [("store-before-commit", 2), ("store-after-commit", 3)]
)
def test_failpoints_are_on_both_sides_of_the_commit(
    tmp_path: Path, point: str, stored: int
) -> None:
    path = tmp_path / "store.db"
    command = [sys.executable, "-c", CHILD_AT_A_KILL_POINT, str(path), point]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert child.returncode == -signal.SIGKILL
    assert len(child.stdout.splitlines()) == 2

    async def main() -> None:
        store = await SqliteStore.open(path)
        rows = await store._call(lambda tx: tx.execute("SELECT seq FROM jobs").fetchall())
        assert len(rows) == stored
        await store.close()

    asyncio.run(main())
