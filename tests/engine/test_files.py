"""The file store: whole or absent, whatever the disk does at whichever step."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.files import FileStore, new_file_id

ID = "0123456789abcdef" * 2
MEMBERS = {"adapter.safetensors": b"weights", "adapter_config.json": b"{}"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_members_come_back_byte_for_byte(store: FileStore) -> None:
    file_id = new_file_id()
    assert store.write(file_id, MEMBERS) == 9
    assert contents(store.path(file_id)) == MEMBERS
    assert store.members(file_id) == sorted(MEMBERS)
    assert store.ids() == {file_id}


def test_an_id_without_files_has_no_members_and_can_be_deleted(store: FileStore) -> None:
    assert store.members(ID) == []
    store.delete(ID)
    assert store.ids() == set()


def test_a_second_write_of_an_id_changes_nothing(store: FileStore) -> None:
    store.write(ID, MEMBERS)
    assert store.write(ID, {"other": b"x"}) == 1
    assert contents(store.path(ID)) == MEMBERS


def test_deleted_files_are_gone_and_others_stay(store: FileStore) -> None:
    other = new_file_id()
    store.write(ID, MEMBERS)
    store.write(other, MEMBERS)
    store.delete(ID)
    assert store.ids() == {other}
    assert not store.path(ID).exists()


def test_ids_are_those_of_complete_directories_only(store: FileStore, root: Path) -> None:
    (root / f".partial-{ID}").mkdir()
    (root / "lost+found").mkdir()
    assert store.ids() == set()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../" + ID,
        "../../etc/passwd",
        "/etc/passwd",
        ID[:-1],
        ID + "0",
        ID[:-1] + "/",
        ID[:-1] + "\0",
        ID.upper(),
        "\u0660" * 32,
    ],
)
def test_a_name_that_is_no_file_id_is_refused(store: FileStore, root: Path, name: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: store.path(name),
        lambda: store.write(name, MEMBERS),
        lambda: store.members(name),
        lambda: store.delete(name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            call()
    assert list(root.iterdir()) == []


class FailingDisk:
    """Counts the calls that reach the disk and fails the one with number ``fail_at``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at = -1
        self.error = errno.ENOSPC
        for owner, name in (
            (os, "fsync"),
            (os, "open"),
            (Path, "open"),
            (Path, "mkdir"),
            (Path, "rename"),
        ):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 == self.fail_at:
                raise OSError(self.error, os.strerror(self.error))
            return call(*args, **kwargs)

        return counted


STEPS = ["mkdir", *["open", "fsync"] * 2, "open", "fsync", "rename", "open", "fsync"]


def test_everything_is_synced_before_it_becomes_visible(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    store.write(ID, MEMBERS)
    assert disk.calls == STEPS


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_failing_disk_leaves_nothing_visible_and_the_id_usable(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch, step: int, error: int
) -> None:
    other = new_file_id()
    store.write(other, MEMBERS)
    disk = FailingDisk(monkeypatch)
    disk.fail_at, disk.error = step, error
    with pytest.raises(OSError) as caught:
        store.write(ID, MEMBERS)
    assert caught.value.errno == error
    assert store.ids() == {other}
    assert store.members(ID) == []
    assert [path.name for path in root.iterdir()] == [other]  # no litter either
    assert contents(store.path(other)) == MEMBERS
    disk.fail_at = -1
    store.write(ID, MEMBERS)
    assert contents(store.path(ID)) == MEMBERS


def test_what_a_killed_process_left_behind_is_replaced(store: FileStore, root: Path) -> None:
    partial = root / f".partial-{ID}"
    partial.mkdir()
    (partial / "adapter.safetensors").write_bytes(b"torn")
    (partial / "stray").write_bytes(b"x")
    assert store.members(ID) == []
    store.write(ID, MEMBERS)
    assert contents(store.path(ID)) == MEMBERS
    assert not partial.exists()


def test_a_store_opens_where_one_was(store: FileStore, root: Path) -> None:
    store.write(ID, MEMBERS)
    assert contents(FileStore(root).path(ID)) == MEMBERS


def test_what_a_killed_writer_left_is_discarded_and_the_rest_stays(
    store: FileStore, root: Path
) -> None:
    store.write(ID, MEMBERS)
    left = root / f".partial-{new_file_id()}"
    left.mkdir()
    (left / "adapter.safetensors").write_bytes(b"half")
    store.discard_partial()
    assert not left.exists()
    assert contents(store.path(ID)) == MEMBERS
