"""Names that clients send and that look like a misspelling of another."""

import difflib
from collections.abc import Collection

_LONGEST = 32  # a longer name resembles none, and comparing takes time quadratic in its length


def meant(name: str, known: Collection[str], *, close: float = 0.85) -> str | None:
    """Return the known name that this one seems to misspell; None if there is none.

    A name that was composed of a known one on purpose (``ref_logprobs``) misspells nothing.
    ``close`` is the least ratio of ``difflib``: "wieghts" is 0.86 from "weights", and "top_k" is
    0.8 from "top_p".
    """
    if len(name) > _LONGEST:
        return None
    spelt = name.lower().replace("-", "_").strip(" _")
    if any(f"_{each}_" in f"_{spelt}_" for each in known if each != spelt):
        return None
    swapped = (each for each in known if _is_swapped(spelt, each))
    resembling = difflib.get_close_matches(spelt, known, 1, close)
    return next(swapped, None) or next(iter(resembling), None)


def _is_swapped(name: str, known: str) -> bool:
    """Return whether two neighbouring letters are swapped, which counts in short names too."""
    if len(name) != len(known):
        return False
    at = [n for n, (one, other) in enumerate(zip(name, known, strict=True)) if one != other]
    return len(at) == 2 and at[1] == at[0] + 1 and sorted(name) == sorted(known)
