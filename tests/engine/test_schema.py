"""How the store's file is opened, and when it is refused."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from tuneserve_engine.queue.base import StoreUnusable
from tuneserve_engine.queue.schema import network_file_system
from tuneserve_engine.queue.sqlite import SqliteStore


def test_a_store_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_engine.queue.schema.BUSY_S", 0.1)

    async def main() -> None:
        first = await SqliteStore.open(tmp_path / "store.db")
        with pytest.raises(StoreUnusable, match="in use by another process"):
            await SqliteStore.open(tmp_path / "store.db")
        await first.close()
        await (await SqliteStore.open(tmp_path / "store.db")).close()

    asyncio.run(main())


def test_a_store_that_cannot_be_read_is_refused_with_the_way_out(tmp_path: Path) -> None:
    async def open_and_close(path: Path) -> None:
        await (await SqliteStore.open(path)).close()

    path = tmp_path / "store.db"
    asyncio.run(open_and_close(path))
    for version in (1, 7):  # from 2 on the store is made one of this: see test_golden_store
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


def test_the_file_is_for_its_owner_only_and_written_through(tmp_path: Path) -> None:
    async def main() -> None:
        store = await SqliteStore.open(tmp_path / "data" / "store.db")
        pragmas = [
            await store._call(lambda tx, name=name: tx.one(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous")
        ]
        assert pragmas == [("wal",), (2,)]  # 2 = FULL
        for file in (tmp_path / "data").iterdir():
            assert file.stat().st_mode & 0o077 == 0
        await store.close()

    asyncio.run(main())


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
        ("/data/store.db", None),  # a local disk was mounted over it
        ("/srv/data/store.db", "nfs"),
    ],
)
def test_a_network_file_system_is_known_by_its_mount(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


def test_a_store_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr("tuneserve_engine.queue.schema._MOUNTS", mounts)
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nnas:/x {tmp_path} nfs rw 0 0\n")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "new folder" / "store.db", tmp_path / "link" / "store.db"):
        with pytest.raises(StoreUnusable, match=r"network file system \(nfs\).*local disk"):
            asyncio.run(SqliteStore.open(path))
        assert not path.exists()
    mounts.unlink()  # as where there is no /proc

    async def open_and_close() -> None:
        await (await SqliteStore.open(tmp_path / "store.db")).close()

    asyncio.run(open_and_close())
