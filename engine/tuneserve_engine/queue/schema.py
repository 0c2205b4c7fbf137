"""The SQLite file behind the store: its tables, and how it is opened."""

import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path

VERSION = 1
BUSY_S = 5.0  # a restarted process may meet the last breath of its predecessor
CHECKPOINT_PAGES = 4000  # 16 MB of WAL: with 100 KB payloads, one checkpoint per ~150 commits

# Payload and body are the last columns: reading the ones before never touches overflow pages.
# Rows of ended jobs stay as tombstones, so that a key is never executed twice.
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE lanes (model_id TEXT PRIMARY KEY, next INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE jobs (
        request_id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        scope TEXT NOT NULL,
        seq INTEGER NOT NULL,
        model_id TEXT,
        position INTEGER,
        state TEXT NOT NULL CHECK (state IN ('held', 'ready', 'done', 'expired')),
        release INTEGER NOT NULL,
        created_s REAL NOT NULL,
        finished_s REAL,
        category TEXT,
        error TEXT,
        content_type TEXT,
        payload BLOB,
        body BLOB,
        UNIQUE (tenant, scope, seq)
    )""",
    "CREATE INDEX jobs_ready ON jobs (release) WHERE state = 'ready'",
    "CREATE INDEX jobs_unfinished ON jobs (model_id) WHERE state IN ('held', 'ready')",
    "CREATE INDEX jobs_done ON jobs (finished_s) WHERE state = 'done'",
    "CREATE UNIQUE INDEX jobs_log ON jobs (model_id, position) WHERE position IS NOT NULL",
    """CREATE TABLE records (
        n INTEGER PRIMARY KEY AUTOINCREMENT,
        type TEXT NOT NULL,
        key TEXT NOT NULL,
        tenant TEXT NOT NULL,
        parent TEXT NOT NULL,
        body TEXT NOT NULL,
        UNIQUE (type, key)
    )""",
    "CREATE INDEX records_by_tenant ON records (type, tenant, n)",
    "CREATE INDEX records_by_parent ON records (type, parent, n)",
)


class StoreUnusable(Exception):
    """The store's file cannot be used; the message names the way out."""


def open_database(path: Path, trace: Callable[[str], None] | None = None) -> sqlite3.Connection:
    """The only connection to the store at ``path``, which is created if missing. It belongs to
    the calling thread. Raises ``StoreUnusable``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnusable(f"cannot open the store {path}: {error}; check the path") from error
    try:
        _configure(connection)
        _migrate(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise StoreUnusable(_explain(path, error)) from error
    except BaseException:
        connection.close()
        raise
    connection.set_trace_callback(trace)
    return connection


def _explain(path: Path, error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return (
            f"the store {path} is in use by another process (waited {BUSY_S:.0f} s for its lock); "
            "stop that process, or give this one a data directory of its own"
        )
    return f"cannot use the store {path}: {error}; restore a backup or choose another directory"


def _configure(connection: sqlite3.Connection) -> None:
    # Exclusive: releases of SQLite before 3.51.3 can corrupt a WAL database when two connections
    # write or checkpoint at once, and the Python at hand may link an old one.
    for pragma in (
        "locking_mode = EXCLUSIVE",
        "auto_vacuum = INCREMENTAL",
        "journal_mode = WAL",
        "synchronous = FULL",
        f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        "journal_size_limit = 67108864",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Leaves the tables of this version behind; refuses those of any other."""
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
        for statement in _TABLES:
            connection.execute(statement)
        start = {"version": VERSION, "secret": secrets.token_bytes(32), "epoch": 0, "release": 0}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", start.items())
    row = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
    connection.execute("COMMIT")
    found = row[0] if row else None
    if found != VERSION:
        raise StoreUnusable(
            f"the store {path} has schema version {found}, this release reads version {VERSION}; "
            "start the release that wrote it, or choose another data directory"
        )
