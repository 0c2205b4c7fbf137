"""The disk room that is kept for accepted work (``min_free_bytes``)."""

import errno
import shutil
from pathlib import Path


def check_room(folder: Path, size: int, min_free_bytes: int) -> None:
    """Raise ``OSError`` if a write of ``size`` bytes would leave less than ``min_free_bytes`` free.

    The folder need not exist yet. A ``min_free_bytes`` of 0 turns the check off.
    """
    if not min_free_bytes:
        return
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if free - size < min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"it has {size} bytes, and the server's disk has {free} left, of which "
            f"{min_free_bytes} are kept for work that was accepted (min_free_bytes)",
        )
