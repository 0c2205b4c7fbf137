"""A start is refused if the files directory is not writable or not shared by all processes."""

import asyncio
import errno
import re
import shutil
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import files_mount, remote
from tuneserve_engine.store import open as open_module
from tuneserve_engine.store.bucket import Bucket
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.files import FileStore, LocalFs
from tuneserve_engine.store.files_mount import check_shared, open_files, wait_for_files
from tuneserve_engine.store.open import check_store, open_queue, open_store
from tuneserve_engine.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def names(directory: Path) -> list[str]:
    return [each.name for each in directory.iterdir()]


async def start(settings: CommonSettings) -> None:
    """The steps of every process that opens the store."""
    await (await open_store(settings)).close()


# --- a writable directory ------------------------------------------------------------------------


def test_the_write_check_leaves_nothing(tmp_path: Path) -> None:
    open_files(CommonSettings(files_dir=tmp_path / "new" / "files"))
    assert names(tmp_path / "new" / "files") == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_an_unwritable_directory_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(self: LocalFs, path: Path) -> None:
        raise OSError(number, "the file system says no")

    monkeypatch.setattr(LocalFs, "mkdir", refuse)
    with pytest.raises(OSError, match=r"cannot use .*: the file system says no;.*--files-dir"):
        open_files(CommonSettings(files_dir=tmp_path))


