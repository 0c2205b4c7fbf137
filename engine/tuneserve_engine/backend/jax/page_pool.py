"""Which page holds what: free ones, those that sequences use, and prompts that later requests may
share. Plain Python; the device's pages themselves are in ``pages``.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tuneserve_engine.backend.base import IntArray
from tuneserve_engine.lattice import ShapeLattice

_MOST_PAGES_PER_ROUND = 4
UNUSED_PAGE = 0
"""Belongs to no sequence: what idle rows and the padding of tables read and write."""


def pages_per_round(device_kind: str) -> int:
    """Pages that attention takes of every row together. What a round gathers should stay in a CPU's
    cache: four are 3 times as slow as one for 64 rows; elsewhere a round is a few launches."""
    return 1 if device_kind == "cpu" else _MOST_PAGES_PER_ROUND


def table_width(positions: int, page: int) -> int:
    """Entries of a sequence's table for so many positions: whole rounds, on any device."""
    return -(-positions // (page * _MOST_PAGES_PER_ROUND)) * _MOST_PAGES_PER_ROUND


def pages_of(lattice: ShapeLattice, lanes: int) -> int:
    """Pages with which every lane can be as long as the context, with a copy of its prompt's last
    part besides; and the unused one."""
    return lanes * (table_width(lattice.context_length, lattice.block) + 1) + 1


@dataclass
class Part:
    """A page of a prompt: the tokens of one part of it, after all parts before it."""

    digest: bytes
    page: int
    users: int = 0
    written: bool = False  # by a program that is on its way to the device, at least


class PagePool:
    """Hands out pages. A prompt's pages stay after their last user, until another page is needed:
    the least recently used go first."""

    def __init__(self, pages: int) -> None:
        """``pages`` are all that the device has, the unused one included."""
        self._free = deque(page for page in range(pages) if page != UNUSED_PAGE)
        self._parts: dict[bytes, Part] = {}
        self._idle: OrderedDict[bytes, Part] = OrderedDict()

    @property
    def room(self) -> int:
        """Pages that nobody uses."""
        return len(self._free) + len(self._idle)

    def reserve(self, digests: Sequence[bytes], own: int) -> tuple[list[Part], list[int]] | None:
        """The parts with these digests, shared with whoever uses them already, and so many pages of
        one's own; None if there are not enough."""
        missing = len(set(digests) - self._parts.keys())
        idle = sum(digest in self._idle for digest in set(digests))
        if missing + own > self.room - idle:
            return None
        for digest in digests:  # what is here is in use before a page is taken from what is not
            if digest in self._parts:
                self._idle.pop(digest, None)
                self._parts[digest].users += 1
        return [self._part(digest) for digest in digests], [self._page() for _ in range(own)]

    def release(self, parts: Sequence[Part], own: Sequence[int]) -> None:
        """Gives back what ``reserve`` gave. Parts that were never written are forgotten."""
        self._free.extend(own)
        for part in reversed(parts):  # of a chain, the last one is the first to go
            part.users -= 1
            if part.users:
                continue
            if part.written:
                self._idle[part.digest] = part
            else:
                del self._parts[part.digest]
                self._free.append(part.page)

    def _part(self, digest: bytes) -> Part:
        if digest not in self._parts:
            self._parts[digest] = Part(digest, self._page(), users=1)
        return self._parts[digest]

    def _page(self) -> int:
        if self._free:
            return self._free.popleft()
        digest, part = self._idle.popitem(last=False)
        del self._parts[digest]
        return part.page


def digests(scope: str, tokens: IntArray, size: int) -> list[bytes]:
    """Names of the prompt's parts of ``size`` tokens, the last one shorter: each of everything that
    its keys and values depend on, which is the weights and all tokens up to its end. ``scope``
    names the weights, and whose prompts they are."""
    found = []
    before = blake2b(scope.encode()).digest()
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size].astype("<i4").tobytes()
        before = blake2b(before + part).digest()
        found.append(before)
    return found
