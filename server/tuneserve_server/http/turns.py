"""A lock that tenants take by turns, so that a flood of one tenant does not hold up another."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock that passes to the waiting tenant whose turn was longest ago."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns

    @asynccontextmanager
    async def wait_for_turn(self, tenant: str) -> AsyncIterator[None]:
        await self._take(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, tenant: str) -> None:
        if not self._taken:
            self._taken = True
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the lock was passed on at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, own = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            first = own.popleft()
            if own:
                self._waiting[tenant] = own
            if not first.done():  # done: its waiter was cancelled
                first.set_result(None)
                return
        self._taken = False
