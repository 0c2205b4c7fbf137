"""Files are whole or absent, whatever the disk does at whichever step."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.store.files import FileStore, LocalFs, new_file_id

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


def test_members_are_read_back_byte_for_byte(store: FileStore) -> None:
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


def test_ids_can_be_limited_to_those_of_an_age(store: FileStore, root: Path) -> None:
    old, young = new_file_id(), new_file_id()
    for file_id, modified_s in ((old, 1000.0), (young, 1000.5)):
        store.write(file_id, MEMBERS)
        os.utime(store.path(file_id), (modified_s, modified_s))
    now = {"s": 0.0}
    later = FileStore(root, clock=lambda: now["s"])
    for now_s, expected in ((1899.9, set()), (1900.0, {old}), (1900.5, {old, young})):
        now["s"] = now_s
        assert later.ids(older_than_s=900) == expected
    assert later.ids() == {old, young}


def test_only_complete_directories_count_as_files(store: FileStore, root: Path) -> None:
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
def test_a_malformed_file_id_is_refused(store: FileStore, root: Path, name: str) -> None:
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


class CountingFs(LocalFs):
    """The real file system. It fails the call with number ``fail_at``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_at = -1
        self.error = errno.ENOSPC

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            raise OSError(self.error, os.strerror(self.error))

    def mkdir(self, path: Path) -> None:
        self._count("mkdir")
        super().mkdir(path)

    def create(self, path: Path) -> int:
        self._count("create")
        return super().create(path)

    def open_directory(self, path: Path) -> int:
        self._count("open")
        return super().open_directory(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._count("write")
        return super().write(descriptor, data[:5])

    def fsync(self, descriptor: int) -> None:
        self._count("fsync")
        super().fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)


MEMBER_STEPS = ["create", "write", "write", "fsync", "create", "write", "fsync"]
STEPS = ["mkdir", *MEMBER_STEPS, "open", "fsync", "rename", "open", "fsync"]


def test_everything_is_synced_before_it_becomes_visible(root: Path) -> None:
    fs = CountingFs()
    store = FileStore(root, fs)
    fs.calls.clear()
    store.write(ID, MEMBERS)
    assert fs.calls == STEPS


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_failing_disk_leaves_no_torn_file_and_the_id_usable(
    root: Path, step: int, error: int
) -> None:
    other = new_file_id()
    fs = CountingFs()
    store = FileStore(root, fs)
    store.write(other, MEMBERS)
    fs.calls, fs.fail_at, fs.error = [], step, error
    with pytest.raises(OSError) as caught:
        store.write(ID, MEMBERS)
    assert caught.value.errno == error
    # A whole file may be in use by another writer of the same id, so it is not removed.
    whole = STEPS.index("rename") < step
    assert store.ids() == ({other, ID} if whole else {other})
    assert store.members(ID) == (sorted(MEMBERS) if whole else [])
    assert {path.name for path in root.iterdir()} == store.ids()  # no partial files either
    assert contents(store.path(other)) == MEMBERS
    fs.fail_at = -1
    store.write(ID, MEMBERS)
    assert contents(store.path(ID)) == MEMBERS


def test_a_checkpoint_respects_the_reserved_disk_space_and_a_recovery_point_does_not(
    root: Path,
) -> None:
    """The space is reserved for accepted requests, which need recovery points."""
    files = FileStore(root, min_free_bytes=2**60)
    with pytest.raises(OSError, match=r"it has 7 bytes, .* of which 1152921504606846976 are kept"):
        files.write("a" * 32, {"weights": b"weights"}, spares_disk=True)
    assert files.ids() == set()
    files.write("a" * 32, {"weights": b"weights"})
    # the file exists, so no space is needed
    files.write("a" * 32, {"weights": b"weights"}, spares_disk=True)
    FileStore(root).write("b" * 32, {"weights": b"weights"}, spares_disk=True)


def test_a_disk_that_takes_no_bytes_is_full(root: Path) -> None:
    class StuckFs(LocalFs):
        def write(self, descriptor: int, data: memoryview) -> int:
            return 0

    store = FileStore(root, StuckFs())
    with pytest.raises(OSError, match="takes no more bytes of adapter"):
        store.write(ID, MEMBERS)
    assert list(root.iterdir()) == []


