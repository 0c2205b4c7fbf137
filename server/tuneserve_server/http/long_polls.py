"""Waiting requests, most of them polls for a result, which all end when the process stops."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class LongPolls:
    """The waiting polls: each waits up to its limit, and ``release`` ends all at once."""

    def __init__(self) -> None:
        self._parked: set[asyncio.Timeout] = set()
        self._released = False
        self._of_tenant: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant: str) -> Iterator[int]:
        """Count a poll of the tenant during the block; yield the count with this poll."""
        self._of_tenant[tenant] += 1
        try:
            yield self._of_tenant[tenant]
        finally:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    async def hold(self, waiting: Awaitable[T], hold_s: float) -> T | None:
        """Return the result of ``waiting``, or None after ``hold_s`` seconds or ``release``."""
        try:
            async with asyncio.timeout(0 if self._released else hold_s) as limit:
                self._parked.add(limit)
                try:
                    return await waiting
                finally:
                    self._parked.discard(limit)
        except TimeoutError:
            return None

    def release(self) -> None:
        """End every poll, later ones included, so that the server can stop."""
        self._released = True
        now_s = asyncio.get_running_loop().time()
        for limit in self._parked:
            limit.reschedule(now_s)

    async def pause(self, pause_s: float) -> None:
        """Wait for ``pause_s`` seconds, or until the process stops."""
        await self.hold(asyncio.sleep(pause_s), pause_s)
