"""What went wrong of late, for those who look at the live page. Of this process, while it lives."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

MOST_TENANTS = 256
MOST_OF_TENANT = 20
"""One who fails all the time pushes only its own errors out."""
_LONGEST = 600


@dataclass(frozen=True)
class RecentError:
    """An error that a tenant was told, ``count`` times, last at ``time_s``."""

    tenant: str  # empty for one that happened before it was known who asked
    code: str
    text: str
    where: str  # a route, or what an accepted request gave: result, stream
    time_s: float
    count: int = 1


class RecentErrors:
    """The newest errors of each tenant; one that comes again is counted, not listed again."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of: OrderedDict[str, OrderedDict[tuple[str, str, str], RecentError]] = OrderedDict()

    def note(self, tenant: str, code: str, text: str, where: str) -> None:
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        own = self._of.setdefault(tenant, OrderedDict())
        self._of.move_to_end(tenant)
        key = (code, text, where)
        known = own.pop(key, RecentError(tenant, code, text, where, 0.0, 0))
        own[key] = replace(known, time_s=self._clock(), count=known.count + 1)
        if len(own) > MOST_OF_TENANT:
            own.popitem(last=False)
        if len(self._of) > MOST_TENANTS:
            self._of.popitem(last=False)

    def newest(self, tenant: str | None, limit: int) -> list[RecentError]:
        """The tenant's, or everybody's, newest first."""
        names = list(self._of) if tenant is None else [tenant]
        found = [error for name in names if name in self._of for error in self._of[name].values()]
        return sorted(found, key=lambda each: -each.time_s)[:limit]
