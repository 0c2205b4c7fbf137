"""Power loss: no checkpoint is torn, and no acknowledged one is lost.

The tests try a power loss at every moment of each story below, with every state that it may leave
(``crash_fs``). ``kill -9`` cannot show a missing fsync. These tests do, as the tests of broken
writers prove.
"""

import errno
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.faults.crash_fs import CrashFs, Tree
from tests.faults.hooked_fs import Before, HookedFs, failing
from tuneserve_engine.store.files import FileStore, Fs

ROOT = Path("/data/files")
OLD, NEW = "0" * 32, "1" * 32
MEMBERS = {
    OLD: {"adapter.safetensors": b"old weights"},
    NEW: {"adapter.safetensors": b"weights", "config.json": b"{}"},
}
CHUNK = 4
"""Bytes per write: the weights take two writes, so one of them may be missing."""
State = frozenset[tuple[str, "bytes | State"]]
Wrap = Callable[[Fs], Fs]


def as_is(fs: Fs) -> Fs:
    return fs


class Killed(BaseException):
    """The end of the writing process: its own handlers do not run."""


class Story:
    """A disk with one old checkpoint, and every state that a power loss could leave.

    ``promised`` are the acknowledged files. ``wrong`` collects the errors found.
    """

    def __init__(
        self,
        wrap: Wrap = as_is,
        tree: Tree | None = None,
        store_type: type[FileStore] = FileStore,
    ) -> None:
        self.disk = CrashFs(tree or {"data": {"files": {OLD: dict(MEMBERS[OLD])}}})
        self.disk.watch = self.look
        self.wrap = wrap
        self.store_type = store_type
        self.promised = {OLD}
        self.wrong: set[str] = set()
        self.left: dict[State, Tree] = {}

    def process(self, before: Before | None = None) -> FileStore:
        """The file store of a newly started process. Its calls are counted from now on."""
        hooked = HookedFs(self.wrap(self.disk), chunk=CHUNK)
        store = self.store_type(ROOT, hooked)
        hooked.calls = 0
        if before is not None:
            hooked.before = before
        return store

    def write(self, store: FileStore) -> None:
        store.write(NEW, MEMBERS[NEW])
        self.promised.add(NEW)
        self.look()

    def look(self) -> None:
        """Judge the states that a power loss would leave now."""
        for tree in self.disk.survivors():
            state, promised = state_of(tree), frozenset(self.promised)
            if (state, promised) not in JUDGED:
                JUDGED[state, promised] = judged(tree, promised)
            self.wrong |= JUDGED[state, promised]
            self.left[state] = tree


JUDGED: dict[tuple[State, frozenset[str]], set[str]] = {}


def state_of(tree: Tree) -> State:
    """The tree as a key, without the random part of temporary names."""
    return frozenset(
        (name[: len(".partial-") + 32], state_of(content) if isinstance(content, dict) else content)
        for name, content in tree.items()
    )


def judged(tree: Tree, promised: frozenset[str]) -> set[str]:
    """The errors of a disk, seen by a store that opens it."""
    disk = CrashFs(tree)
    store = FileStore(ROOT, disk)
    wrong = {f"{file_id[0]} is lost" for file_id in promised - store.ids()}
    for file_id in store.ids():
        if subtree(disk.tree(), file_id) != MEMBERS.get(file_id):
            wrong.add(f"{file_id[0]} is torn")
    store.discard_partial()
    if set(disk.names(ROOT)) != store.ids():
        wrong.add("litter stays")
    return wrong


def subtree(tree: Tree, file_id: str) -> Tree | bytes:
    for name in (*ROOT.parts[1:], file_id):
        found = tree[name]
        assert isinstance(found, dict)
        tree = found
    return tree


def calls_of_a_write() -> int:
    story = Story()
    store = story.process()
    store.write(NEW, MEMBERS[NEW])
    fs = store._fs
    assert isinstance(fs, HookedFs)
    return fs.calls


CALLS = calls_of_a_write()


def kill_at(call: int) -> Before:
    def before(number: int, name: str) -> None:
        if number == call:
            raise Killed

    return before


