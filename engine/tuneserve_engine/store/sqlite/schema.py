"""The tables of the store's SQLite database."""

import secrets
import sqlite3
from pathlib import Path

from tuneserve_engine.store.errors import StoreUnusable

VERSION = 4
SECRET = "SELECT value FROM meta WHERE name = 'secret'"

# Worded as in the indices below, so that SQLite uses these.
UNFINISHED = "state IN ('held', 'ready')"
# Neither replay nor a lane that has yet to pass the position needs such a job.
FORGETTABLE = "state = 'expired' AND digest IS NULL AND (position IS NULL OR release > 0)"

_COMPLETED = (
    "CREATE INDEX jobs_completed ON jobs (tenant, scope, seq / 1000000000, completion) "
    "WHERE completion IS NOT NULL"
)

# Points are read from a position on, and mostly there are few behind it.
_CURVE_ORDER = (
    "CREATE INDEX IF NOT EXISTS curve_points_in_order ON curve_points (model_id, position)"
)

# Recordings of samples, for training. The bodies have a table of their own, because a recording's
# row changes whenever it is used. The row of a dropped recording stays for a while, and says why it
# was dropped. These tables have no version of their own, like the column trace.
_RECORDINGS = (
    """CREATE TABLE IF NOT EXISTS recordings (
        n INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        scope TEXT NOT NULL,
        seq INTEGER NOT NULL,
        session TEXT NOT NULL,
        size INTEGER NOT NULL,
        used_s REAL NOT NULL,
        gone TEXT,
        UNIQUE (tenant, scope, seq)
    )""",
    "CREATE INDEX IF NOT EXISTS recordings_kept ON recordings (used_s) WHERE gone IS NULL",
    "CREATE INDEX IF NOT EXISTS recordings_of ON recordings (tenant, used_s) WHERE gone IS NULL",
    "CREATE INDEX IF NOT EXISTS recordings_gone ON recordings (used_s) WHERE gone IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS recordings_by_session ON recordings (session, used_s) "
    "WHERE gone IS NULL",
    """CREATE TABLE IF NOT EXISTS recorded (
        recording INTEGER PRIMARY KEY,
        body BLOB NOT NULL
    )""",
)

# The workers with their speeds. Those that earlier releases wrote have none.
SPEEDS = (
    "SELECT workers.*, IFNULL(speeds.speed, 1.0) AS speed FROM workers LEFT JOIN speeds "
    "USING (epoch)"
)
IS_OPEN = "(json_extract(body, '$.ended') IS NULL)"
LAST_SEEN = "json_extract(body, '$.last_seen_s')"
EXPIRES = "json_extract(body, '$.expires_s')"
SIZE = "json_extract(body, '$.size_bytes')"
IS_SAVE = (
    "type = 'sampler' AND json_extract(body, '$.file_id') IS NOT NULL "
    "AND json_extract(body, '$.model_path') IS NULL"
)
SAVES = "records INDEXED BY unnamed_saves"  # by itself, the planner reads every sampler
SAVING = f"kind = 'save_weights' AND {UNFINISHED}"

# The sweep and the limits read these indices instead of every record's JSON. Earlier releases have
# only the tables; a release that does not know an index keeps it up to date all the same.
_INDICES = (
    _CURVE_ORDER,
    f"CREATE INDEX IF NOT EXISTS sessions_by_sign ON records ({IS_OPEN}, {LAST_SEEN}) "
    "WHERE type = 'session'",
    f"CREATE INDEX IF NOT EXISTS sessions_of_tenant ON records (tenant, {IS_OPEN}) "
    "WHERE type = 'session'",
    f"CREATE INDEX IF NOT EXISTS checkpoints_by_expiry ON records ({EXPIRES}) "
    "WHERE type = 'checkpoint'",
    f"CREATE INDEX IF NOT EXISTS unnamed_saves ON records (tenant) WHERE {IS_SAVE}",
    f"CREATE INDEX IF NOT EXISTS jobs_saving ON jobs (tenant, saves) WHERE {SAVING}",
)

