"""The integrity check of a SQLite store's file, in a process of its own.

    python -m tuneserve_engine.store.sqlite.integrity FILE

prints each problem on a line, or nothing. A process of its own can be ended at any time, does not
slow down the interpreter that answers requests, and can close its file without releasing the
store's lock (fcntl(2)). The check reads the file as it was at the last checkpoint: the store makes
one before the check, and none while the check runs.

``PRAGMA integrity_check`` is ``quick_check`` plus a check that every index has every row: a damaged
index hides requests that are there. 840 MB took 1.8 s, and 1.2 s without the indices.
"""

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from tuneserve_engine.store.base import Soundness

logger = logging.getLogger(__name__)

MOST_WAL_BYTES = 2**28
"""The most bytes that the store may write during a check: all of them stay in its log."""

_MOST_LINES = 5
_LOOK_S = 0.25
_NICE = 10
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_corruption(error: sqlite3.Error) -> bool:
    """Return whether SQLite found the file damaged, rather than full, locked or out of reach."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


def damaged(path: Path, found: str) -> Soundness:
    """Return the condition of a damaged file, with instructions for the operator."""
    return Soundness(
        "damaged",
        f"the store {path} is damaged ({found}): stop the service, keep a copy of the file, and "
        "restore store.db and the files from one backup; without a backup, sqlite3 store.db "
        "'.recover' saves what can be read",
    )


def check_file(path: Path, *, limit_s: float) -> Soundness:
    """Check a store that no process has open, and that has no journal."""
    try:
        ran = subprocess.run(_command(path), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Soundness("unchecked", f"its check did not end within {limit_s:g} s")
    return _found(path, ran.returncode, ran.stdout, ran.stderr)


async def check_open_file(path: Path, *, limit_s: float) -> Soundness:
    """Check a store that this process has open, and that makes no checkpoint meanwhile.

    Gives up when the store's log becomes too long without a checkpoint, or after ``limit_s``.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_command(path), stdout=pipe, stderr=pipe)
    answer = asyncio.ensure_future(process.communicate())
    began_s, why = time.monotonic(), ""
    try:
        while not why and not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
            if time.monotonic() - began_s > limit_s:
                why = f"its check did not end within {limit_s:g} s (store_check_s)"
            elif _size(path.with_name(f"{path.name}-wal")) > MOST_WAL_BYTES:
                why = f"{MOST_WAL_BYTES} bytes were written during its check"
        if why:
            return Soundness("unchecked", why)
        out, errors = answer.result()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(asyncio.CancelledError):
                await answer
    assert process.returncode is not None
    return _found(path, process.returncode, out.decode(), errors.decode())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "tuneserve_engine.store.sqlite.integrity", str(path.absolute())]


def _found(path: Path, status: int, out: str, errors: str) -> Soundness:
    if status != 0:
        said = (errors.strip().splitlines() or ["it said nothing"])[-1]
        return Soundness("unchecked", f"its check ended with status {status}: {said}")
    if out.strip():
        return damaged(path, "; ".join(out.strip().splitlines()))
    return Soundness("sound")


def main() -> int:
    os.nice(_NICE)  # requests go first
    print("\n".join(problems(Path(sys.argv[1]))))
    return 0


def problems(path: Path) -> list[str]:
    """Return the first problems of the file, one per line.

    Do not call this for a file that this process has open.
    """
    address = f"{path.as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            rows = connection.execute(f"PRAGMA integrity_check({_MOST_LINES})").fetchall()
        lines = [line for (text,) in rows if text != "ok" for line in text.splitlines()]
    except sqlite3.DatabaseError as error:
        if not is_corruption(error):
            raise
        lines = [str(error)]
    return lines[:_MOST_LINES]


if __name__ == "__main__":
    sys.exit(main())
