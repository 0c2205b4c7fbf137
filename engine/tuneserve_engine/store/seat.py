"""The seat of a store: a text that identifies its place, and that a copy of it does not share."""

import hashlib
import os
from pathlib import Path


def seat_of(path: Path) -> str:
    """Return the seat of a store in a file; it changes if the file is moved, copied or restored."""
    real = path.resolve()
    return seat_named(f"{real}:{os.statvfs(real).f_fsid}:{real.stat().st_ino}")


def seat_named(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