_USAGE = (
    # Sums by day (days since 1970 in UTC) and name (of a model, or of a base model).
    """CREATE TABLE usage (
        tenant TEXT NOT NULL,
        day INTEGER NOT NULL,
        name TEXT NOT NULL,
        requests INTEGER NOT NULL,
        device_s REAL NOT NULL,
        trained_tokens INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        padded_tokens INTEGER NOT NULL,
        flops REAL NOT NULL,
        PRIMARY KEY (tenant, day, name)
    ) WITHOUT ROWID""",
    # The number of points of each kind so far, and the points that are kept, by number.
    """CREATE TABLE curves (
        model_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        points INTEGER NOT NULL,
        PRIMARY KEY (model_id, kind)
    ) WITHOUT ROWID""",
    """CREATE TABLE curve_points (
        model_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        n INTEGER NOT NULL,
        position INTEGER NOT NULL,
        point TEXT NOT NULL,
        PRIMARY KEY (model_id, kind, n)
    ) WITHOUT ROWID""",
)

# Files that the store no longer names: the row that named the file is gone, so the file may be
# deleted at once. For other unused files the reason is not known. Triggers note these files, so
# that no statement can forget to. "INSERT OR IGNORE" does not work in a trigger: the conflict
# clause of the statement that fires it counts. The table has no version of its own, like the
# column trace.
_NAMERS = "('checkpoint', 'sampler')"
_RELEASE = "INSERT INTO released SELECT {id} WHERE {id} NOT IN (SELECT file_id FROM released)"
_RELEASE_OF_RECORD = _RELEASE.format(id="json_extract(OLD.body, '$.file_id')")
_RELEASED = (
    "CREATE TABLE IF NOT EXISTS released (file_id TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TRIGGER IF NOT EXISTS point_released AFTER DELETE ON points BEGIN "
    f"{_RELEASE.format(id='OLD.file_id')}; END",
    "CREATE TRIGGER IF NOT EXISTS record_released AFTER DELETE ON records "
    f"WHEN OLD.type IN {_NAMERS} AND json_extract(OLD.body, '$.file_id') IS NOT NULL BEGIN "
    f"{_RELEASE_OF_RECORD}; END",
    "CREATE TRIGGER IF NOT EXISTS record_renamed AFTER UPDATE OF body ON records "
    f"WHEN OLD.type IN {_NAMERS} AND json_extract(OLD.body, '$.file_id') IS NOT NULL "
    "AND json_extract(OLD.body, '$.file_id') IS NOT json_extract(NEW.body, '$.file_id') BEGIN "
    f"{_RELEASE_OF_RECORD}; END",
)

# How fast the workers train, relative to each other; 0: they only sample. The table has no version
# of its own, like the column trace.
_SPEEDS = ("CREATE TABLE IF NOT EXISTS speeds (epoch INTEGER PRIMARY KEY, speed REAL NOT NULL)",)

# The unfinished sequences of each sampling session with a snapshot, and the worker that has the
# snapshot for them. Like the table above, it has no version.
_SAMPLING = (
    "CREATE TABLE IF NOT EXISTS sampling (scope TEXT PRIMARY KEY, sequences INTEGER NOT NULL, "
    "worker INTEGER) WITHOUT ROWID",
)

# A release that does not know the counts of sequences does not keep them.
_RECOUNT = (
    "UPDATE sampling SET sequences = (SELECT IFNULL(SUM(sequences), 0) FROM jobs "
    f"WHERE jobs.scope = sampling.scope AND kind = 'sample' AND {UNFINISHED})",
    "DELETE FROM sampling WHERE sequences <= 0",
    "UPDATE workers SET samples = (SELECT IFNULL(SUM(IFNULL(sequences, 1)), 0) FROM jobs "
    "WHERE worker = epoch AND state = 'ready' AND kind = 'sample')",
)

