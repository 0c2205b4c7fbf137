"""The memory that arriving requests take, limited in total and for each tenant.

A request waits for its share for a while. Shares are granted in order, first to the tenant that
holds the least, so that a flood of one tenant waits and the next request of another does not.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tuneserve_server.errors import BodyTooLarge, TooManyRequests

WAIT_S = 15.0
"""The longest wait for a share; clients give up after a minute, so a retry is better."""

_RETRY_S = 2
_LOOK_S = 1.0  # the pause between searches for a slow body while a request waits


@dataclass
class Limit:
    """A number of bytes, and the setting that it comes from."""

    size: int
    setting: str


@dataclass(eq=False)
class Share:
    """The bytes that a tenant holds for one request.

    ``yields`` may give them up early for a waiting tenant: it ends the request and returns True, or
    returns False if the request is fast enough.
    """

    tenant: str
    size: int
    yields: Callable[[], bool] | None = None


@dataclass(frozen=True, eq=False)
class _Waiter:
    share: Share
    granted: asyncio.Future[None]


class Shares:
    """The shares of one kind of memory. ``what`` completes "the memory for ..."."""

    def __init__(
        self, what: str, *, total: Limit, of_tenant: Limit, wait_s: float = WAIT_S
    ) -> None:
        self._what = what
        self._total = total
        self._most_of_tenant = Limit(min(of_tenant.size, total.size), of_tenant.setting)
        self._wait_s = wait_s
        self._of: Counter[str] = Counter()
        self._live: set[Share] = set()
        self._waiting: list[_Waiter] = []  # in the order in which they came

    @property
    def held(self) -> int:
        """The bytes that all tenants hold now."""
        return self._of.total()

    def held_by(self, tenant: str) -> int:
        return self._of[tenant]

    @property
    def most(self) -> int:
        """The size of the largest possible share, in bytes."""
        return self._most_of_tenant.size

    @asynccontextmanager
    async def taken(self, tenant: str, size: int) -> AsyncIterator[Share]:
        """Hold ``size`` bytes for as long as the block lasts.

        Raises ``TooManyRequests`` if the bytes are not free within the time, and ``BodyTooLarge``
        if one tenant may never have so many.
        """
        share = Share(tenant, size)
        await self._take(share)
        try:
            yield share
        finally:
            self._live.discard(share)
            self._add(share, -share.size)
            self._grant()

    async def _take(self, share: Share) -> None:
        self._check_size(share.size)
        waiter = _Waiter(share, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            await self._granted(waiter)
        except BaseException:
            if waiter.granted.done():
                self._live.discard(share)
                self._add(share, -share.size)
            else:
                self._waiting.remove(waiter)
            self._grant()
            raise

    async def _granted(self, waiter: _Waiter) -> None:
        """Wait for the share; meanwhile slow requests of tenants that hold more are ended."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._wait_s
        while not waiter.granted.done():
            left_s = until_s - loop.time()
            if left_s <= 0:
                raise self._crowded(waiter.share.tenant, waiter.share.size)
            await asyncio.wait([waiter.granted], timeout=min(left_s, _LOOK_S))
            if not waiter.granted.done():
                self._press(waiter.share.tenant)

    def _press(self, tenant: str) -> None:
        """End one slow request of a tenant that holds more than this tenant."""
        for share in sorted(self._live, key=lambda each: -self._of[each.tenant]):
            if self._of[share.tenant] <= self._of[tenant]:
                return
            if share.yields is not None and share.yields():
                return

    def _grant(self) -> None:
        while (waiter := self._next()) is not None:
            self._waiting.remove(waiter)
            self._live.add(waiter.share)
            self._add(waiter.share, waiter.share.size)
            waiter.granted.set_result(None)

    def _next(self) -> _Waiter | None:
        """Return the first waiter of the tenant that holds the least, if its share fits.

        A tenant over its own limit is skipped. A large share is not passed over forever: while its
        waiter is next, no other waiter is granted memory.
        """
        first: dict[str, _Waiter] = {}
        for waiter in self._waiting:
            first.setdefault(waiter.share.tenant, waiter)
        fit = [each for each in first.values() if self._fits_tenant(each.share)]
        if not fit:
            return None
        least = min(fit, key=lambda each: self._of[each.share.tenant])
        return least if self.held + least.share.size <= self._total.size else None

    def _fits_tenant(self, share: Share) -> bool:
        return self._of[share.tenant] + share.size <= self.most

    def _add(self, share: Share, size: int) -> None:
        self._of[share.tenant] += size
        if not self._of[share.tenant]:
            del self._of[share.tenant]

    def _check_size(self, size: int) -> None:
        if size > self.most:
            raise BodyTooLarge(
                f"this request would take {size} bytes of the memory for {self._what}, of which "
                f"one tenant may have {self.most} ({self._most_of_tenant.setting}); send less at "
                "once"
            )

    def _crowded(self, tenant: str, size: int) -> TooManyRequests:
        own = self._of[tenant]
        if own + size > self.most:
            held = f"your requests hold {own} of the {self.most} bytes that one tenant may have"
            setting = self._most_of_tenant.setting
        else:
            held = f"requests hold {self.held} of {self._total.size} bytes"
            setting = self._total.setting
        return TooManyRequests(
            f"the memory for {self._what} is in use: {held} ({setting}), and this request needs "
            f"{size} more; nothing was accepted; send it again when other requests have been read",
            _RETRY_S,
        )
