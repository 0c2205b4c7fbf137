"""Names that clients send and that look like a misspelling of another."""

import difflib
from collections.abc import Collection

_CLOSE = 0.85  # one letter swapped, left out or put in; "top_k" is 0.8 from "top_p"
_LONGEST = 32  # a longer name resembles none, and comparing takes time quadratic in its length


def meant(name: str, known: Collection[str]) -> str | None:
    """Return the known name that this one seems to misspell; None if there is none.

    A name that was composed of a known one on purpose (``ref_logprobs``) misspells nothing.
    """
    if len(name) > _LONGEST:
        return None
    spelt = name.lower().replace("-", "_").strip(" _")
    if any(f"_{each}_" in f"_{spelt}_" for each in known if each != spelt):
        return None
    return next(iter(difflib.get_close_matches(spelt, known, 1, _CLOSE)), None)
