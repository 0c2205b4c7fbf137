"""Damage to a SQLite file is found after the start, in bounded time, beside requests."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.test_storage_faults import filling_disk, no_more_pages  # noqa: F401
from tuneserve_engine.core.records import SessionRecord
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.base import Soundness
from tuneserve_engine.store.errors import StoreDamaged, StoreFailed, StoreUnusable
from tuneserve_engine.store.open import open_store
from tuneserve_engine.store.sqlite import database, integrity
from tuneserve_engine.store.sqlite.database import CHECKPOINT_PAGES, open_database
from tuneserve_engine.store.sqlite.group_commit import Transaction
from tuneserve_engine.store.sqlite.inspect import look_at_store
from tuneserve_engine.store.sqlite.integrity import check_file, problems
from tuneserve_engine.store.sqlite.store import SqliteStore

PLACES = 96
PAGE = 4096
WAIT_S = 60.0


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store with records, jobs, payloads and large results, without free pages."""
    path = tmp_path_factory.mktemp("sound") / "store.db"
    random = np.random.default_rng(0)
    with closing(open_database(path)) as database:
        database.execute("BEGIN")
        for n in range(300):
            database.execute(
                "INSERT INTO records (type, key, tenant, parent, body) VALUES "
                "('session', ?, 't', '', ?)",
                (f"s-{n:032}", '{"key":"' + "x" * int(random.integers(400)) + '"}'),
            )
            database.execute(
                "INSERT INTO jobs (request_id, tenant, kind, scope, seq, base_model, state, "
                "release, attempts, size, created_s, body) "
                "VALUES (?, 't', 'sample', 's', ?, 'b', 'done', 1, 0, 9, 1.0, ?)",
                (f"req_{n}", n, random.bytes(int(random.integers(9_000)))),
            )
            database.execute("INSERT INTO payloads VALUES (?, ?)", (n, random.bytes(2_000)))
        database.execute("COMMIT")
        (free,) = database.execute("PRAGMA freelist_count").fetchone()
        assert free == 0
    return path.read_bytes()


