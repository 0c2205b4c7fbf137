"""The permissions of the service's files (0600) and folders (0700), whatever the umask.

If API processes and workers of different users share a directory of files (``group_access``), the
group can access checkpoints, recovery points and decompositions too: 0660 and 2770.
"""

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

logger = logging.getLogger(__name__)

FILE, FOLDER = 0o600, 0o700
_GROUP_FILE, _GROUP_FOLDER = 0o660, 0o2770  # new files in such a folder get its group
_INTERRUPTION_SHARE = 0o077

_is_shared = False


def share_with_group(is_shared: bool) -> None:
    """Set whether the group has access to this process's files. Call it before any write."""
    global _is_shared
    _is_shared = is_shared


def shared(made: int | Path, mode: int) -> None:
    """Give the group access to a new file (``FILE``) or folder (``FOLDER``) if files are shared."""
    if _is_shared:
        os.chmod(made, _GROUP_FILE if mode == FILE else _GROUP_FOLDER)


def open_new(path: Path, mode: str = "wb") -> BinaryIO:
    """Open the file to write. A new file is accessible to this user alone."""
    return cast(BinaryIO, open(path, mode, opener=lambda name, how: os.open(name, how, FILE)))


def open_shared(path: Path, mode: str = "wb") -> BinaryIO:
    """Open the file to write, accessible to the group too if files are shared."""
    file = open_new(path, mode)
    shared(file.fileno(), FILE)
    return file


def make_folder(path: Path, *, is_shared: bool = False) -> None:
    """Make the folder and its missing parents; existing folders stay as they are."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(FOLDER, exist_ok=True)
            if is_shared:
                shared(each, FOLDER)


def narrow(folders: Iterable[Path]) -> None:
    """Remove the access of other users to these folders, which earlier releases granted."""
    narrowed, failed = [], []
    for folder in folders:
        try:
            found = folder.lstat()
            mode = stat.S_IMODE(found.st_mode)
            if stat.S_ISDIR(found.st_mode) and mode & _INTERRUPTION_SHARE:
                folder.chmod(mode & ~_INTERRUPTION_SHARE)
                narrowed.append(folder)
        except FileNotFoundError:
            continue
        except OSError as error:  # another user's folder
            failed.append(error)
    if narrowed:
        logger.info(
            "took the access of others from %d folders, the first is %s", len(narrowed), narrowed[0]
        )
    if failed:
        logger.warning("%d folders stay open to others, the first: %s", len(failed), failed[0])


def open_to(folder: Path) -> str:
    """Return the folder's permissions in digits if group or others have any; else ''."""
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError:
        return ""
    return f"{mode:04o}" if mode & _INTERRUPTION_SHARE else ""
