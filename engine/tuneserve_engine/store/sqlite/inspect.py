"""A check whether a start could use a SQLite store, without changing the store or its folder."""

import fcntl
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from tuneserve_engine.core.records import DirectoryRecord
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.sqlite.database import explain
from tuneserve_engine.store.sqlite.integrity import check_file
from tuneserve_engine.store.sqlite.schema import SECRET, VERSION, explain_version

T = TypeVar("T")

_LOCK_START, _LOCK_BYTES = 2**30, 512
"""The bytes where SQLite locks a database: https://www.sqlite.org/fileformat2.html, "The Lock-Byte
Page"."""
_JOURNALS = ("-wal", "-journal")
_MOST_COPIED_BYTES = 2**28
_CHECK_S = 60.0
_UNREAD = "its last process was killed, and a start reads what that left; not read before"


def look_at_store(path: Path) -> str:
    """Return what a start would find. Raises ``StoreUnusable`` if a start would.

    A process that has the store open must not call this: closing the file here would release its
    lock (fcntl(2)).
    """
    try:
        found = _read(path, partial(_told, path))
    except FileNotFoundError:
        return "the first start makes it"
    return _UNREAD if found is None else found[0]


def directories_of(path: Path) -> tuple[bytes, list[DirectoryRecord]] | None:
    """Return the store's secret and its records of directories.

    Returns None if the store does not exist yet, or cannot be read before a start. Raises like
    ``look_at_store``, and must not be called by a process that has the store open.
    """
    try:
        found = _read(path, lambda read: _read_file(path, read, _directories))
    except FileNotFoundError:
        return None
    return None if found is None else found[0]


def _read(path: Path, reader: Callable[[Path], T]) -> tuple[T] | None:
    """Return the reader's result for the file, or for a copy of it, in a tuple.

    Returns None if the last process was killed and left too much to copy. Raises
    ``FileNotFoundError`` if the store does not exist, and ``StoreUnusable``.
    """
    try:
        with path.open("rb+") as file:  # opened as in a start, though nothing is written
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCK_BYTES, _LOCK_START)
        journals = [path.with_name(path.name + end) for end in _JOURNALS]
        left = [each for each in journals if each.exists() and each.stat().st_size]
    except FileNotFoundError:
        raise
    except BlockingIOError as error:
        raise StoreUnusable(
            f"the store {path} is in use by another process; stop that process, or give this one "
            "a data directory of its own"
        ) from error
    except OSError as error:
        raise StoreUnusable(
            f"cannot open the store {path}: {error.strerror}; see who owns it, or choose another "
            "directory with --data-dir"
        ) from error
    if not left:
        return (reader(path),)
    files = [path, *left]
    # The last changes of a killed process are in a journal, which opening the database would merge.
    if sum(each.stat().st_size for each in files) > _MOST_COPIED_BYTES:
        return None
    with TemporaryDirectory() as folder:
        try:
            copy, *_ = [Path(shutil.copy(each, folder)) for each in files]
        except OSError:  # no room
            return None
        _merge(path, copy)
        return (reader(copy),)


def _merge(path: Path, copy: Path) -> None:
    """Merge the copy's journal into it. Raises ``StoreUnusable``."""
    try:
        with closing(sqlite3.connect(copy)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise StoreUnusable(explain(path, error)) from error


def _read_file(path: Path, read: Path, reader: Callable[[sqlite3.Connection], T]) -> T:
    """Return the reader's result for ``read``: the store's file ``path``, or a copy of it.

    The store's own file is opened as immutable: SQLite then makes no files beside it, and reads no
    journal (it has none).
    """
    options = "mode=ro&immutable=1" if read == path else "mode=rw"
    try:
        connection = sqlite3.connect(f"{read.absolute().as_uri()}?{options}", uri=True)
        try:
            return reader(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreUnusable(explain(path, error)) from error


def _told(path: Path, read: Path) -> str:
    version = _read_file(path, read, _version)
    if version is None:
        return "it is empty, and the first start makes its tables"
    if version != VERSION:
        raise StoreUnusable(explain_version(path, version))
    found = check_file(read, limit_s=_CHECK_S)
    if found.state == "damaged":
        raise StoreUnusable(found.detail.replace(str(read), str(path)))
    return f"schema version {version}, {found.detail or found.state}"


def _is_made(connection: sqlite3.Connection) -> bool:
    tables = "SELECT 1 FROM sqlite_master WHERE name = 'meta'"
    return connection.execute(tables).fetchone() is not None


def _version(connection: sqlite3.Connection) -> object:
    """Return the version of the schema; None for an empty database."""
    if not _is_made(connection):
        return None
    row = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
    return row[0] if row else "none"


def _directories(connection: sqlite3.Connection) -> tuple[bytes, list[DirectoryRecord]] | None:
    if not _is_made(connection):
        return None
    (secret,) = connection.execute(SECRET).fetchone()
    rows = connection.execute("SELECT body FROM records WHERE type = 'directory'").fetchall()
    return secret, [msgspec.json.decode(body, type=DirectoryRecord) for (body,) in rows]