# --- power loss: stories ------------------------------------------------------------------------


def written(wrap: Wrap = as_is) -> Story:
    """One write to its end."""
    story = Story(wrap)
    story.write(story.process())
    return story


def written_again_after_a_power_loss(wrap: Wrap = as_is) -> list[Story]:
    """The same write on each disk that a power loss during the first may have left."""
    stories = []
    for tree in written().left.values():
        stories.append(Story(wrap, tree))
        stories[-1].write(stories[-1].process())
    return stories


def written_again_after_a_kill(store_type: type[FileStore] = FileStore) -> list[Story]:
    """The first writer is killed before each of its calls, the machine stays up, and another
    process writes the same id.
    """
    stories = []
    for call in range(CALLS):
        story = Story(store_type=store_type)
        with pytest.raises(Killed):
            story.process(kill_at(call)).write(NEW, MEMBERS[NEW])
        story.write(story.process())
        stories.append(story)
    return stories


def overtaken(store_type: type[FileStore] = FileStore) -> list[Story]:
    """Before each call of one writer, another process writes the same id from start to end.

    Then the first writer continues, or fails at one of its next calls.
    """
    stories = []
    for call in range(CALLS):
        for fails in range(call, CALLS + 1):
            story = Story(store_type=store_type)
            try:
                story.process(meeting(story, call, fails)).write(NEW, MEMBERS[NEW])
            except OSError as error:
                if error.errno != errno.EIO:  # not the expected error
                    story.wrong.add(f"a writer fails: {error.strerror}")
            stories.append(story)
    return stories


def meeting(story: Story, call: int, fails: int) -> Before:
    """A hook by which another process writes before one call, and another call fails."""

    def before(number: int, name: str) -> None:
        if number == call:
            story.write(story.process())
        if number == fails:
            raise OSError(errno.EIO, "Input/output error")

    return before


def failed_and_written_again(error: int) -> list[Story]:
    """Each call fails once, or from then on. Later the disk works and the id is written again."""
    stories = []
    for call in range(CALLS):
        for calls in (range(call, call + 1), range(call, 1000)):
            story = Story()
            store = story.process(failing(calls, error))
            with pytest.raises(OSError) as caught:
                store.write(NEW, MEMBERS[NEW])
            assert caught.value.errno == error
            story.write(story.process())
            stories.append(story)
    return stories


def wrong(stories: list[Story]) -> set[str]:
    return set().union(*(story.wrong for story in stories))


def test_a_power_loss_during_a_write_leaves_all_or_nothing() -> None:
    story = written()
    assert story.wrong == set()
    ids = [CrashFs(tree).names(ROOT) for tree in story.left.values()]
    assert any(NEW in names for names in ids) and any(NEW not in names for names in ids)
    assert len(story.left) > 20


def test_the_same_id_can_be_written_after_any_power_loss() -> None:
    stories = written_again_after_a_power_loss()
    assert wrong(stories) == set()
    assert len(stories) > 20


def test_an_id_written_again_after_a_kill_survives_a_power_loss() -> None:
    assert wrong(written_again_after_a_kill()) == set()


def test_no_writer_of_an_id_undoes_the_acknowledged_write_of_another() -> None:
    assert wrong(overtaken()) == set()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_costs_only_this_write(error: int) -> None:
    assert wrong(failed_and_written_again(error)) == set()


def deleted(store_type: type[FileStore] = FileStore) -> Story:
    story = Story(store_type=store_type)
    story.write(story.process())
    story.promised.remove(NEW)
    story.left.clear()
    story.process().delete(NEW)
    return story


def test_a_power_loss_during_a_deletion_leaves_all_or_nothing() -> None:
    story = deleted()
    assert story.wrong == set()
    assert {NEW in CrashFs(tree).names(ROOT) for tree in story.left.values()} == {True, False}


def test_the_first_checkpoint_survives_though_its_directory_is_new() -> None:
    story = Story(tree={"data": {}})
    story.promised.clear()
    story.write(story.process())
    assert story.wrong == set()


# --- power loss: broken writers are found -------------------------------------------------------