def test_an_existing_file_is_synced_before_it_counts_as_stored(root: Path) -> None:
    """Its writer may have been killed between the rename and the sync of the directory."""
    FileStore(root).write(ID, MEMBERS)
    fs = CountingFs()
    store = FileStore(root, fs)
    fs.calls.clear()
    store.write(ID, MEMBERS)
    assert fs.calls == ["open", "fsync"]


def test_the_root_and_its_missing_parents_are_synced(tmp_path: Path) -> None:
    fs = CountingFs()
    FileStore(tmp_path / "a" / "b", fs)
    assert fs.calls == ["mkdir", "open", "fsync"] * 2
    fs.calls.clear()
    FileStore(tmp_path / "a" / "b", fs)
    assert fs.calls == ["open", "fsync"]


# --- several writers -----------------------------------------------------------------------------


def test_concurrent_writers_of_one_id_all_succeed(root: Path) -> None:
    """No writer sees, removes or completes the files of another."""
    barrier = threading.Barrier(4)

    class MeetingFs(LocalFs):
        """All writers are at the same step at the same time, including those that lose the race."""

        def rename(self, source: Path, target: Path) -> None:
            barrier.wait(timeout=10)
            super().rename(source, target)

    stores = [FileStore(root, MeetingFs()) for _ in range(4)]
    errors: list[BaseException] = []

    def write(store: FileStore) -> None:
        try:
            assert store.write(ID, MEMBERS) == 9
            assert contents(store.path(ID)) == MEMBERS
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        threads = [threading.Thread(target=write, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert errors == []
        assert [path.name for path in root.iterdir()] == [ID]
        FileStore(root).delete(ID)


def test_another_writers_partial_file_is_not_touched(store: FileStore, root: Path) -> None:
    theirs = root / f".partial-{ID}-0"
    theirs.mkdir()
    (theirs / "adapter.safetensors").write_bytes(b"half")
    store.write(ID, MEMBERS)
    assert contents(store.path(ID)) == MEMBERS
    assert contents(theirs) == {"adapter.safetensors": b"half"}


def test_a_deletion_removes_all_members_at_once(root: Path) -> None:
    class KilledFs(LocalFs):
        def remove_tree(self, path: Path) -> None:
            next(path.iterdir()).unlink()  # and then stops

    store = FileStore(root, KilledFs())
    store.write(ID, MEMBERS)
    store.delete(ID)
    assert (store.ids(), store.members(ID)) == (set(), [])
    store.write(ID, MEMBERS)
    assert contents(store.path(ID)) == MEMBERS


@pytest.mark.parametrize(
    "point, whole", [("file-before-rename", False), ("file-after-rename", True)]
)
def test_a_kill_around_the_rename_leaves_all_or_nothing(
    store: FileStore, root: Path, point: str, whole: bool
) -> None:
    script = (
        "import sys; from pathlib import Path; from tuneserve_engine.process import failpoints;"
        "from tuneserve_engine.store import files; failpoints.arm(sys.argv[2]);"
        "files.FileStore(Path(sys.argv[1])).write(sys.argv[3], {'a': b'x'})"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(root), point, ID], check=False)
    assert killed.returncode == -9
    assert store.ids() == ({ID} if whole else set())
    store.write(ID, {"a": b"x"})
    assert contents(store.path(ID)) == {"a": b"x"}


def test_an_existing_store_opens_again(store: FileStore, root: Path) -> None:
    store.write(ID, MEMBERS)
    assert contents(FileStore(root).path(ID)) == MEMBERS


def test_only_a_killed_writers_files_are_discarded_after_an_hour(
    store: FileStore, root: Path
) -> None:
    store.write(ID, MEMBERS)
    os.utime(store.path(ID), (0.0, 0.0))
    left = [root / f".partial-{new_file_id()}-{n}" for n in range(2)]
    for path, modified_s in zip(left, (400.0, 400.5), strict=True):
        path.mkdir()
        (path / "adapter.safetensors").write_bytes(b"half")
        os.utime(path, (modified_s, modified_s))
    FileStore(root, clock=lambda: 4000.0).discard_partial()
    assert [path.exists() for path in left] == [False, True]
    assert contents(store.path(ID)) == MEMBERS
