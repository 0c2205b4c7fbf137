"""The bookkeeping of KV pages: free pages, pages in use, and prompt pages that requests may share.

Plain Python; the device's pages themselves are in ``attention.paged``.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tuneserve_engine.backend.base import IntArray
from tuneserve_engine.backend.jax.attention.page_table import UNUSED_PAGE, table_width
from tuneserve_engine.core.shapes import StaticShapes


def most_pages(static_shapes: StaticShapes, slots: int) -> int:
    """Return the number of pages with which every decode slot can be as long as the context.

    Includes one more page per slot, for a copy of the last page of its prompt, and the unused page.
    """
    return slots * (table_width(static_shapes.context_length, static_shapes.block) + 1) + 1


def least_pages(static_shapes: StaticShapes) -> int:
    """Return the number of pages with which one decode slot can be as long as the context."""
    return most_pages(static_shapes, 1)


@dataclass
class PrefixPage:
    """A page of a prompt: the tokens of one part of it, given all parts before it."""

    digest: bytes
    page: int
    users: int = 0
    written: bool = False  # at least by a program that has been dispatched


class KvPageAllocator:
    """Hands out pages.

    A prompt's pages stay after their last user until another page is needed. Then the least
    recently used page is evicted first.
    """

    def __init__(self, pages: int) -> None:
        """Take over ``pages`` pages: all that the device has, the unused one included."""
        self._free = deque(page for page in range(pages) if page != UNUSED_PAGE)
        self._parts: dict[bytes, PrefixPage] = {}
        self._idle: OrderedDict[bytes, PrefixPage] = OrderedDict()

    @property
    def room(self) -> int:
        """The number of pages that are not in use."""
        return len(self._free) + len(self._idle)

    def reserve(
        self, prefix_hashes: Sequence[bytes], private_pages: int, *, spare: int = 0
    ) -> tuple[list[PrefixPage], list[int]] | None:
        """Reserve the prompt pages with these digests, and ``private_pages`` pages for this
        sequence alone.

        Prompt pages that exist are shared with the sequences that use them. Returns None if there
        are not enough pages to leave ``spare`` ones.
        """
        missing = len(set(prefix_hashes) - self._parts.keys())
        idle = sum(digest in self._idle for digest in set(prefix_hashes))
        if missing + private_pages + spare > self.room - idle:
            return None
        for (
            digest
        ) in prefix_hashes:  # pages that exist are in use before a page is evicted for others
            if digest in self._parts:
                self._idle.pop(digest, None)
                self._parts[digest].users += 1
        return [self._part(digest) for digest in prefix_hashes], [
            self._page() for _ in range(private_pages)
        ]

    def take_page(self) -> int | None:
        """Return another page for one sequence, or None if all are in use."""
        return self._page() if self.room else None

    def release(self, parts: Sequence[PrefixPage], private_pages: Sequence[int]) -> None:
        """Give back what ``reserve`` returned. Pages that were never written are forgotten."""
        self._free.extend(private_pages)
        for part in reversed(parts):  # the last part of a chain is evicted first
            part.users -= 1
            if part.users:
                continue
            if part.written:
                self._idle[part.digest] = part
            else:
                del self._parts[part.digest]
                self._free.append(part.page)

    def _part(self, digest: bytes) -> PrefixPage:
        if digest not in self._parts:
            self._parts[digest] = PrefixPage(digest, self._page(), users=1)
        return self._parts[digest]

    def _page(self) -> int:
        if self._free:
            return self._free.popleft()
        digest, part = self._idle.popitem(last=False)
        del self._parts[digest]
        return part.page


def prefix_hashes(scope: str, tokens: IntArray, size: int) -> list[bytes]:
    """Return a digest for each part of ``size`` tokens of the prompt; the last part is shorter.

    A digest covers everything that the part's keys and values depend on: the weights and all tokens
    up to the part's end. ``scope`` names the weights and the owner of the prompt.
    """
    found = []
    before = blake2b(scope.encode()).digest()
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size].astype("<i4").tobytes()
        before = blake2b(before + part).digest()
        found.append(before)
    return found