class Careless:
    """An ``Fs`` that omits some syncs, like a writer that forgot them."""

    def __init__(self, inner: Fs, *skipped: str) -> None:
        self.inner = inner
        self.skipped = skipped
        self.kind: dict[int, str] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def create(self, path: Path) -> int:
        descriptor = self.inner.create(path)
        self.kind[descriptor] = "file"
        return descriptor

    def open_directory(self, path: Path) -> int:
        descriptor = self.inner.open_directory(path)
        self.kind[descriptor] = "root" if path == ROOT else "members"
        return descriptor

    def fsync(self, descriptor: int) -> None:
        if self.kind[descriptor] not in self.skipped:
            self.inner.fsync(descriptor)


class Hasty(Careless):
    """An ``Fs`` that renames before it syncs the contents of the directory."""

    def __init__(self, inner: Fs) -> None:
        super().__init__(inner)
        self.late: list[int] = []

    def fsync(self, descriptor: int) -> None:
        if self.kind[descriptor] == "root":
            self.inner.fsync(descriptor)
        else:
            self.late.append(descriptor)

    def close(self, descriptor: int) -> None:
        if descriptor not in self.late:
            self.inner.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.inner.rename(source, target)
        late, self.late = self.late, []
        for descriptor in late:
            self.inner.fsync(descriptor)
            self.inner.close(descriptor)


class Direct(Careless):
    """An ``Fs`` that makes the temporary directory under its final name."""

    def _final(self, path: Path) -> Path:
        return Path(*(part.removeprefix(".partial-")[:32] for part in path.parts))

    def mkdir(self, path: Path) -> None:
        self.inner.mkdir(self._final(path))

    def create(self, path: Path) -> int:
        return super().create(self._final(path))

    def open_directory(self, path: Path) -> int:
        return super().open_directory(self._final(path))

    def rename(self, source: Path, target: Path) -> None:
        pass


BROKEN: dict[str, tuple[Callable[[Fs], Careless], str]] = {
    "files are not synced": (lambda fs: Careless(fs, "file"), "1 is torn"),
    "the directory of the members is not synced": (lambda fs: Careless(fs, "members"), "1 is torn"),
    "the rename is not synced": (lambda fs: Careless(fs, "root"), "1 is lost"),
    "the rename comes before the syncs": (Hasty, "1 is torn"),
    "there is no rename": (Direct, "1 is torn"),
}


@pytest.mark.parametrize("bug", BROKEN)
def test_a_broken_writer_is_found(bug: str) -> None:
    wrap, found = BROKEN[bug]
    assert found in written(wrap).wrong


class Trusting(FileStore):
    """A file store that takes existing files for synced."""

    def write(self, file_id: str, members: Mapping[str, bytes]) -> int:
        return 0 if self._exists(self.path(file_id)) else super().write(file_id, members)


class Undoing(FileStore):
    """A file store that removes a file when its last sync fails."""

    def write(self, file_id: str, members: Mapping[str, bytes]) -> int:
        try:
            return super().write(file_id, members)
        except OSError:
            self._fs.remove_tree(self.path(file_id))
            raise


class Sharing(FileStore):
    """A file store with one temporary name for all writers of an id."""

    def _partial(self, file_id: str) -> Path:
        return self._root / f".partial-{file_id}"

    def _publish(self, partial: Path, final: Path, members: Mapping[str, bytes]) -> None:
        self._fs.remove_tree(partial)
        super()._publish(partial, final, members)


class Nibbling(FileStore):
    """A file store that deletes in place."""

    def delete(self, file_id: str) -> None:
        self._fs.remove_tree(self.path(file_id))


def test_a_writer_that_trusts_existing_files_is_found() -> None:
    assert wrong(written_again_after_a_kill(Trusting)) == {"1 is lost"}


def test_a_writer_that_removes_a_shared_file_is_found() -> None:
    assert "1 is lost" in wrong(overtaken(Undoing))


def test_writers_that_share_a_temporary_name_are_found() -> None:
    assert "a writer fails: No such file or directory" in wrong(overtaken(Sharing))


def test_a_deletion_in_place_is_found() -> None:
    assert "1 is torn" in deleted(Nibbling).wrong
