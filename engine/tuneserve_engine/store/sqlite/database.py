"""The SQLite database file of the store: how it is opened, configured and held for a check."""

import re
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tuneserve_engine.process.permissions import make_folder, open_new
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.sqlite.schema import ensure_tables

BUSY_S = 5.0  # a restarted process may have to wait until its predecessor has ended
CHECKPOINT_PAGES = 4000  # 16 MB of WAL: with 100 KB payloads, one checkpoint per ~150 commits
LOG_BYTES = 32 + (CHECKPOINT_PAGES + 1000) * 4120  # a checkpoint may come up to 1000 pages late

NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs ncpfs afs ceph lustre beegfs davfs fuse.sshfs fuse.s3fs fuse.gcsfuse "
    "fuse.rclone fuse.glusterfs fuse.ceph fuse.davfs fuse.smbnetfs".split()
)
_INCREMENTAL = 2  # value of the pragma auto_vacuum
_MOUNTS = Path("/proc/self/mounts")


def open_database(
    path: Path, trace: Callable[[str], None] | None = None, *, for_check: bool = False
) -> sqlite3.Connection:
    """Open the only connection to the store at ``path``, which is created if missing.

    The connection belongs to the calling thread. With ``for_check``, the file stays unchanged until
    ``write_into_file``. Raises ``StoreUnusable``.
    """
    _check_local(path)
    try:
        make_folder(path.parent)
        if not path.exists():
            open_new(path, "ab").close()
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnusable(f"cannot open the store {path}: {error}; check the path") from error
    try:
        _configure(connection)
        ensure_tables(connection, path)
        if for_check:
            _hold_file(connection)
    except sqlite3.Error as error:
        connection.close()
        raise StoreUnusable(explain(path, error)) from error
    except BaseException:
        connection.close()
        raise
    connection.set_trace_callback(trace)
    return connection


def _check_local(path: Path) -> None:
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:  # not Linux
        return
    if kind := network_file_system(path.resolve(), mounts):
        raise StoreUnusable(
            f"the store {path} is on a network file system ({kind}), where neither its lock nor "
            "its fsync can be relied on; put the data directory on a local disk, or keep the store "
            "in Redis"
        )


def network_file_system(path: Path, mounts: str) -> str | None:
    """Return the kind of network file system that ``path`` is on; None for any other file system.

    ``path`` is absolute and without links; ``mounts`` is in the format of ``/proc/self/mounts``.
    """
    kind, depth = "", 0
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        escaped = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1])
        point = Path(escaped)
        if path.is_relative_to(point) and len(point.parts) >= depth:  # the last one hides others
            kind, depth = fields[2], len(point.parts)
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def explain(path: Path, error: sqlite3.Error) -> str:
    """Return why the store at ``path`` cannot be opened, and what to do."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return (
            f"the store {path} is in use by another process (waited {BUSY_S:.0f} s for its lock); "
            "stop that process, or give this one a data directory of its own"
        )
    return f"cannot use the store {path}: {error}; restore a backup or choose another directory"


def _configure(connection: sqlite3.Connection) -> None:
    # Exclusive: releases of SQLite before 3.51.3 can corrupt a WAL database when two connections
    # write or checkpoint at once, and the Python at hand may link an old one.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
    if connection.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
        # Only if needed: the pragma writes, and an old store has to open on a full disk.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL").fetchall()
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        f"wal_autocheckpoint = {CHECKPOINT_PAGES}",  # see ``write_into_file``
        f"journal_size_limit = {LOG_BYTES}",
        "temp_store = MEMORY",  # the disk may be full
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()


def _hold_file(connection: sqlite3.Connection) -> None:
    """Write all commits so far into the file, and hold the file: it does not change after that.

    If writing fails, for example on a full disk, the file is incomplete and is not held. While the
    file is held, the log grows beyond ``LOG_BYTES``.
    """
    with suppress(sqlite3.Error):
        busy, logged, written = connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        if not busy and logged == written:
            connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()


def is_held(connection: sqlite3.Connection) -> bool:
    """Return whether the file is held, so that it can be checked."""
    found: tuple[int] = connection.execute("PRAGMA wal_autocheckpoint").fetchone()
    return found == (0,)


def write_into_file(connection: sqlite3.Connection) -> bool:
    """Let SQLite write commits from the log into the file again, now and then.

    Returns whether the file was held until now.
    """
    was_held = is_held(connection)
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}").fetchall()
    return was_held