def damaged(content: bytes, page: int, how: int) -> bytes:
    """The file with one page of random bytes (0), of zeros (1), of another page (2)."""
    random = np.random.default_rng(page)
    other = int(random.integers(2, len(content) // PAGE))
    other += other == page
    new = (random.bytes(PAGE), bytes(PAGE), content[other * PAGE : (other + 1) * PAGE])[how]
    return content[: page * PAGE] + new + content[(page + 1) * PAGE :]


def root_of(path: Path, table: str) -> int:
    """The page, counted from 0, where the table starts."""
    asked = "SELECT rootpage FROM sqlite_master WHERE name = ?"
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as database:
        (root,) = database.execute(asked, (table,)).fetchone()
    return int(root) - 1


def is_end_of_value(content: bytes, page: int) -> bool:
    """Whether the page is the last of a chain of a large value.

    It starts with zeros in place of the number of the next page, and SQLite cannot check the rest.
    """
    return content[page * PAGE : page * PAGE + 4] == bytes(4)


def test_damaged_pages_are_found_wherever_they_are(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "store.db"
    random = np.random.default_rng(5)
    path.write_bytes(sound)
    assert problems(path) == []
    pages = random.integers(0, len(sound) // PAGE, PLACES)
    for number, page in enumerate(map(int, pages)):
        how = number % 3
        if is_end_of_value(sound, page):
            how = 0
        path.write_bytes(damaged(sound, page, how))
        assert problems(path), f"page {page}, damage {how}"


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


async def checked(store: SqliteStore) -> None:
    while store.soundness.state == "checking":
        await asyncio.sleep(0.02)


def test_a_damaged_store_says_so_and_serves_what_it_can(
    tmp_path: Path, sound: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sound)
    path.write_bytes(damaged(sound, root_of(path, "payloads"), 0))
    assert check_file(path, limit_s=WAIT_S).state == "damaged"
    with pytest.raises(StoreUnusable, match=r"is damaged .*restore store.db and the files"):
        look_at_store(path)

    async def scenario() -> None:
        store = await SqliteStore.open(path, check_s=WAIT_S)
        assert await store.secret()  # it answers before the check has ended
        await checked(store)
        assert store.soundness.state == "damaged"
        assert f"the store {path} is damaged (" in store.soundness.detail
        assert "restore store.db and the files from one backup" in store.soundness.detail
        assert "until then no new requests are accepted" in caplog.text
        await store.close()

    run(scenario)


def test_a_damaged_page_read_by_a_request_is_noticed_without_a_check(
    tmp_path: Path, sound: bytes
) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sound)
    path.write_bytes(damaged(sound, root_of(path, "records"), 0))

    async def scenario() -> None:
        store = await SqliteStore.open(path)
        with pytest.raises(StoreDamaged, match=r"restore store\.db and the files"):
            await store.page_of_records(SessionRecord)
        assert store.soundness.state == "damaged"
        await store.close()

    run(scenario)


def test_a_store_that_cannot_list_its_files_refuses_the_start(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sound)
    path.write_bytes(damaged(sound, root_of(path, "records"), 0))

    async def scenario() -> None:
        with pytest.raises(StoreUnusable, match=r"is damaged .*restore store\.db and the files"):
            await open_store(CommonSettings(data_dir=tmp_path))

    run(scenario)


def test_a_check_sees_earlier_commits_and_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "store.db"
        store = await SqliteStore.open(path, check_s=WAIT_S)
        assert store.soundness.state == "checking"
        await store.put_record(SessionRecord("s", "t", 1.0, 1.0))
        await checked(store)
        assert store.soundness.state == "sound"
        await asyncio.wait([store._checking])  # type: ignore[list-item]
        limit = await store._call(lambda tx: tx.execute("PRAGMA wal_autocheckpoint").fetchone())
        assert limit == (CHECKPOINT_PAGES,)
        await store.close()
        again = await SqliteStore.open(path, check_s=WAIT_S)
        assert await again.get_record(SessionRecord, "s") is not None
        await again.close()

    run(scenario)


def test_the_lock_of_the_store_outlives_its_check(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "store.db"
        store = await SqliteStore.open(path, check_s=WAIT_S)
        await checked(store)
        with pytest.raises(StoreUnusable, match="in use by another process"):
            await asyncio.to_thread(in_another_process, path)
        await store.close()

    run(scenario)


def in_another_process(path: Path) -> None:
    asked = "import sys; from pathlib import Path\n"
    asked += "from tuneserve_engine.store.sqlite.inspect import look_at_store\n"
    asked += "look_at_store(Path(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", asked, path], capture_output=True, text=True)
    if ran.returncode:
        raise StoreUnusable(ran.stderr)


SLOW = "import time; time.sleep(60)"


@pytest.mark.parametrize("why", ["time", "log"])
def test_a_check_that_takes_too_long_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(integrity, "_command", lambda path: [sys.executable, "-c", SLOW])
    if why == "log":
        monkeypatch.setattr(integrity, "MOST_WAL_BYTES", 0)

    async def scenario() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", check_s=0.5 if why == "time" else 50)
        began_s = time.monotonic()
        await store.put_record(SessionRecord("s", "t", 1.0, 1.0))
        await checked(store)
        assert time.monotonic() - began_s < 10
        told = {"time": "within 0.5 s (store_check_s)", "log": "0 bytes were written"}[why]
        assert (store.soundness.state, told in store.soundness.detail) == ("unchecked", True)
        await store.close()

    run(scenario)


def test_space_released_during_a_check_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check would call a file damaged that is written to at the same time."""
    monkeypatch.setattr(integrity, "_command", lambda path: [sys.executable, "-c", SLOW])

    def shrink(tx: Transaction) -> None:
        tx.news.shrunk = True

    async def scenario() -> None:
        path = tmp_path / "store.db"
        store = await SqliteStore.open(path, check_s=50)
        before = path.read_bytes()
        await store.put_record(SessionRecord("s", "t", 1.0, 1.0))
        await store._call(shrink)
        assert path.read_bytes() == before
        assert store.soundness.state == "checking"
        await store._call(lambda tx: tx.write_into_file())
        await store._call(lambda tx: tx.execute("UPDATE meta SET value = value").rowcount)
        await store._call(shrink)
        assert path.read_bytes() != before
        await store.close()

    run(scenario)


@pytest.mark.usefixtures("filling_disk")
def test_a_disk_that_fills_up_ends_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending requests needs the room that only writing into the file makes."""
    brief = [sys.executable, "-c", "import time; time.sleep(2)"]
    monkeypatch.setattr(integrity, "_command", lambda path: brief)

    async def scenario() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", check_s=50, reserve_bytes=100_000)
        large = SessionRecord("s", "t", 1.0, 1.0, user_metadata={"about": "x" * 50_000})
        with no_more_pages(), pytest.raises(StoreFailed, match="nothing was changed"):
            await store.put_record(large)
        assert not await store._call(lambda tx: tx.holds_file())
        await checked(store)
        assert store.soundness == Soundness("unchecked", "its disk became full during its check")
        await store.close()

    run(scenario)


def test_a_check_that_cannot_be_started_leaves_the_store_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "_command", lambda path: [str(tmp_path / "none")])

    async def scenario() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", check_s=50)
        await asyncio.wait([store._checking])  # type: ignore[list-item]
        assert "could not be started" in store.soundness.detail
        assert not await store._call(lambda tx: tx.holds_file())
        await store.close()

    run(scenario)


def test_an_incomplete_file_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, the log of a killed process cannot be written into the file."""
    monkeypatch.setattr(database, "_hold_file", lambda connection: None)

    async def scenario() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", check_s=50)
        assert store.soundness.state == "unchecked"
        await store.close()

    run(scenario)


def test_closing_a_store_does_not_wait_for_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "_command", lambda path: [sys.executable, "-c", SLOW])

    async def scenario() -> None:
        store = await SqliteStore.open(tmp_path / "store.db", check_s=50)
        await asyncio.sleep(0.2)
        began_s = time.monotonic()
        await store.close()
        assert time.monotonic() - began_s < 10

    run(scenario)
