"""Unused files: those that the store has released are deleted, and the rest is quarantined.

In a directory that the store does not own, nothing is touched.
"""

import logging
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.cleanup.unused_case import NOW_S, A, AgedFs, B, C, Names, files_of
from tuneserve_engine.core.policies import UnusedPolicy
from tuneserve_engine.store.files import FileStore
from tuneserve_server.cleanup.unused_files import FEW, UnusedFiles

pytestmark = pytest.mark.anyio
GROUP = datetime.fromtimestamp(NOW_S, UTC).strftime("%Y%m%dT%H%M%SZ")
WEEK_S = 7 * 86_400.0


@pytest.fixture
def fs() -> AgedFs:
    return AgedFs()


@pytest.fixture
async def store() -> AsyncIterator[Names]:
    store = Names()
    yield store
    await store.close()


@pytest.fixture
async def files(store: Names, tmp_path: Path, fs: AgedFs) -> FileStore:
    return await files_of(store, tmp_path / "files", fs)


def unused(store: Names, files: FileStore, now_s: float = NOW_S, **policy: float) -> UnusedFiles:
    return UnusedFiles(store, files, UnusedPolicy(**policy), clock=lambda: now_s)


# --- deletion and quarantine ----------------------------------------------------------------------


async def test_a_released_file_is_deleted_when_it_is_old(
    store: Names, files: FileStore, fs: AgedFs
) -> None:
    """A file younger than a quarter of an hour may still get a name. A file that is named again has
    one.
    """
    store.file_ids, store.released = {A}, {A, B, C, "0" * 32}
    fs.modified = {B: NOW_S - 900, C: NOW_S - 899}
    await unused(store, files).clean()
    assert (files.ids(), files.set_aside_groups()) == ({A, C}, {})
    assert store.released == {A, C}  # the deleted files are no longer listed


async def test_a_file_that_is_neither_named_nor_released_is_quarantined_whole(
    store: Names, files: FileStore, fs: AgedFs, tmp_path: Path, caplog: Any
) -> None:
    store.file_ids = {A}
    fs.modified = {B: NOW_S - 900, C: NOW_S - 899}
    with caplog.at_level(logging.WARNING):
        await unused(store, files).clean()
    assert (files.ids(), files.set_aside_groups()) == ({A, C}, {GROUP: [B]})
    assert f"moved file {B} to quarantine/{GROUP}" in caplog.text
    # An operator puts the file back by hand, as the guide says.
    shutil.move(tmp_path / "files" / "quarantine" / GROUP / B, tmp_path / "files" / B)
    assert (files.path(B) / "adapter.safetensors").read_bytes() == B.encode()


async def test_quarantine_lasts_its_full_time_and_then_ends(
    store: Names, files: FileStore, fs: AgedFs, tmp_path: Path
) -> None:
    root = tmp_path / "files"
    for passed_s in (0, 3599, 3600, 7199):  # each clean-up runs in a new process
        fs.now_s = NOW_S + passed_s
        await unused(store, files, quarantine_s=7200).clean()
        for path in root.glob(".seen-*-3600"):
            fs.modified[path.name] = NOW_S + 3600
        assert files.set_aside_groups() == {GROUP: [A, B, C]}
    (root / "quarantine" / "of the operator").mkdir()
    fs.now_s = NOW_S + 7200
    await unused(store, files, quarantine_s=7200).clean()
    assert files.set_aside_groups() == {"of the operator": []}
    assert not list(root.glob(".seen-*"))


@pytest.mark.parametrize("jump_s", [WEEK_S, -WEEK_S])
async def test_a_clock_that_jumps_counts_as_up_to_an_hour_of_quarantine(
    store: Names, files: FileStore, fs: AgedFs, tmp_path: Path, jump_s: float
) -> None:
    """Neither the clock nor a week without a service empties the quarantine."""
    cleaner = unused(store, files)
    for _ in range(2):
        await cleaner.clean()
        fs.now_s += jump_s
        assert files.set_aside_groups() == {GROUP: [A, B, C]}
    await cleaner.clean()
    assert files.set_aside_groups() == {GROUP: [A, B, C]}
    (seen,) = (tmp_path / "files").glob(".seen-*")
    assert int(seen.name.rpartition("-")[2]) <= 7200


