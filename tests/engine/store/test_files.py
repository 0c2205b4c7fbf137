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

from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.files import FileStore, LocalFs, new_file_id
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.store.files_mount import new_files

ID = "0123456789abcdef" * 2
MEMBERS = {"adapter.safetensors": b"weights", "adapter_config.json": b"{}"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root)


@pytest.fixture(params=["directory", "bucket"])
def files(request: pytest.FixtureRequest, root: Path) -> Files:
    """Each kind of ``Files``, for the tests of what both promise."""
    url = request.getfixturevalue("s3_url") if request.param == "bucket" else ""
    return new_files(CommonSettings(files_dir=root, files_url=url, min_free_bytes=0))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read(files: Files, file_id: str) -> dict[str, bytes]:
    """The id's members, as its readers find them."""
    folder = files.path(file_id)
    return {name: (folder / name).read_bytes() for name in files.members(file_id)}


def test_members_are_read_back_byte_for_byte(files: Files) -> None:
    file_id = new_file_id()
    assert files.write(file_id, MEMBERS) == 9
    assert read(files, file_id) == MEMBERS
    assert files.members(file_id) == sorted(MEMBERS)
    assert files.size(file_id) == 9
    assert files.ids() == {file_id}


def test_an_id_without_files_has_no_members_and_can_be_deleted(files: Files) -> None:
    assert files.members(ID) == []
    assert files.size(ID) == 0
    assert not files.path(ID).exists()
    files.delete(ID)
    assert files.ids() == set()


def test_a_second_write_of_an_id_changes_nothing(files: Files) -> None:
    files.write(ID, MEMBERS)
    assert files.write(ID, {"other": b"x"}) == 1
    assert read(files, ID) == MEMBERS


def test_empty_members_are_kept(files: Files) -> None:
    files.write(ID, {"a": b"", "b": b"x"})
    assert read(files, ID) == {"a": b"", "b": b"x"}


def test_deleted_files_are_gone_and_others_stay(files: Files) -> None:
    other = new_file_id()
    files.write(ID, MEMBERS)
    files.write(other, MEMBERS)
    assert files.path(ID).exists()
    files.delete(ID)
    assert files.ids() == {other}
    assert not files.path(ID).exists()
    files.write(ID, {"a": b"again"})
    assert read(files, ID) == {"a": b"again"}


def test_staged_files_appear_once_they_are_published(files: Files) -> None:
    with files.staging() as staged:
        (staged / "adapter.safetensors").write_bytes(b"weights")
        assert files.ids() == set()
        assert files.publish(staged, ID) == 7
    assert not staged.exists()
    assert read(files, ID) == {"adapter.safetensors": b"weights"}
    with files.staging() as abandoned:
        (abandoned / "x").write_bytes(b"x")
    assert not abandoned.exists()
    assert files.ids() == {ID}


def test_notes_are_listed_by_their_beginning_and_keep_their_age(files: Files) -> None:
    assert files.notes(".of-") == {}
    for name in (".of-a", ".of-b", ".moved-c"):
        files.leave_note(name)
    assert files.notes(".of-").keys() == {"a", "b"}
    later_s = files.now_s() + 100
    ages = files.notes(".of-", later_s)
    assert all(95 < age_s < 101 for age_s in ages.values())
    files.leave_note(".of-a")
    assert files.notes(".of-", later_s) == ages
    files.remove_note(".of-a")
    files.remove_note(".of-never")
    assert files.notes(".of-").keys() == {"b"}
    assert files.ids() == set()


def test_files_from_before_a_note_are_told_from_later_ones(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.ids_until(".moved-a")
    files.write(ID, MEMBERS)
    files.leave_note(".moved-a")
    assert files.ids_until(".moved-a") == {ID}
    assert files.ids(older_than_s=3600) == set()


def test_files_set_aside_are_absent_until_they_are_brought_back(files: Files) -> None:
    other = new_file_id()
    files.write(ID, MEMBERS)
    files.write(other, MEMBERS)
    assert files.path(ID).exists()
    files.set_aside(ID, "group")
    files.set_aside("f" * 32, "group")  # absent
    assert (files.ids(), files.members(ID)) == ({other}, [])
    assert not files.path(ID).exists()
    assert files.set_aside_groups() == {"group": [ID]}
    files.bring_back("f" * 32, "group")  # absent
    files.bring_back(ID, "group")
    assert files.ids() == {ID, other}
    assert not any(files.set_aside_groups().values())
    assert read(files, ID) == MEMBERS


def test_files_brought_back_do_not_replace_those_written_since(files: Files) -> None:
    files.write(ID, MEMBERS)
    files.set_aside(ID, "group")
    files.write(ID, {"a": b"newer"})
    files.bring_back(ID, "group")
    assert read(files, ID) == {"a": b"newer"}
    assert files.set_aside_groups() == {"group": [ID]}
    files.delete_group("group")
    assert read(files, ID) == {"a": b"newer"}


def test_a_deleted_group_is_gone_and_others_stay(files: Files) -> None:
    other = new_file_id()
    for file_id, group in ((ID, "one"), (other, "two")):
        files.write(file_id, MEMBERS)
        files.set_aside(file_id, group)
    files.delete_group("one")
    files.delete_group("absent")
    assert files.set_aside_groups() == {"two": [other]}
    files.bring_back(ID, "one")
    files.bring_back(other, "two")
    assert files.ids() == {other}
    assert read(files, other) == MEMBERS


def test_the_write_check_leaves_nothing(files: Files) -> None:
    files.prove_writable()
    files.discard_partial()
    assert (files.ids(), files.notes(""), files.set_aside_groups()) == (set(), {}, {})


def test_ids_can_be_limited_by_age(store: FileStore, root: Path) -> None:
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
def test_a_malformed_file_id_is_refused(files: Files, root: Path, name: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: files.path(name),
        lambda: files.write(name, MEMBERS),
        lambda: files.members(name),
        lambda: files.delete(name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            call()
    assert not root.exists() or list(root.iterdir()) == []
    assert files.ids() == set()


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
    files: Files, root: Path, point: str, whole: bool
) -> None:
    """In a bucket, the manifest takes the place of the rename."""
    script = (
        "import sys; from tuneserve_engine.process import failpoints;"
        "from tuneserve_engine.settings.common import CommonSettings;"
        "from tuneserve_engine.store.files_mount import new_files; failpoints.arm(sys.argv[2]);"
        "settings = CommonSettings(files_dir=sys.argv[1], files_url=sys.argv[4]);"
        "new_files(settings).write(sys.argv[3], {'a': b'x'})"
    )
    url = files.shown if "s3://" in files.shown else ""
    command = [sys.executable, "-c", script, str(root), point, ID, url]
    assert subprocess.run(command, check=False).returncode == -9
    assert files.ids() == ({ID} if whole else set())
    files.write(ID, {"a": b"x"})
    assert read(files, ID) == {"a": b"x"}


def test_an_existing_store_opens_again(files: Files, root: Path) -> None:
    files.write(ID, MEMBERS)
    url = files.shown if "s3://" in files.shown else ""
    again = new_files(CommonSettings(files_dir=root / "elsewhere" if url else root, files_url=url))
    assert read(again, ID) == MEMBERS


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
