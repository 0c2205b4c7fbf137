"""The place of checkpoint files that the settings choose, and its checks at the start of a process.

The process can write to the directory or bucket, shares it with the other processes of the
deployment, and does not give a new store one that is in use. Found later, a mistake would cost
models: another worker restores models from their files.
"""

import asyncio
import errno
import logging
import time

from tuneserve_engine.core.records import DirectoryRecord
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import ownership
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.bucket import Bucket
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.file_cache import FileCache
from tuneserve_engine.store.files import FileStore
from tuneserve_engine.store.files_base import Files
from tuneserve_engine.store.object_files import ObjectFileStore
from tuneserve_engine.store.ownership import FILES, MARK, identity_of

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
_CACHE = "cache"
"""The folder in ``files_dir`` for copies of a bucket's files. In ``files_dir`` itself, there may be
files from before the bucket was chosen, and those are no copies."""


def new_files(settings: CommonSettings, *, spares_disk: bool = True) -> Files:
    """Return the files that the settings choose, in a bucket or a directory, without a check.

    ``spares_disk`` is that of local copies from a bucket: see ``FileCache``. Raises ``OSError`` if
    a local directory cannot be made.
    """
    if not settings.files_url:
        return FileStore(settings.files_dir, min_free_bytes=settings.min_free_bytes)
    cache = FileCache(
        settings.files_dir / _CACHE,
        max_bytes=settings.files_cache_bytes,
        min_free_bytes=settings.min_free_bytes,
        spares_disk=spares_disk,
    )
    return ObjectFileStore(Bucket(settings.files_url), cache)


def open_files(settings: CommonSettings, *, spares_disk: bool = True) -> Files:
    """Return the files that the settings choose, as ``new_files`` does.

    Raises ``OSError`` if they cannot be written, which is ``ConnectionError`` if a bucket does not
    answer now.
    """
    try:
        files = new_files(settings, spares_disk=spares_disk)
        files.prove_writable()
    except OSError as error:
        if settings.files_url:
            kind = ConnectionError if error.errno == errno.EIO else OSError
            raise kind(
                f"cannot use the bucket of files {settings.files_url}: {error.strerror}; check the "
                "credentials (AWS_ACCESS_KEY_ID and others), AWS_REGION, AWS_ENDPOINT_URL, and the "
                "permissions to list, read, write and delete objects there, or choose another "
                "with --files-url"
            ) from error
        raise OSError(
            f"cannot use the directory of files {settings.files_dir}: {error.strerror}; see who "
            "owns it and whether it is mounted, or choose another with --files-dir"
        ) from error
    return files


def wait_for_files(settings: CommonSettings, *, spares_disk: bool) -> Files:
    """Return the files as ``open_files`` does, once the bucket answers."""
    while True:
        try:
            return open_files(settings, spares_disk=spares_disk)
        except ConnectionError as error:
            logger.warning("trying again: %s", error)
            time.sleep(_RETRY_S)


def check_unused(files: Files, shown: str) -> None:
    """Check that a new store may have the directory or bucket.

    ``shown`` is the store's address for messages. Raises ``StoreUnusable`` if another store has, or
    had, files there.
    """
    present = files.ids() | {each for ids in files.set_aside_groups().values() for each in ids}
    if present or ownership.marks(files) or ownership.claims(files):
        raise _taken(files, len(present), shown)


def _taken(files: Files, count: int, shown: str) -> StoreUnusable:
    return StoreUnusable(
        f"the store {shown} is new or empty, but the {files.place} {files.shown} belongs to "
        f"another one and has {count} checkpoints and recovery points in it. If that store was "
        "lost or wiped, restore it: nothing of the files is lost. If it is elsewhere, name it with "
        f"--data-dir or --store. For a service of its own choose another {files.option}. Only if "
        "this store is to have these files, of which it knows none, run: tuneserve files adopt"
    )


async def check_shared(files: Files, store: Store, shown: str = "of this service") -> None:
    """Check that these are the files of the store's processes; the first process decides it.

    Raises ``StoreUnusable`` for another directory or bucket, and ``OSError`` for one that cannot be
    used.
    """
    # Read before the store is asked: its other processes leave files only once it knows the mark.
    found = await asyncio.to_thread(ownership.marks, files)
    present = await asyncio.to_thread(files.ids)
    known = await store.get_record(DirectoryRecord, FILES)
    if known is None:
        mark = identity_of(await store.secret())
        if mark not in found:
            # A store of a release without marks names files in a directory without a mark.
            is_own = not found and present & await store.files_in_use()
            if not is_own and (present or found):
                raise _taken(files, len(present), shown)
            # First: a process that knows the mark must find it.
            await asyncio.to_thread(files.leave_note, f"{MARK}{mark}")
        known = await store.put_new_record(DirectoryRecord(FILES, mark))
    if known.mark not in await asyncio.to_thread(ownership.marks, files):
        raise StoreUnusable(
            f"{files.shown} is not the {files.place} that belongs to the store: {MARK}"
            f"{known.mark} is not in it; mount what the other processes have, or name it with "
            f"{files.option}. If this is the right one, restored without that mark, run: tuneserve "
            "files adopt"
        )


def check_marked(files: Files) -> None:
    """Check that the files belong to a store. Raises ``StoreUnusable`` if they do not.

    A worker whose store is behind the API process cannot check which store that is.
    """
    if not ownership.marks(files):
        raise StoreUnusable(
            f"{files.shown} is not the {files.place} that the API process has; name that with "
            f"{files.option}"
        )
