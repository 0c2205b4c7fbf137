"""The time for which something has been among the files while a service was running.

The count is in the name of a note, ``.seen-<what>-<seconds>``, and grows by at most an hour
between two calls: neither time in which no service ran nor a jump of the clock counts.
"""

from collections.abc import Collection

from tuneserve_engine.store.files import FULL
from tuneserve_engine.store.files_base import Files

_SEEN = ".seen-"
_MOST_S = 3600


def served_s(files: Files, what: str) -> float:
    """Return the seconds since the first call, if there is a call every few seconds."""
    prefix = f"{_SEEN}{what}-"
    found = {int(text): age_s for text, age_s in files.notes(prefix).items() if text.isdecimal()}
    before = max(found, default=0)
    age_s = found.get(before, -1.0)
    if 0 <= age_s < _MOST_S:
        return before + age_s
    after = before + _MOST_S if age_s > 0 else before
    try:
        for each in found:
            if each != before or after == before:  # the clock was set back: this hour restarts
                files.remove_note(f"{prefix}{each}")
        files.leave_note(f"{prefix}{after}")
        if after != before:
            files.remove_note(f"{prefix}{before}")
    except OSError as error:
        if error.errno not in FULL:
            raise
        return float(before)
    return float(after)


def forget(files: Files, prefix: str, but: Collection[str] = ()) -> None:
    """Remove the counts whose names begin with the prefix, except the names in ``but``."""
    for text in files.notes(f"{_SEEN}{prefix}"):
        name = f"{prefix}{text}"
        if name.rpartition("-")[0] not in but:
            files.remove_note(f"{_SEEN}{name}")