async def test_a_named_file_is_restored_from_quarantine(
    store: Names, files: FileStore, caplog: Any
) -> None:
    """It was named late, or by another store than the one that set it aside. Removal may be off."""
    await unused(store, files).clean()
    store.file_ids = {A}
    with caplog.at_level(logging.WARNING):
        await unused(store, files).prove()
    assert (files.ids(), files.set_aside_groups()) == ({A}, {GROUP: [B, C]})
    assert f"restored file {A} from quarantine/{GROUP}" in caplog.text
    assert (files.path(A) / "adapter.safetensors").read_bytes() == A.encode()
    files.write(B, {"a": b"y"})  # an operator may also put it back
    store.file_ids = {A, B}
    await unused(store, files).prove()
    assert files.members(B) == ["a"] and files.set_aside_groups() == {GROUP: [B, C]}


async def test_on_a_full_disk_released_files_are_deleted_at_once(
    store: Names, fs: AgedFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = await files_of(store, tmp_path / "files", fs, min_free_bytes=1000)
    store.file_ids, store.released = {A}, {A, B}
    fs.modified = {B: NOW_S, C: NOW_S}
    disk = SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    await unused(store, files).clean()
    assert files.ids() == {A, B, C}
    disk.free = 999
    await unused(store, files).clean()
    assert (files.ids(), files.set_aside_groups()) == ({A, C}, {})


async def test_a_store_that_has_moved_removes_no_existing_file(
    store: Names, files: FileStore, fs: AgedFs, caplog: Any
) -> None:
    await unused(store, files).prove()
    store.place = "elsewhere"
    store.file_ids, store.released = {A}, {B}
    late = "d" * 32
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            cleaner = unused(store, files)
            await cleaner.clean()
            assert cleaner.problem and cleaner.problem.kind == "moved"
        files.write(late, {"a": b"x"})
        fs.modified[late] = NOW_S + 1
        fs.now_s += 1000
        store.released = {B, late}
        await cleaner.clean()
        await cleaner.clean()
    assert (files.ids(), files.set_aside_groups()) == ({A, B, C}, {})
    assert store.released == {B}
    assert "2 now" in cleaner.problem.text and "tuneserve files adopt" in cleaner.problem.text
    assert caplog.text.count("unused files are kept") == 3  # once per process, not per clean-up
    await cleaner.adopt()
    await cleaner.clean()
    assert (files.ids(), files.set_aside_groups()) == ({A}, {GROUP: [C]})
    assert cleaner.problem is None


async def test_a_killed_writers_files_are_removed_after_an_hour(
    store: Names, files: FileStore, fs: AgedFs, tmp_path: Path
) -> None:
    store.file_ids = {A, B, C}
    old, young = f".partial-{A}-1", f".partial-{A}-2"
    fs.modified = {old: NOW_S - 3600, young: NOW_S - 3599}
    for name in (old, young):
        (tmp_path / "files" / name).mkdir()
    await unused(store, files).clean()
    left = {path.name for path in (tmp_path / "files").iterdir()}
    assert {name for name in left if name.startswith(".partial")} == {young}


async def test_one_file_that_cannot_be_moved_does_not_stop_the_others(
    store: Names, files: FileStore, fs: AgedFs, caplog: Any
) -> None:
    store.released = {A, B}
    fs.stuck = {B, C}
    with caplog.at_level(logging.WARNING):
        await unused(store, files).clean()
    assert files.ids() == {B, C} and store.released == {B}
    assert B in caplog.text and C in caplog.text and "Input/output error" in caplog.text


# --- more than their share ------------------------------------------------------------------------


def fill(files: FileStore, count: int) -> set[str]:
    """Write ``count`` more files and return their ids."""
    made = {f"{number:032x}" for number in range(count)}
    for file_id in made:
        files.write(file_id, {"a": b"x"})
    return made


async def test_unused_files_above_the_allowed_share_stay_until_the_operator_agrees(
    store: Names, files: FileStore, caplog: Any
) -> None:
    """This also holds if the files appear one by one. Released files do not count."""
    named = fill(files, 300)
    store.file_ids, store.released = named - {f"{n:032x}" for n in range(27)}, {A}
    policy = {"max_share": 0.1}
    cleaner = unused(store, files, **policy)
    await cleaner.clean()  # B, C and 27 of the others
    assert cleaner.problem is None and len(files.set_aside_groups()[GROUP]) == 29
    store.file_ids -= {f"{n:032x}" for n in range(29)}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await cleaner.clean()
    assert len(files.ids()) == 273 and A not in files.ids()
    assert cleaner.problem and cleaner.problem.kind == "share"
    assert caplog.text.count("nothing in the store names 2 of 273 files") == 1
    assert "tuneserve files clean" in caplog.text
    await cleaner.clean(allowed=True)
    assert cleaner.problem is None and len(files.ids()) == 271
    # The permission is used up.
    store.file_ids -= {f"{n:032x}" for n in range(30)}
    await cleaner.clean()
    assert cleaner.problem is None and len(files.ids()) == 270


async def test_in_a_small_store_all_unused_files_may_be_set_aside(
    store: Names, files: FileStore
) -> None:
    fill(files, FEW - 3)
    cleaner = unused(store, files, max_share=0.0)
    await cleaner.clean()
    assert cleaner.problem is None and files.ids() == set()


async def test_released_files_are_deleted_in_any_number(store: Names, files: FileStore) -> None:
    """Otherwise deleting checkpoints would not make room."""
    store.released = fill(files, 3 * FEW) | {A, B, C}
    cleaner = unused(store, files, max_share=0.0)
    await cleaner.clean()
    assert (files.ids(), cleaner.problem, files.set_aside_groups()) == (set(), None, {})


# --- ownership of the directory -------------------------------------------------------------------


async def test_in_another_stores_directory_nothing_is_touched(
    store: Names, files: FileStore, tmp_path: Path, caplog: Any
) -> None:
    other = Names(released=(A,))
    await files_of(other, tmp_path / "own")
    stranger = UnusedFiles(other, files)
    await unused(store, files).prove()
    (tmp_path / "files" / f".partial-{A}-1").mkdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await stranger.clean(older_than_s=0, allowed=True)
    assert files.ids() == {A, B, C} and files.set_aside_groups() == {}
    assert (tmp_path / "files" / f".partial-{A}-1").exists()
    assert stranger.problem and stranger.problem.kind == "foreign"
    assert caplog.text.count("unused files are kept") == 1
    assert "tuneserve files adopt" in caplog.text
    await other.close()


async def test_a_missing_directory_is_reported_and_not_taken_for_an_empty_one(
    store: Names, files: FileStore, tmp_path: Path, caplog: Any
) -> None:
    cleaner = unused(store, files)
    shutil.move(tmp_path / "files", tmp_path / "away")
    with caplog.at_level(logging.INFO):
        await cleaner.clean()
        assert cleaner.problem and cleaner.problem.kind == "unreadable"
        (tmp_path / "files").mkdir()  # an empty mount point
        await cleaner.clean()
        assert cleaner.problem and cleaner.problem.kind == "unmarked"
        (tmp_path / "files").rmdir()
        shutil.move(tmp_path / "away", tmp_path / "files")
        await cleaner.clean()
    assert cleaner.problem is None and "cleaned up again" in caplog.text
