"""Checks of the directory of files at the start of a process.

The process can write to the directory, shares it with the other processes of the deployment, and
does not give a new store a directory that is in use. Found later, a mistake would cost models:
another worker restores models from their files.
"""

from pathlib import Path

from tuneserve_engine.core.records import DirectoryRecord
from tuneserve_engine.store import ownership
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.ownership import FILES, MARK, identity_of


def open_files(directory: Path, *, min_free_bytes: int = 0) -> FileStore:
    """Open a directory of files. Raises ``OSError`` if this process cannot write to it."""
    try:
        files = FileStore(directory, min_free_bytes=min_free_bytes)
        files.prove_writable()
    except OSError as error:
        raise OSError(
            f"cannot use the directory of files {directory}: {error.strerror}; see who owns it and "
            "whether it is mounted, or choose another with --files-dir"
        ) from error
    return files


def check_unused(directory: Path, shown: str) -> None:
    """Check that a new store may have the directory.

    ``shown`` is the store's address for messages. Raises ``StoreUnusable`` if another store has, or
    had, files in the directory.
    """
    files = open_files(directory)
    present = files.ids() | {each for ids in files.set_aside_groups().values() for each in ids}
    if present or ownership.marks(files) or ownership.claims(files):
        raise _taken(directory, len(present), shown)


def _taken(directory: Path, count: int, shown: str) -> StoreUnusable:
    return StoreUnusable(
        f"the store {shown} is new or empty, but the directory of files {directory} belongs to "
        f"another one and has {count} checkpoints and recovery points in it. If that store was "
        "lost or wiped, restore it: nothing of the files is lost. If it is elsewhere, name it with "
        "--data-dir or --store. For a service of its own choose another --files-dir. Only if this "
        "store is to have these files, of which it knows none, run: tuneserve files adopt"
    )


async def check_shared(directory: Path, store: Store, shown: str = "of this service") -> None:
    """Check that this is the directory of the store's processes; the first process decides it.

    Raises ``StoreUnusable`` for another directory, and ``OSError`` for one that cannot be used.
    """
    files = open_files(directory)
    # Read before the store is asked: its other processes leave files only once it knows the mark.
    found, present = ownership.marks(files), files.ids()
    known = await store.get_record(DirectoryRecord, FILES)
    if known is None:
        mark = identity_of(await store.secret())
        if mark not in found:
            # A store of a release without marks names files in a directory without a mark.
            is_own = not found and present & await store.files_in_use()
            if not is_own and (present or found):
                raise _taken(directory, len(present), shown)
            files.leave_note(f"{MARK}{mark}")  # first: a process that knows the mark must find it
        known = await store.put_new_record(DirectoryRecord(FILES, mark))
    if known.mark not in ownership.marks(files):
        raise StoreUnusable(
            f"{directory} is not the directory of files that belongs to the store: {MARK}"
            f"{known.mark} is not in it; mount what the other processes have, or name it with "
            "--files-dir. If this is the right one, restored without that mark, run: tuneserve "
            "files adopt"
        )


def check_marked(directory: Path) -> None:
    """Check that the directory belongs to a store. Raises ``StoreUnusable`` if it does not.

    A worker whose store is behind the API process cannot check which store that is.
    """
    if not ownership.marks(FileStore(directory)):
        raise StoreUnusable(
            f"{directory} is not the directory of files that the API process has; name that with "
            "--files-dir"
        )
