"""The memory that arriving requests take, limited in total and for each tenant.

A request waits for its share for a while. Shares are granted in order, first to the tenant that
holds the least, so that a flood of one tenant waits and the next request of another does not.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

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
    number: int
    """The waiter's place in the order of arrival."""
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
        # By tenant, in the order of arrival: finding the next of a thousand waiters must be cheap.
        self._waiting: dict[str, dict[_Waiter, None]] = {}
        self._numbers = count()
        self._look: asyncio.TimerHandle | None = None

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
        loop = asyncio.get_running_loop()
        waiter = _Waiter(share, next(self._numbers), loop.create_future())
        self._waiting.setdefault(share.tenant, {})[waiter] = None
        self._grant()
        try:
            if not waiter.granted.done():
                self._look_later()
                await asyncio.wait([waiter.granted], timeout=self._wait_s)
                if not waiter.granted.done():
                    raise self._crowded(share.tenant, share.size)
        except BaseException:
            if waiter.granted.done():
                self._live.discard(share)
                self._add(share, -share.size)
            else:
                self._remove(waiter)
            self._grant()
            raise

    def _remove(self, waiter: _Waiter) -> None:
        waiting = self._waiting[waiter.share.tenant]
        del waiting[waiter]
        if not waiting:
            del self._waiting[waiter.share.tenant]

    def _look_later(self) -> None:
        if self._look is None and self._waiting:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._end_slow)

    def _end_slow(self) -> None:
        """End a slow request for each waiting tenant, of a tenant that holds more than it."""
        self._look = None
        ending = [share for share in self._live if share.yields is not None]
        ending.sort(key=lambda each: -self._of[each.tenant])
        for tenant in self._waiting:
            for share in ending:
                if self._of[share.tenant] <= self._of[tenant]:
                    break
                if share.yields is not None and share.yields():
                    break
        self._look_later()

    def _grant(self) -> None:
        while (waiter := self._next()) is not None:
            self._remove(waiter)
            self._live.add(waiter.share)
            self._add(waiter.share, waiter.share.size)
            waiter.granted.set_result(None)

    def _next(self) -> _Waiter | None:
        """Return the first waiter of the tenant that holds the least, if its share fits.

        A tenant over its own limit is skipped. A large share is not passed over forever: while its
        waiter is next, no other waiter is granted memory.
        """
        first = (next(iter(waiting)) for waiting in self._waiting.values())
        fit = [each for each in first if self._fits_tenant(each.share)]
        if not fit:
            return None
        least = min(fit, key=lambda each: (self._of[each.share.tenant], each.number))
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
