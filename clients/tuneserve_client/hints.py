"""The hint to a known name for an unknown one."""

import difflib
from collections.abc import Collection


def hint(name: str, known: Collection[str]) -> str:
    """Return the nearest known name as a question, or else the list of all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