# Rows of ended jobs stay for a while as tombstones, so that a key is not executed twice. Payloads
# have a table of their own: a job's row changes several times, and would be written with its
# payload each time. A body is written once, in the last column: reading the columns before it never
# touches overflow pages.
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    # Unfinished jobs and their bytes, kept up to date so that a limit costs no scan.
    """CREATE TABLE counts (
        scope TEXT PRIMARY KEY,
        jobs INTEGER NOT NULL,
        bytes INTEGER NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE workers (
        epoch INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        base_model TEXT NOT NULL,
        samples INTEGER NOT NULL,
        seen_s REAL NOT NULL
    )""",
    *_SPEEDS,
    *_SAMPLING,
    # seen_s is for workers that are gone; a worker with a lease has its own in its row of workers.
    """CREATE TABLE served (
        base_model TEXT PRIMARY KEY,
        seen_s REAL NOT NULL,
        info TEXT NOT NULL
    ) WITHOUT ROWID""",
    # One per model: its next position in its log, its worker's epoch, its share of the counts.
    """CREATE TABLE lanes (
        model_id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        base_model TEXT NOT NULL,
        next INTEGER NOT NULL,
        worker INTEGER,
        park INTEGER NOT NULL,
        jobs INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        requested_s REAL NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX lanes_placed ON lanes (worker) WHERE worker IS NOT NULL",
    "CREATE INDEX lanes_in_use ON lanes (tenant) WHERE worker IS NOT NULL OR jobs > 0",
    # digest and halvings are set while the payload is kept for replay. release is 0 until the lane
    # comes to the position; a job that ended before that loses its position then. completion counts
    # samples as they end, until their clients have acknowledged them. usage is the job's cost, once
    # its worker has reported it. trace is the span that submitted the job, absent without tracing.
    # saves is the estimated size in bytes of the file of a save; sequences are those of a sample.
    """CREATE TABLE jobs (
        n INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        scope TEXT NOT NULL,
        seq INTEGER NOT NULL,
        model_id TEXT,
        position INTEGER,
        base_model TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('held', 'ready', 'done', 'expired')),
        worker INTEGER,
        release INTEGER NOT NULL,
        attempts INTEGER NOT NULL,
        size INTEGER NOT NULL,
        created_s REAL NOT NULL,
        finished_s REAL,
        digest BLOB,
        halvings INTEGER,
        trace TEXT,
        saves INTEGER,
        sequences INTEGER,
        completion INTEGER,
        usage TEXT,
        category TEXT,
        error TEXT,
        content_type TEXT,
        body BLOB,
        UNIQUE (tenant, scope, seq)
    )""",
    "CREATE INDEX jobs_ready ON jobs (worker, release) WHERE state = 'ready'",
    f"CREATE INDEX jobs_unfinished ON jobs (model_id, state) WHERE {UNFINISHED}",
    f"CREATE INDEX jobs_sampling ON jobs (scope) WHERE kind = 'sample' AND {UNFINISHED}",
    "CREATE INDEX jobs_done ON jobs (finished_s) WHERE state = 'done'",
    f"CREATE INDEX jobs_expired ON jobs (finished_s) WHERE {FORGETTABLE}",
    "CREATE UNIQUE INDEX jobs_log ON jobs (model_id, position) WHERE position IS NOT NULL",
    "CREATE INDEX jobs_kept ON jobs (model_id, position) WHERE digest IS NOT NULL",
    _COMPLETED,
    """CREATE INDEX jobs_loads ON jobs (model_id)
        WHERE kind = 'load_weights' AND digest IS NOT NULL""",
    "CREATE TABLE payloads (job INTEGER PRIMARY KEY, payload BLOB NOT NULL)",
    """CREATE TABLE points (
        n INTEGER PRIMARY KEY AUTOINCREMENT,
        model_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        file_id TEXT NOT NULL,
        numerics_id TEXT NOT NULL
    )""",
    "CREATE INDEX points_by_model ON points (model_id, n)",
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
    *_USAGE,
    *_RELEASED,
    *_RECORDINGS,
    *_INDICES,
)

_ADDED = {"trace": "TEXT", "saves": "INTEGER", "sequences": "INTEGER"}
"""Columns of ``jobs`` without a version of their own: a release that does not know one works with
it, so that going back stays possible (docs/adr/0022)."""


def create_tables(connection: sqlite3.Connection, secret: bytes) -> None:
    """Make an empty database a store."""
    for statement in _TABLES:
        connection.execute(statement)
    start = {"version": VERSION, "secret": secret, "epoch": 0, "release": 0, "completion": 0}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", start.items())


def _columns_of_jobs(connection: sqlite3.Connection) -> set[str]:
    return {name for _, name, *_ in connection.execute("PRAGMA table_info(jobs)")}


def ensure_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of an empty database; add to a store what has no version of its own.

    Raises ``StoreUnusable`` for a store of another version.
    """
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
        create_tables(connection, secrets.token_bytes(32))
    row = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
    found = row[0] if row else None
    if found == VERSION:
        known = _columns_of_jobs(connection)
        for name, kind in _ADDED.items():
            if name not in known:
                connection.execute(f"ALTER TABLE jobs ADD COLUMN {name} {kind}")
        for statement in (*_INDICES, *_RELEASED, *_RECORDINGS, *_SPEEDS, *_SAMPLING, *_RECOUNT):
            connection.execute(statement)
    connection.execute("COMMIT")
    if found != VERSION:
        raise StoreUnusable(explain_version(path, found))


def explain_version(path: Path, found: object) -> str:
    return (
        f"the store {path} has schema version {found}, this release reads version {VERSION}; "
        "start the release that wrote it, or choose another data directory"
    )
