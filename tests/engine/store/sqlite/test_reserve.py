"""Reserved disk space: released when the disk is full, and taken again when there is room."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.store.contract.bench import job, session
from tests.faults.test_storage_faults import filling_disk, no_more_pages  # noqa: F401
from tuneserve_engine.core.records import SessionRecord
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.sqlite.database import LOG_BYTES
from tuneserve_engine.store.sqlite.reserve import Reserve
from tuneserve_engine.store.sqlite.store import SqliteStore

SIZE = 100_000


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make the disk have this much left."""
    disk = SimpleNamespace(f_bavail=size, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)


def test_the_space_is_really_taken_and_released(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    reserve = Reserve(path, SIZE)
    assert reserve.hold() and reserve.hold()
    assert path.stat().st_blocks * 512 >= SIZE and path.stat().st_mode & 0o077 == 0
    assert Reserve(path, SIZE).give()  # the reserve of the previous process
    assert not path.exists()
    assert not Reserve(path, SIZE).give()


def test_it_is_taken_only_where_twice_as_much_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Reserve(tmp_path / "reserve", SIZE)
    free(monkeypatch, 2 * SIZE - 1)
    assert not reserve.hold() and not reserve.give()
    free(monkeypatch, 2 * SIZE)
    assert reserve.hold() and reserve.give()


def test_an_incomplete_reserve_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert not Reserve(tmp_path / "reserve", SIZE).hold()
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) == 0


def test_a_reserve_of_another_size_is_made_again_and_one_of_none_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    path.write_bytes(b"x" * 1000)
    assert Reserve(path, SIZE).hold()
    assert path.stat().st_size == SIZE
    assert Reserve(path, 0).hold()
    assert not path.exists()


@pytest.mark.usefixtures("filling_disk")
def test_a_full_disk_accepts_nothing_new_until_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        path = tmp_path / "store.db"
        store = await SqliteStore.open(path, reserve_bytes=SIZE)
        await store.put_record(session())
        assert path.with_suffix(".reserve").exists()
        assert (tmp_path / "store.db-wal").stat().st_blocks * 512 >= LOG_BYTES
        large = session("large", user_metadata={"about": "x" * 50_000})
        with no_more_pages(), pytest.raises(StoreFailed, match="nothing was changed"):
            await store.put_record(large)
        assert not path.with_suffix(".reserve").exists()
        free(monkeypatch, 2 * SIZE - 1)
        for refused in (lambda: store.put_new_record(session("t")), lambda: store.submit(job(1))):
            with pytest.raises(StoreFailed, match="set aside is used for work that was accepted"):
                await refused()
        await store.end_session("s", "success")  # ending things still works
        ended = await store.get_record(SessionRecord, "s")
        assert ended is not None and ended.ended == "success"
        free(monkeypatch, 2 * SIZE)
        await store.put_record(large)
        assert path.with_suffix(".reserve").exists()
        await store.close()

    asyncio.run(main())
