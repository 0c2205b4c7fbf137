"""Room on the disk is kept for work that was accepted."""

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tuneserve_engine.process.disk_room import check_room

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 900, 100))


@pytest.mark.usefixtures("free")
def test_a_write_may_leave_just_the_kept_room(tmp_path: Path) -> None:
    check_room(tmp_path, 60, 40)
    with pytest.raises(OSError, match=r"has 61 bytes.* has 100 left.*40 are kept") as full:
        check_room(tmp_path, 61, 40)
    assert full.value.errno == errno.ENOSPC


@pytest.mark.usefixtures("free")
def test_without_kept_room_nothing_is_checked(tmp_path: Path) -> None:
    check_room(tmp_path, 10**9, 0)


def test_the_disk_of_a_missing_folder_is_that_of_its_nearest_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(folder: Path) -> Usage:
        asked.append(folder)
        return Usage(1000, 0, 1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check_room(tmp_path / "not" / "there", 1, 1)
    assert asked == [tmp_path]
