"""Ownership of the files directory: only the store that has seen all of it may clean it up."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.engine.store.contract.bench import checkpoint
from tests.redis_server import RedisServer
from tuneserve_engine.core.records import DirectoryRecord
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import ownership
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.files import FileStore, LocalFs
from tuneserve_engine.store.open import OpenStore, adopt_files, open_store
from tuneserve_engine.store.ownership import LEASE_S, Ownership
from tuneserve_engine.store.redis.store import RedisStore
from tuneserve_engine.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
A, B = "a" * 32, "b" * 32


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Place:
    """A files directory and the stores that use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = CommonSettings(data_dir=root)
        self.stack = AsyncExitStack()

    @property
    def files(self) -> FileStore:
        return FileStore(self.settings.files_dir)

    def silence(self) -> None:
        """Set the last sign of life of all users of the directory to long ago."""
        for prefix in (ownership.OWNER, ownership.DISPUTE):
            for path in self.settings.files_dir.glob(f"{prefix}*"):
                age(path, LEASE_S)

    async def start(self) -> OpenStore:
        """The service's own store, opened as at a start."""
        store = await open_store(self.settings)
        self.stack.push_async_callback(store.close)
        return store

    async def copied(self, store: OpenStore) -> SqliteStore:
        """A copy of the store's present state, made while its service is stopped for a moment."""
        await store.close()
        path = shutil.copy(self.settings.store_file, self.root / "copy.db")
        copy = await SqliteStore.open(path)
        self.stack.push_async_callback(copy.close)
        return copy

    async def kind(self, store: Store, present: tuple[str, ...] = ()) -> str | None:
        """The kind of problem that a newly started process has with the directory."""
        problem = await Ownership(self.files, store).prove(present)
        return problem and problem.kind


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    async with place.stack:
        yield place


async def test_the_store_that_made_the_directory_remains_its_owner(place: Place) -> None:
    store = await place.start()
    for _ in range(5):  # each by a new process
        assert await place.kind(store) is None
    await store.close()
    store = await place.start()
    assert await place.kind(store) is None
    assert len(ownership.claims(place.files)) == 1
    known = (await store.page_of_records(DirectoryRecord, parent="files")).items
    assert {each.key for each in known} == {"files@5", "files@6", "seat"}


async def test_the_lease_is_renewed_regularly_and_when_files_appear(place: Place) -> None:
    store = await place.start()
    passed_s = 0.0
    owner = Ownership(place.files, store, clock=lambda: passed_s)

    async def generation(*present: str) -> int:
        assert await owner.prove(present) is None
        (claim,) = ownership.claims(place.files)
        return claim.generation

    assert [await generation(), await generation(), await generation(A)] == [1, 1, 2]
    assert [await generation(A), await generation(), await generation(A)] == [2, 2, 3]
    passed_s = 29.9
    assert await generation(A) == 3
    passed_s = 30
    assert await generation(A) == 4


