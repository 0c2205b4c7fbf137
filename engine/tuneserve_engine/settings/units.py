"""Sizes and durations as people write them: ``80GB``, ``1.5GiB``, ``15m``, ``1h30m``."""

import re

from pydantic import ByteSize, TypeAdapter, ValidationError

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhd])")
_BYTES = TypeAdapter(ByteSize)


def bytes_of(text: str) -> int:
    """Return the number of bytes in a text such as ``1048576``, ``80GB`` (10⁹) or ``80GiB`` (2³⁰).

    Raises ``ValueError`` for any other text.
    """
    try:
        return int(_BYTES.validate_python(text.strip()))
    except ValidationError:
        raise ValueError(
            "input should be a valid number of bytes, or a size such as 512MiB, 80GB or 1.5TB"
        ) from None


def seconds_of(text: str) -> float:
    """Return the seconds in a text such as ``90``, ``1.5s``, ``15m`` or ``1h30m``.

    Raises ``ValueError`` for any other text.
    """
    parts = _PART.findall(text)
    if parts and not _PART.sub("", text).strip():
        return sum(float(count) * _SECONDS[unit] for count, unit in parts)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            "input should be a valid number of seconds, or a duration such as 90s, 15m or 1h30m"
        ) from None


def plain(name: str, text: str) -> str | int | float:
    """Return the value of a setting whose name ends in ``_bytes`` or ``_s`` as a number.

    Any other setting keeps its text.
    """
    if name.endswith("_bytes"):
        return bytes_of(text)
    return seconds_of(text) if name.endswith("_s") else text
