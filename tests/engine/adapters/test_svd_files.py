"""The files of a decomposed target: checksums that find damage, headers, and locks."""

import fcntl
import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from tuneserve_engine.adapters.svd_files import (
    check_sums,
    fsync_path,
    is_held,
    sums_of,
    write_header,
    write_member,
)
from tuneserve_engine.core.errors import FileDamaged

EMPTY = "2d06800538d394c2"
"""XXH3's 64 bits of no bytes, as its specification gives them."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with all four files, and their checksums."""
    for name in ("id", "u.npy", "s.npy", "v.npy"):
        write_member(tmp_path / name, name.encode())
    (tmp_path / "xxh3").write_text(json.dumps(sums_of(tmp_path)))
    return tmp_path


def test_every_file_has_its_checksum(target: Path) -> None:
    (target / "s.npy").write_bytes(b"")
    sums = sums_of(target)
    assert sums.keys() == {"id", "u.npy", "s.npy", "v.npy"}
    assert sums["s.npy"] == EMPTY
    assert len(set(sums.values())) == 4


def test_whole_files_pass_the_check(target: Path) -> None:
    check_sums(target)


def test_a_changed_file_is_named(target: Path) -> None:
    (target / "v.npy").write_bytes(b"V.npy")
    with pytest.raises(FileDamaged, match=r"damaged: v.npy does not have its checksum; ask"):
        check_sums(target)


@pytest.mark.parametrize("sums", ["", "[]", "{}"])
def test_unreadable_or_missing_checksums_are_damage(sums: str, target: Path) -> None:
    (target / "xxh3").write_text(sums)
    with pytest.raises(FileDamaged):
        check_sums(target)


def test_a_missing_file_is_damage(target: Path) -> None:
    (target / "u.npy").unlink()
    with pytest.raises(FileDamaged, match=r"u\.npy"):
        check_sums(target)


def test_a_target_without_checksums_is_one_of_an_earlier_release(target: Path) -> None:
    (target / "xxh3").unlink()
    (target / "v.npy").write_bytes(b"")
    check_sums(target)


def test_numpy_reads_the_numbers_after_the_header() -> None:
    numbers = np.arange(6, dtype=np.float32)
    file = BytesIO()
    write_header(file, (2, 3))
    file.write(numbers.tobytes())
    file.seek(0)
    np.testing.assert_array_equal(np.load(file), numbers.reshape(2, 3))


def test_a_lock_is_held_while_its_writer_has_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with lock.open("wb") as file:
        assert not is_held(lock)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(lock)
    assert not is_held(lock)


def test_a_member_replaces_the_content_and_can_be_synced(tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.write_bytes(b"an earlier and longer one")
    write_member(path, b"new")
    fsync_path(path)
    fsync_path(tmp_path)
    assert path.read_bytes() == b"new"
