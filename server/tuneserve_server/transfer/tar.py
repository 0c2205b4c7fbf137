"""The reading in place of a tar archive with the two files of a PEFT adapter.

Nothing is unpacked, so a name in the archive cannot lead to another path.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tuneserve_server.errors import Malformed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_BLOCK = tarfile.BLOCKSIZE
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE)  # times to the nanosecond, for example; skipped
_MOST_EXTENDED_BYTES = 64 * 1024
_MOST_HEADERS = 16
_HOW = f"send exactly these two: tar -cf - -C FOLDER {CONFIG} {WEIGHTS}"


@dataclass(frozen=True)
class Member:
    """A file in the archive: its start and its size in bytes."""

    start: int
    size: int


def members(archive: Path) -> dict[str, Member]:
    """Return both files by name. Raises ``Malformed`` for any other content."""
    found: dict[str, Member] = {}
    total = archive.stat().st_size
    with archive.open("rb") as file:
        for _ in range(_MOST_HEADERS):
            info = _header(file)
            if info is None:
                break
            start = file.tell()
            if info.size < 0 or start + info.size > total:
                raise Malformed(
                    f"the archive has {total} bytes and should have {start + info.size} or more: "
                    "it was cut; send all of it"
                )
            if info.type not in _EXTENDED:
                _check(info, found)
                found[_plain(info.name)] = Member(start, info.size)
            elif info.size > _MOST_EXTENDED_BYTES:
                raise Malformed(
                    f"an extended header of the archive has {info.size} bytes; the limit is "
                    f"{_MOST_EXTENDED_BYTES}; {_HOW}"
                )
            file.seek(start + -(-info.size // _BLOCK) * _BLOCK)
        else:
            raise Malformed(f"the archive has more than {_MOST_HEADERS} headers; {_HOW}")
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in found]:
        raise Malformed(f"the archive has no {missing[0]}; {_HOW}")
    return found


def _header(file: BinaryIO) -> tarfile.TarInfo | None:
    """Return the next header, or None at the archive's end."""
    block = file.read(_BLOCK)
    if not block or not any(block):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise Malformed(f"the body is not a tar archive ({error}); {_HOW}") from None


def _check(info: tarfile.TarInfo, found: dict[str, Member]) -> None:
    name = _plain(info.name)
    if name not in (CONFIG, WEIGHTS) or name in found:
        raise Malformed(
            f"the archive has {name[:100]!r}; it may hold only two files, each once, and no "
            f"pickled weights (.bin, .pt): {_HOW}"
        )
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise Malformed(
            f"{name} in the archive is a link or another special file, not a regular one; {_HOW}"
        )


def _plain(name: str) -> str:
    return name.removeprefix("./")
