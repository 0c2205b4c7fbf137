"""Inspecting a SQLite store before a start, without changing it."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.sqlite import inspect
from tuneserve_engine.store.sqlite.inspect import look_at_store
from tuneserve_engine.store.sqlite.store import SqliteStore

HOLD = """
import sys, time
from pathlib import Path
from tuneserve_engine.store.sqlite.database import open_database
database = open_database(Path(sys.argv[1]))
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a store that was stopped properly."""

    async def main() -> None:
        await (await SqliteStore.open(tmp_path / "store.db")).close()

    asyncio.run(main())
    return tmp_path / "store.db"


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Another process has the store open, and is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        try:
            yield
        finally:
            other.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    def state() -> dict[str, tuple[int, bytes]]:
        return {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in files(folder)}

    before = state()
    yield
    assert state() == before


def files(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_file()]


def altered(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute(statement)


def test_a_missing_store_is_fine_and_is_not_created(tmp_path: Path) -> None:
    assert look_at_store(tmp_path / "none" / "store.db") == "the first start makes it"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "store.db").touch()
    with unchanged(tmp_path):
        assert "it is empty" in look_at_store(tmp_path / "store.db")


def test_a_store_of_this_version_is_fine(path: Path) -> None:
    with unchanged(path.parent):
        assert look_at_store(path) == "schema version 4, sound"
    assert [each.name for each in files(path.parent)] == ["store.db"]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE meta SET value = 9 WHERE name = 'version'", "version 9, this release reads"),
        ("UPDATE meta SET value = 1 WHERE name = 'version'", "version 1, this release reads"),
        ("DELETE FROM meta WHERE name = 'version'", "version none, this release reads"),
        ("ALTER TABLE meta RENAME COLUMN value TO other", "no such column: value"),
    ],
)
def test_a_store_that_a_start_would_refuse_is_refused(
    path: Path, statement: str, words: str
) -> None:
    altered(path, statement)
    with unchanged(path.parent), pytest.raises(StoreUnusable, match=words):
        look_at_store(path)


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + b"x" * 5000])
def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with unchanged(tmp_path), pytest.raises(StoreUnusable, match="restore a backup"):
        look_at_store(path)


def test_a_store_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").mkdir()
    with pytest.raises(StoreUnusable, match=r"Is a directory; see who owns it.*--data-dir"):
        look_at_store(tmp_path / "store.db")
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnusable, match="Not a directory"):
        look_at_store(tmp_path / "file" / "store.db")


def test_a_store_in_use_is_refused_and_its_user_keeps_it(path: Path) -> None:
    with held(path), unchanged(path.parent):
        for _ in range(2):  # the inspection did not take the lock away
            with pytest.raises(StoreUnusable, match="in use by another process; stop that"):
                look_at_store(path)


def test_the_journal_of_a_killed_process_is_read_and_left(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with held(path):
        pass
    assert os.path.getsize(f"{path}-wal") > 0
    with contextlib.closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as alone:
        assert alone.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    with unchanged(tmp_path):
        assert look_at_store(path) == "schema version 4, sound"


def test_a_newer_store_is_found_in_the_journal_of_a_killed_process(path: Path) -> None:
    upgrade = "UPDATE meta SET value = 9 WHERE name = 'version'"
    script = f"""
import os, sqlite3
store = sqlite3.connect({str(path)!r}, isolation_level=None)
store.execute("PRAGMA locking_mode = EXCLUSIVE")
store.execute("{upgrade}")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script])
    with unchanged(path.parent), pytest.raises(StoreUnusable, match="schema version 9"):
        look_at_store(path)


def test_a_journal_is_not_copied_with_a_large_store(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "_MOST_COPIED_BYTES", path.stat().st_size)
    path.with_name("store.db-wal").write_bytes(b"x")
    assert look_at_store(path).endswith("not read before")
