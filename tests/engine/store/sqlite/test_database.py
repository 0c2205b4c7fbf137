"""The store's file: where it may be, how its connection is configured, and holding it."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.sqlite.database import (
    explain,
    is_held,
    network_file_system,
    open_database,
    write_into_file,
)
from tuneserve_engine.store.sqlite.store import SqliteStore

MOUNTS = r"""
sysfs /sys sysfs rw,relatime 0 0
/dev/sda1 / ext4 rw,relatime 0 0
nas:/home /home nfs4 rw,relatime,vers=4.2 0 0
//nas/share /mnt/two\040words cifs rw 0 0
/dev/sdb1 /home/alice xfs rw 0 0
me@host: /data fuse.sshfs rw 0 0
/dev/sdc1 /data ext4 rw 0 0
/dev/sdd1 /srv ext4 rw 0 0
nas:/srv /srv nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/tuneserve/store.db", None),
        ("/home/bob/store.db", "nfs4"),
        ("/homes/store.db", None),
        ("/home/alice/store.db", None),
        ("/mnt/two words/store.db", "cifs"),
        ("/data/store.db", None),  # a local disk is mounted over it
        ("/srv/data/store.db", "nfs"),
    ],
)
def test_a_network_file_system_is_recognised_by_its_mount(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


def test_a_store_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr("tuneserve_engine.store.sqlite.database._MOUNTS", mounts)
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nnas:/x {tmp_path} nfs rw 0 0\n")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "new folder" / "store.db", tmp_path / "link" / "store.db"):
        with pytest.raises(StoreUnusable, match=r"network file system \(nfs\).*local disk"):
            asyncio.run(SqliteStore.open(path))
        assert not path.exists()
    mounts.unlink()  # as on systems without /proc

    async def open_and_close() -> None:
        await (await SqliteStore.open(tmp_path / "store.db")).close()

    asyncio.run(open_and_close())


def test_every_commit_is_synced_and_freed_pages_can_be_returned(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "new" / "store.db")) as connection:
        names = ("journal_mode", "synchronous", "auto_vacuum", "locking_mode")
        found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert found == ["wal", 2, 2, "exclusive"]  # FULL, INCREMENTAL


def test_a_file_that_is_held_does_not_change_until_it_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(open_database(path, for_check=True)) as connection:
        assert is_held(connection)
        before = path.read_bytes()
        connection.execute("CREATE TABLE added (n)")
        connection.execute("INSERT INTO added VALUES (zeroblob(1000000))")
        assert path.read_bytes() == before
        assert write_into_file(connection)
        assert not is_held(connection)
        assert not write_into_file(connection)
    assert path.stat().st_size > len(before)  # closing writes the log into the file


def test_a_file_that_is_not_to_be_checked_is_not_held(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "store.db")) as connection:
        assert not is_held(connection)


def test_statements_are_traced_once_the_file_is_open(tmp_path: Path) -> None:
    told: list[str] = []
    with closing(open_database(tmp_path / "store.db", told.append)) as connection:
        connection.execute("SELECT 1")
    assert told[:1] == ["SELECT 1"]


def test_a_busy_file_and_an_unreadable_one_have_their_own_ways_out(tmp_path: Path) -> None:
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    assert "in use by another process (waited 5 s" in explain(tmp_path, busy)
    assert "restore a backup" in explain(tmp_path, sqlite3.DatabaseError("malformed"))