async def test_processes_of_one_store_renew_concurrently_and_agree(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        settings = CommonSettings(data_dir=tmp_path, store=server.url)
        stores = [await open_store(settings) for _ in range(3)]
        owners = [Ownership(FileStore(settings.files_dir), store) for store in stores]
        for turn in range(20):
            present = {f"{turn:032x}"}  # each of them renews
            found = await asyncio.gather(*(owner.prove(present) for owner in owners))
            assert found == [None] * 3
        for store in stores:
            await store.close()


async def test_a_restored_copy_is_older_than_the_directory(place: Place) -> None:
    store = await place.start()
    await place.kind(store)
    copy = await place.copied(store)
    store = await place.start()
    assert await place.kind(store, (A,)) is None
    assert await place.kind(copy) == "older"


async def test_a_copy_that_continued_elsewhere_has_parted_from_the_directory(place: Place) -> None:
    store = await place.start()
    await place.kind(store)
    copy = await place.copied(store)
    elsewhere = FileStore(place.root / "elsewhere")
    shutil.copytree(place.settings.files_dir, place.root / "elsewhere", dirs_exist_ok=True)
    for _ in range(7):
        assert await Ownership(elsewhere, copy).prove(()) is None
    found = (await Ownership(place.files, copy).look())[1]
    assert found and found.kind == "parted"
    store = await place.start()
    for _ in range(6):  # the same number of generations, but different ones
        assert await place.kind(store) is None
    assert await place.kind(copy) == "parted"


@pytest.mark.parametrize("is_copy_first", [True, False])
async def test_neither_a_store_nor_its_copy_removes_files_until_one_is_adopted(
    place: Place, is_copy_first: bool
) -> None:
    """Both know the same generation, so the first that starts owns the directory, rightly or not.
    The other reports that it exists.
    """
    store = await place.start()
    await place.kind(store)
    copy = await place.copied(store)
    store = await place.start()
    first, second = (copy, store) if is_copy_first else (store, copy)
    assert await place.kind(first) is None
    assert await place.kind(second) in ("older", "parted")
    assert await place.kind(first) == "disputed"
    for each in (first, second):
        with pytest.raises(StoreUnusable, match="has an owner that was alive"):
            await Ownership(place.files, each).adopt()
    place.silence()
    assert await place.kind(first) == "disputed"  # its lease is renewed nevertheless
    with pytest.raises(StoreUnusable, match="has an owner that was alive"):
        await Ownership(place.files, second).adopt()
    place.silence()
    await Ownership(place.files, second).adopt()
    assert await place.kind(second) is None
    assert await place.kind(first) in ("older", "parted")


async def test_a_dispute_is_renewed_while_the_store_exists(place: Place) -> None:
    store = await place.start()
    await place.kind(store)
    copy = await place.copied(store)
    store = await place.start()
    await place.kind(store, (A,))
    passed_s = 0.0
    owner = Ownership(place.files, copy, clock=lambda: passed_s)

    async def left() -> str:
        await owner.prove(())
        (note,) = place.files.notes(ownership.DISPUTE)
        return note

    first = await left()
    passed_s = 29.9
    assert await left() == first
    passed_s = 30
    assert await left() != first


# --- a store that is elsewhere --------------------------------------------------------------------


async def test_a_copy_spares_the_files_that_it_finds(place: Place) -> None:
    """The original store may name them."""
    store = await place.start()
    place.files.write(A, {"a": b"x"})
    await place.kind(store, (A,))
    assert await Ownership(place.files, store).spared(10) == set()
    copy = await place.copied(store)
    assert await place.kind(copy, (A,)) is None
    place.files.write(B, {"a": b"x"})
    assert await Ownership(place.files, copy).spared(10) == {A}
    store = await place.start()
    assert await Ownership(place.files, store).spared(10) == set()


async def test_a_copy_spares_files_until_it_has_served_long_enough_or_is_adopted(
    place: Place,
) -> None:
    store = await place.start()
    place.files.write(A, {"a": b"x"})
    await place.kind(store, (A,))
    copy = await place.copied(store)
    assert await place.kind(copy, (A,)) is None
    owner = Ownership(place.files, copy)
    for passed in (0, 3600, 7200):  # an hour counts for each absence of three days
        assert await owner.spared(7201) == {A}
        (path,) = place.settings.files_dir.glob(".seen-moved-*")
        assert path.name.endswith(f"-{passed}")
        age(path, 3 * 86_400)
    assert await owner.spared(7201) == set()
    assert not list(place.settings.files_dir.glob(".moved-*"))
    assert not list(place.settings.files_dir.glob(".seen-*"))


async def test_a_restarted_redis_spares_the_files_that_it_finds(
    tmp_path: Path,
) -> None:
    """It may be a copy of the other's data, at the same address."""
    with RedisServer(tmp_path / "redis") as server:
        settings = CommonSettings(data_dir=tmp_path, store=server.url)
        store = await open_store(settings)
        files = FileStore(settings.files_dir)
        files.write(A, {"a": b"x"})
        owner = Ownership(files, store)
        assert await owner.prove((A,)) is None
        other = await open_store(settings)
        assert await Ownership(files, other).spared(10) == set()
        await other.close()
        server.kill()
        server.start()
        for _ in range(3):  # an ended connection is noticed by one failed call
            try:
                assert await owner.prove((A,)) is None
                break
            except ConnectionError:
                continue
        assert await owner.spared(10) == {A}
        await owner.adopt()
        assert await owner.spared(10) == set()
        await store.close()


async def test_files_of_a_backup_under_a_newer_store_are_kept(place: Place) -> None:
    store = await place.start()
    await place.kind(store)
    shutil.copytree(place.settings.files_dir, place.root / "backup")
    for _ in range(3):
        await place.kind(store)
    shutil.rmtree(place.settings.files_dir)
    shutil.copytree(place.root / "backup", place.settings.files_dir)
    assert await place.kind(store) == "parted"


async def test_a_process_killed_between_store_and_directory_changes_nothing(place: Place) -> None:
    store = await place.start()
    for generation in (1, 2, 3):
        await store.put_record(DirectoryRecord(f"files@{generation}", "ab", parent="files"))
        assert await place.kind(store) is None
        assert {each.generation for each in ownership.claims(place.files)} == {generation}


async def test_a_directory_without_the_mark_does_not_belong_to_the_store(place: Place) -> None:
    store = await place.start()
    await place.kind(store)
    for path in place.settings.files_dir.glob(".of-*"):
        path.rmdir()
    assert await place.kind(store) == "unmarked"


async def test_another_store_is_adopted_only_when_the_owner_is_silent(place: Place) -> None:
    store = await place.start()
    place.files.write(A, {"a": b"x"})
    await place.kind(store, (A,))
    await store.close()
    place.settings.store_file.unlink()
    with pytest.raises(StoreUnusable, match=r"has an owner that was alive \d s ago; stop that"):
        await adopt_files(place.settings)
    place.silence()
    assert await adopt_files(place.settings) == (1, 0)
    store = await place.start()
    assert await place.kind(store) is None
    assert len(ownership.marks(place.files)) == 1


async def test_a_restored_copy_is_adopted_and_the_other_store_stops(place: Place) -> None:
    store = await place.start()
    await place.kind(store)
    copy = await place.copied(store)
    store = await place.start()
    await place.kind(store, (A,))
    owner = Ownership(place.files, copy)
    with pytest.raises(StoreUnusable, match="has an owner that was alive"):
        await owner.adopt()
    place.silence()
    await Ownership(place.files, copy).adopt()
    assert await place.kind(copy) is None
    assert await place.kind(store) is not None


async def test_a_lease_is_judged_by_the_clock_of_the_directory(place: Place) -> None:
    """A file server's clock, slow or fast, never makes a living owner look silent."""
    store = await place.start()
    await place.kind(store)
    copy = await place.copied(store)
    store = await place.start()
    await place.kind(store, (A,))

    class Skewed(LocalFs):
        by_s = 0.0

        def modified_s(self, path: Path) -> float:
            return super().modified_s(path) + self.by_s

    fs = Skewed()
    owner = Ownership(FileStore(place.settings.files_dir, fs), copy)
    for fs.by_s in (-600.0, 600.0):
        with pytest.raises(StoreUnusable, match="has an owner that was alive 0 s ago"):
            await owner.adopt()
    place.silence()
    await owner.adopt()


# --- a start --------------------------------------------------------------------------------------


async def test_a_new_store_does_not_start_on_files_of_another(place: Place) -> None:
    store = await place.start()
    place.files.write(A, {"a": b"x"})
    place.files.write(B, {"a": b"x"})
    place.files.set_aside(B, "20260101T000000Z")
    await store.close()
    place.settings.store_file.unlink()
    with pytest.raises(StoreUnusable) as refused:
        await place.start()
    said = str(refused.value)
    assert "is new or empty" in said and "2 checkpoints and recovery points" in said
    assert "restore it" in said and "tuneserve files adopt" in said
    assert not place.settings.store_file.exists()  # the right store is to be restored there
    other = CommonSettings(data_dir=place.root / "other", files_dir=place.settings.files_dir)
    with pytest.raises(StoreUnusable, match="belongs to another one"):
        await open_store(other)
    # A mark alone is proof enough.
    shutil.rmtree(place.settings.files_dir / "quarantine")
    shutil.rmtree(place.files.path(A))
    with pytest.raises(StoreUnusable, match="0 checkpoints and recovery points"):
        await open_store(other)


async def test_an_empty_redis_does_not_start_on_files_of_another(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        settings = CommonSettings(data_dir=tmp_path, store=server.url)
        await (await open_store(settings)).close()
        server.kill()
        shutil.rmtree(tmp_path / "redis")
        (tmp_path / "redis").mkdir()
        server.start()
        for _ in range(2):  # the first attempt makes nothing
            with pytest.raises(StoreUnusable, match=r"is new or empty.*restore it"):
                await open_store(settings)
        # made without the check, as by an earlier release
        store = await RedisStore.open(server.url)
        await store.close()
        with pytest.raises(StoreUnusable, match=r"is new or empty.*restore it"):
            await open_store(settings)
        for path in settings.files_dir.glob(".owner-*"):
            age(path, LEASE_S)
        await adopt_files(settings)
        await (await open_store(settings)).close()


async def test_a_store_of_a_release_before_marks_keeps_its_files(place: Place) -> None:
    store = await place.start()
    await store.delete_record(DirectoryRecord, "files")
    await store.close()
    for path in place.settings.files_dir.glob(".*"):
        path.rmdir()
    place.files.write(A, {"a": b"x"})
    with pytest.raises(StoreUnusable):
        await place.start()
    store = await SqliteStore.open(place.settings.store_file)
    await store.put_record(checkpoint(file_id=A))
    await store.close()
    store = await place.start()
    assert await place.kind(store) is None


def age(path: Path, by_s: float) -> None:
    then_s = path.stat().st_mtime - by_s
    os.utime(path, (then_s, then_s))
