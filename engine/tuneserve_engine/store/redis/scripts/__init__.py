"""The store's steps in Redis: one Lua script each, atomic as every script is.

A file starts with comment lines. ``flags:`` are Redis' own: ``no-writes`` for a script that only
reads, ``allow-oom`` for a script that must run when the memory is full, because it ends jobs or
frees memory. ``uses:`` names the libraries that are put before the script, after ``base``.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Script:
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script of a step, with the libraries that it uses."""
    source = _read(name)
    flags = _header(source, "flags")
    parts = [_read(each) for each in ("base", *_header(source, "uses"))]
    text = "\n".join([f"#!lua flags={','.join(flags)}", *parts, source])
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return files(__name__).joinpath(f"{name}.lua").read_text()


def _header(source: str, name: str) -> list[str]:
    """Return the words behind ``-- name:`` in the first two lines."""
    for line in source.splitlines()[:2]:
        if line.startswith(f"-- {name}: "):
            return line.removeprefix(f"-- {name}: ").split()
    return []