def test_a_file_in_its_place_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "files").touch()
    with pytest.raises(OSError, match=r"cannot use .*Not a directory.*--files-dir"):
        open_files(CommonSettings(files_dir=tmp_path / "files"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_does_not_stop_processes_that_would_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(self: LocalFs, path: Path) -> None:
        raise OSError(number, "full")

    monkeypatch.setattr(LocalFs, "mkdir", full)
    open_files(CommonSettings(files_dir=tmp_path))
    assert names(tmp_path) == []


# --- a usable bucket -----------------------------------------------------------------------------


def in_bucket(tmp_path: Path, url: str) -> CommonSettings:
    return CommonSettings(data_dir=tmp_path / "data", files_url=url)


def test_a_usable_bucket_is_left_empty(tmp_path: Path, s3_url: str) -> None:
    files = open_files(in_bucket(tmp_path, s3_url))
    assert (files.ids(), files.notes("")) == (set(), {})
    assert Bucket(s3_url).objects("proofs/") == []


def test_a_missing_bucket_is_refused_with_a_way_out(tmp_path: Path, s3_url: str) -> None:
    with pytest.raises(
        OSError,
        match=r"cannot use the bucket of files s3://none-here: .*NoSuchBucket.*AWS_ACCESS_KEY_ID"
        r".*AWS_ENDPOINT_URL.*--files-url",
    ) as caught:
        open_files(in_bucket(tmp_path, "s3://none-here"))
    assert not isinstance(caught.value, ConnectionError)


def test_a_bucket_that_does_not_answer_is_waited_for(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    prove = Bucket.prove_writable

    def prove_later(self: Bucket) -> None:
        attempts.append(self.url)
        if len(attempts) < 3:
            raise OSError(errno.EIO, "no answer in time")
        prove(self)

    monkeypatch.setattr(Bucket, "prove_writable", prove_later)
    monkeypatch.setattr(files_mount, "_RETRY_S", 0.01)
    with pytest.raises(ConnectionError, match=r"cannot use the bucket of files .*no answer"):
        open_files(in_bucket(tmp_path, s3_url))
    assert wait_for_files(in_bucket(tmp_path, s3_url), spares_disk=False).shown == s3_url
    assert len(attempts) == 3


async def test_a_store_and_its_bucket_open_once_the_bucket_answers(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    objects = Bucket.objects

    def listed(self: Bucket, prefix: str) -> object:
        calls.append(prefix)
        if len(calls) in (3, 8, 13):
            raise OSError(errno.EIO, "no answer in time")
        return objects(self, prefix)

    monkeypatch.setattr(Bucket, "objects", listed)
    monkeypatch.setattr(open_module, "_RETRY_S", 0.01)
    await start(in_bucket(tmp_path, s3_url))
    with pytest.raises(StoreUnusable, match=f"the bucket of files {s3_url} belongs to another"):
        await start(CommonSettings(data_dir=tmp_path / "other", files_url=s3_url))


def test_files_from_before_the_bucket_was_chosen_are_not_touched(
    tmp_path: Path, s3_url: str
) -> None:
    """The bucket's copies are in a folder of their own."""
    FileStore(tmp_path / "data" / "files").write("a" * 32, {"a": b"x"})
    files = open_files(in_bucket(tmp_path, s3_url))
    assert files.ids() == set()
    files.write("b" * 32, {"b": b"y"})
    assert (files.path("b" * 32) / "b").read_bytes() == b"y"
    files.discard_partial()
    assert set(names(tmp_path / "data" / "files")) == {"a" * 32, "cache"}


# --- a shared directory --------------------------------------------------------------------------


async def test_the_first_process_marks_the_directory_and_can_start_again(
    tmp_path: Path,
) -> None:
    settings = CommonSettings(data_dir=tmp_path)
    await start(settings)
    await start(settings)
    assert len(names(tmp_path / "files")) == 1


async def test_another_directory_is_refused_until_it_is_the_right_one(tmp_path: Path) -> None:
    await start(CommonSettings(data_dir=tmp_path))
    other = CommonSettings(data_dir=tmp_path, files_dir=tmp_path / "other")
    with pytest.raises(StoreUnusable, match="--files-dir") as refused:
        await start(other)
    shutil.copytree(tmp_path / "files", tmp_path / "other", dirs_exist_ok=True)
    await start(other)
    # The files were restored without names that start with a dot. The operator confirms them, as
    # the message says.
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(StoreUnusable):
        await start(other)
    found = re.search(r"\.of-[0-9a-f]{32}", str(refused.value))
    assert found
    (tmp_path / "other" / found[0]).mkdir()
    await start(other)


async def test_of_many_concurrent_starts_one_marks_the_directory(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.db")
    files = tmp_path / "files"
    await asyncio.gather(*(check_shared(FileStore(files), store) for _ in range(8)))
    assert len(names(files)) == 1
    with pytest.raises(StoreUnusable):
        await check_shared(FileStore(tmp_path / "other"), store)
    await store.close()


async def test_a_worker_beside_the_api_process_must_have_its_files(tmp_path: Path) -> None:
    settings = CommonSettings(data_dir=tmp_path)
    other = CommonSettings(data_dir=tmp_path, files_dir=tmp_path / "other")
    store = await open_store(settings)
    async with remote.serve(store, settings.store_socket):
        async with open_queue(other) as connect:
            with pytest.raises(StoreUnusable, match=r"that the API process has.*--files-dir"):
                await connect()
        async with open_queue(settings) as connect:
            await connect()
    await store.close()


async def test_hosts_with_separate_directories_are_refused(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        one, other = (CommonSettings(data_dir=tmp_path / each, store=server.url) for each in "ab")
        await start(one)
        for check in (start, check_store):
            with pytest.raises(StoreUnusable, match=r"b/files is not the directory"):
                await check(other)
        await start(
            CommonSettings(data_dir=tmp_path / "b", files_dir=one.files_dir, store=one.store)
        )


# --- an unusable store is recognised before a model is loaded ------------------------------------


async def test_a_store_that_would_lose_requests_is_recognised_early(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendfsync="everysec") as server:
        settings = CommonSettings(data_dir=tmp_path, store=server.url)
        with pytest.raises(StoreUnusable, match="set in its configuration: appendfsync always"):
            await check_store(settings)
    await check_store(settings)  # the server has stopped, but may return


async def test_an_address_without_a_database_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        address = server.url.removesuffix("/0") + "/99"
        with pytest.raises(StoreUnusable, match="out of range; see the store's address"):
            await start(CommonSettings(data_dir=tmp_path, store=address))


async def test_without_the_password_the_refusal_says_where_it_belongs(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", requirepass="secret") as server:
        with pytest.raises(StoreUnusable, match="password in the store's address"):
            await start(CommonSettings(data_dir=tmp_path, store=server.url))
