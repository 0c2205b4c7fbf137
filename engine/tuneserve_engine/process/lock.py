"""The lock for one worker per name and data directory, held for as long as the worker lives."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

from tuneserve_engine.process.permissions import make_folder, open_new

_PAUSE_S = 0.05


def lock_name(directory: Path, name: str, *, timeout_s: float) -> IO[bytes]:
    """Return the open lock file, once no other process holds it.

    Closing the file releases the lock, and so does the end of the process, however it ends. Waits
    for up to ``timeout_s``, because a restarted worker may meet its dying predecessor. Then raises
    ``OSError``, because two workers of one name would take the lease from each other for ever.
    """
    give_up_s = time.monotonic() + timeout_s
    while True:
        file = _opened(directory, name)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            if time.monotonic() > give_up_s:
                raise OSError(
                    f"another worker named {name} is running on the data directory {directory} "
                    f"(waited {timeout_s:g} s for it to end); stop it, or give this one a name of "
                    "its own with --worker-name"
                ) from error
            time.sleep(_PAUSE_S)
        else:
            if _is_there(file):
                return file
            file.close()


def _opened(directory: Path, name: str) -> IO[bytes]:
    try:
        make_folder(directory)
        return open_new(directory / f"{quote(name, safe='')}.lock")
    except OSError as error:
        raise OSError(
            f"cannot use the data directory {directory}: {error.strerror}; choose another with "
            "--data-dir"
        ) from error


def _is_there(file: IO[bytes]) -> bool:
    """Return whether the file still exists under its name: its holder may have deleted it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False
