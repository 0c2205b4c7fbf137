"""Opening the store's file, and the reasons to refuse it."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from tuneserve_engine.core.usage import CurvePoint
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.sqlite import usage
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.store import SqliteStore


def test_a_store_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_engine.store.sqlite.database.BUSY_S", 0.1)

    async def main() -> None:
        first = await SqliteStore.open(tmp_path / "store.db")
        with pytest.raises(StoreUnusable, match="in use by another process"):
            await SqliteStore.open(tmp_path / "store.db")
        await first.close()
        await (await SqliteStore.open(tmp_path / "store.db")).close()

    asyncio.run(main())


def test_a_store_that_cannot_be_read_is_refused_with_a_way_out(tmp_path: Path) -> None:
    async def open_and_close(path: Path) -> None:
        await (await SqliteStore.open(path)).close()

    path = tmp_path / "store.db"
    asyncio.run(open_and_close(path))
    for version in (1, 3, 7):
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE meta SET value = ? WHERE name = 'version'", (version,))
        with pytest.raises(StoreUnusable, match=f"version {version}, this release reads version 4"):
            asyncio.run(open_and_close(path))
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreUnusable, match="restore a backup"):
        asyncio.run(open_and_close(garbage))
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnusable, match="check the path"):
        asyncio.run(open_and_close(tmp_path / "file" / "store.db"))


def test_the_file_is_private_to_its_owner_and_synced(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "data" / "store.db")
        pragmas = [
            await store._call(lambda tx, name=name: tx.execute(f"PRAGMA {name}").fetchone())
            for name in ("journal_mode", "synchronous")
        ]
        assert pragmas == [("wal",), (2,)]  # 2 = FULL
        for file in (tmp_path / "data").iterdir():
            assert file.stat().st_mode & 0o077 == 0
        await store.close()

    asyncio.run(main())


def test_reading_the_end_of_a_curve_costs_the_new_points_only_in_older_stores_too(
    tmp_path: Path,
) -> None:
    """2,000 points are known, and finding the next takes far fewer of SQLite's steps."""
    path = tmp_path / "store.db"

    async def steps_of_reading(after: int) -> int:
        store = await SqliteStore.open(path)
        counted = 0

        def read(tx: Transaction) -> int:
            nonlocal counted

            def count() -> int:
                nonlocal counted
                counted += 1
                return 0

            tx.connection.set_progress_handler(count, 1)
            found = len(usage.curve(tx, "a", after))
            tx.connection.set_progress_handler(None, 1)
            return found

        assert await store._call(read) == 1999 - after
        await store.close()
        return counted

    async def fill() -> None:
        store = await SqliteStore.open(path)

        def draw(tx: Transaction) -> None:
            for position in range(2000):
                usage.draw(tx, "a", CurvePoint("optim_step", position))

        await store._call(draw)
        await store.close()

    asyncio.run(fill())
    assert asyncio.run(steps_of_reading(after=1998)) < 100
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("DROP INDEX curve_points_in_order")  # as an earlier release left it
    assert asyncio.run(steps_of_reading(after=1998)) < 100


def test_a_store_of_a_release_before_traces_gets_their_column(
    tmp_path: Path,
) -> None:
    async def open_and_close() -> None:
        await (await SqliteStore.open(tmp_path / "store.db")).close()

    def columns(statement: str = "") -> list[str]:
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as other, other:
            other.execute(statement)
            return [name for _, name, *_ in other.execute("PRAGMA table_info(jobs)")]

    asyncio.run(open_and_close())
    assert "trace" in columns()
    assert "trace" not in columns("ALTER TABLE jobs DROP COLUMN trace")
    for _ in range(2):
        asyncio.run(open_and_close())
        assert columns().count("trace") == 1
    before = (
        "INSERT INTO jobs (request_id, tenant, kind, scope, seq, base_model, state, release, "
        "attempts, size, created_s) VALUES ('r', 't', 'sample', 's', 1, 'm', 'held', 0, 0, 0, 0)"
    )
    assert columns(before)  # writes of a release that does not know the column
