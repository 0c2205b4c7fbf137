"""Copies of a bucket's files: complete, bounded, shared by processes, and safe to lose."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.store import file_cache
from tuneserve_engine.store.file_cache import KEPT_S, FileCache

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
TOKEN = "1" * 32
DATA = {"x": b"0123456789", "y": b""}
SIZES = {name: len(data) for name, data in DATA.items()}


def span(name: str, start: int, end: int) -> bytes:
    return DATA[name][start:end]


def cache_of(root: Path, max_bytes: int = 2**30, **given: Any) -> FileCache:
    return FileCache(root, max_bytes=max_bytes, **given)


def age(cache: FileCache, file_id: str, by_s: float) -> None:
    used_s = time.time() - by_s
    os.utime(cache.path(file_id), (used_s, used_s))


def held(root: Path) -> set[str]:
    return {each.name for each in root.iterdir()}


def test_a_copy_is_found_under_its_token_only(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "cache")
    assert cache.find(A, TOKEN, SIZES) is None
    folder = cache.add(A, TOKEN, SIZES, span)
    assert folder == cache.path(A)
    assert {name: (folder / name).read_bytes() for name in DATA} == DATA
    assert cache_of(tmp_path / "cache").find(A, TOKEN, SIZES) == folder
    assert cache.find(A, "2" * 32, SIZES) is None
    assert held(tmp_path / "cache") == set()  # the copy of another version is removed


def test_a_copy_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_cache, "_PIECE_BYTES", 4)
    asked = []

    def read(name: str, start: int, end: int) -> bytes:
        asked.append((name, start, end))
        return span(name, start, end)

    folder = cache_of(tmp_path / "cache").add(A, TOKEN, SIZES, read)
    assert asked == [("x", 0, 4), ("x", 4, 8), ("x", 8, 10)]
    assert folder is not None and (folder / "x").read_bytes() == DATA["x"]


def test_a_failed_copy_leaves_nothing(tmp_path: Path) -> None:
    def fail(name: str, start: int, end: int) -> bytes:
        raise OSError(errno.EIO, "the network is away")

    with pytest.raises(OSError, match="the network is away"):
        cache_of(tmp_path / "cache").add(A, TOKEN, SIZES, fail)
    assert held(tmp_path / "cache") == set()


def test_the_least_recently_used_copies_make_room(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    cache = cache_of(root, max_bytes=130)  # a copy takes 42 bytes, its token among them
    for file_id, by_s in ((A, 3 * KEPT_S), (B, 4 * KEPT_S), (C, 2 * KEPT_S)):
        cache.add(file_id, TOKEN, SIZES, span)
        age(cache, file_id, by_s)
    assert held(root) == {A, B, C}
    cache.find(B, TOKEN, SIZES)  # used now
    cache.add("d" * 32, TOKEN, SIZES, span)
    assert held(root) == {B, C, "d" * 32}


def test_no_copy_goes_within_an_hour_of_its_use(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    cache = cache_of(root, max_bytes=0)
    for file_id in (A, B):
        cache.add(file_id, TOKEN, SIZES, span)
    age(cache, A, KEPT_S - 10)
    cache.trim({A, B})
    assert held(root) == {A, B}
    age(cache, A, KEPT_S + 10)
    cache.trim({A, B})
    assert held(root) == {B}


def test_copies_of_deleted_files_go_at_once(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    cache = cache_of(root)
    cache.trim(set())
    assert not root.exists()  # nothing to do
    for file_id in (A, B):
        cache.add(file_id, TOKEN, SIZES, span)
    cache.trim({B})
    assert held(root) == {B}
    cache.delete(B)
    cache.delete(B)
    assert held(root) == set()


def test_leftovers_of_killed_processes_go_after_an_hour(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    cache = cache_of(root)
    cache.add(A, TOKEN, SIZES, span)
    (root / ".partial-x").mkdir()
    cache.trim({A})
    assert held(root) == {A, ".partial-x"}
    os.utime(root / ".partial-x", (0, 0))
    cache.trim({A})
    assert held(root) == {A}


def test_old_copies_make_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    cache = cache_of(root, min_free_bytes=100)
    cache.add(A, TOKEN, SIZES, span)
    age(cache, A, 2 * KEPT_S)
    full = shutil.disk_usage(root)._replace(free=105)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError, match=r"it has 10 bytes, .*105 left.*min_free_bytes") as caught:
        cache.add(B, TOKEN, SIZES, span)
    assert caught.value.errno == errno.ENOSPC
    assert held(root) == set()
    worker = cache_of(root, min_free_bytes=100, spares_disk=False)
    assert worker.add(B, TOKEN, SIZES, span) == root / B  # accepted work needs it


def test_a_lost_directory_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    cache = cache_of(root)
    cache.prove_writable()
    cache.add(A, TOKEN, SIZES, span)
    shutil.rmtree(root)
    assert cache.find(A, TOKEN, SIZES) is None
    assert cache.add(A, TOKEN, SIZES, span) == cache.path(A)
    shutil.rmtree(root)
    with cache.staging() as staged:
        assert staged.is_dir()


def test_processes_that_copy_at_once_share_one_copy(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    barrier = threading.Barrier(4)
    found: list[Path | None] = []

    def copy() -> None:
        def read(name: str, start: int, end: int) -> bytes:
            barrier.wait(timeout=10)
            return span(name, start, end)

        found.append(cache_of(root).add(A, TOKEN, SIZES, read))

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert found == [root / A] * 4
    assert held(root) == {A}
    assert {name: (root / A / name).read_bytes() for name in DATA} == DATA
