"""The clean-up of a bucket deletes and keeps the same files as that of a directory."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.engine.store.bucket_case import ClockedBucket, read, store_of
from tests.server.cleanup.unused_case import A, B, C, Names
from tuneserve_engine.core.policies import UnusedPolicy
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.files_mount import check_marked, check_shared, check_unused
from tuneserve_engine.store.object_files import ObjectFileStore
from tuneserve_engine.store.ownership import LEASE_S, MARK
from tuneserve_server.cleanup.unused_files import UnusedFiles

pytestmark = pytest.mark.anyio
HOUR_S = 3600.0
MEMBER = "adapter.safetensors"


@pytest.fixture
async def store() -> AsyncIterator[Names]:
    store = Names()
    yield store
    await store.close()


@pytest.fixture
def bucket(s3_url: str) -> ClockedBucket:
    return ClockedBucket(s3_url)


@pytest.fixture
async def files(store: Names, bucket: ClockedBucket, tmp_path: Path) -> ObjectFileStore:
    """The store's bucket with files A, B and C."""
    files = store_of(bucket, tmp_path / "cache", clock=lambda: bucket.now_s)
    await check_shared(files, store)
    for file_id in (A, B, C):
        files.write(file_id, {MEMBER: file_id.encode()})
    return files


def unused(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket, **policy: float
) -> UnusedFiles:
    return UnusedFiles(store, files, UnusedPolicy(**policy), clock=lambda: bucket.now_s)


def group(bucket: ClockedBucket) -> str:
    return datetime.fromtimestamp(bucket.now_s, UTC).strftime("%Y%m%dT%H%M%SZ")


async def test_only_old_files_without_a_name_go(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket
) -> None:
    store.file_ids, store.released = {A}, {A, B}
    cleaning = unused(store, files, bucket)
    bucket.now_s += 899
    await cleaning.clean(now_s=bucket.now_s + 10_000)  # the clock of this machine is wrong
    assert (files.ids(), files.set_aside_groups()) == ({A, B, C}, {})
    bucket.now_s += 10
    await cleaning.clean()
    assert (files.ids(), files.set_aside_groups()) == ({A}, {group(bucket): [C]})
    assert len(bucket.objects("files/")) == 2
    assert cleaning.problem is None
    store.file_ids = {A, C}
    await cleaning.prove()
    assert files.ids() == {A, C} and read(files, C) == {MEMBER: C.encode()}


async def test_the_time_in_quarantine_is_served_in_full(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket
) -> None:
    store.file_ids = {A, B}
    cleaning = unused(store, files, bucket, quarantine_s=2 * HOUR_S)
    bucket.now_s += 1000
    await cleaning.clean()
    began_s, (aside,) = bucket.now_s, files.set_aside_groups()
    while files.set_aside_groups():
        bucket.now_s += 600
        await cleaning.clean()
        assert bucket.now_s < began_s + 3 * HOUR_S
    assert bucket.now_s - began_s >= 2 * HOUR_S
    assert {each.key.split("/")[1] for each in bucket.objects("files/")} == {A, B}
    assert aside and not files.notes(".seen-")


async def test_a_store_that_has_moved_spares_the_files_that_it_found(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket
) -> None:
    await unused(store, files, bucket).prove()
    store.place, store.released = "elsewhere", {A, B, C}
    moved = unused(store, files, bucket)
    await moved.prove()
    bucket.now_s += 10
    files.write("d" * 32, {MEMBER: b"d"})
    bucket.now_s += HOUR_S
    await moved.clean()
    assert files.ids() == {A, B, C}
    assert moved.problem is not None and moved.problem.kind == "moved"
    await moved.adopt()
    await moved.clean()
    assert files.ids() == set()


async def test_another_store_deletes_nothing_and_adopts_only_after_the_lease(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket, tmp_path: Path
) -> None:
    await unused(store, files, bucket).prove()
    other = Names()
    theirs = store_of(bucket, tmp_path / "other", clock=lambda: bucket.now_s)
    text = rf"the bucket of files {bucket.url} belongs to another one and has 3 .*--files-url"
    with pytest.raises(StoreUnusable, match=text):
        await check_shared(theirs, other)
    with pytest.raises(StoreUnusable, match=text):
        await asyncio.to_thread(check_unused, theirs, "x")
    cleaning = unused(other, theirs, bucket)
    bucket.now_s += LEASE_S - 0.1
    with pytest.raises(StoreUnusable, match="the bucket of files has an owner that was alive"):
        await cleaning.adopt()
    bucket.now_s += 5
    assert (await cleaning.adopt()).files == 3
    assert await cleaning.prove()
    assert not await unused(store, files, bucket).prove()
    await other.close()


async def test_a_bucket_without_the_mark_is_refused_by_its_address(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket
) -> None:
    for mark in files.notes(MARK):
        files.remove_note(f"{MARK}{mark}")
    with pytest.raises(StoreUnusable, match=rf"{bucket.url} is not the bucket of files that bel"):
        await check_shared(files, store)
    with pytest.raises(StoreUnusable, match=rf"{bucket.url} is not the bucket of files that the A"):
        check_marked(files)


async def test_a_bucket_that_is_away_is_a_problem_until_it_is_back(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket
) -> None:
    def refuse(number: int, what: str) -> None:
        raise OSError(5, "no answer in time")

    cleaning = unused(store, files, bucket)
    bucket.before = refuse
    assert not await cleaning.prove()
    assert cleaning.problem is not None
    assert "the bucket of files cannot be used: " in cleaning.problem.text
    bucket.before = lambda number, what: None
    assert await cleaning.prove()


async def test_a_clean_up_asks_few_questions(
    store: Names, files: ObjectFileStore, bucket: ClockedBucket
) -> None:
    """docs/configuration.md names their number: they cost money."""
    store.file_ids = {A, B, C}
    cleaning = unused(store, files, bucket)
    await cleaning.clean()
    bucket.calls.clear()
    for _ in range(12):
        bucket.now_s += 5
        await cleaning.clean()
    counts = Counter(each.partition(" ")[0] for each in bucket.calls)
    assert counts["list"] <= 12 * 13
    assert sum(counts.values()) - counts["list"] <= 12 * 3
