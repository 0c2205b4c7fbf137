"""The recent errors of this process, kept in memory for the dashboard."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

MOST_TENANTS = 256
MOST_OF_TENANT = 20
"""The errors kept of one tenant, so that a tenant that fails often displaces only its own."""
_LONGEST = 600


@dataclass(frozen=True)
class RecentError:
    """An error that a tenant received ``count`` times, last at ``time_s``."""

    tenant: str  # empty for an error before the caller was known
    code: str
    text: str
    where: str  # a route, or for an accepted request its answer: result, stream
    time_s: float
    count: int = 1


class RecentErrors:
    """The newest errors of each tenant; a repeated error is counted, not listed again."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of: OrderedDict[str, OrderedDict[tuple[str, str, str], RecentError]] = OrderedDict()

    def record_error(self, tenant: str, code: str, text: str, where: str) -> None:
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
        """Return the errors of one tenant, or of all tenants for None, newest first."""
        names = list(self._of) if tenant is None else [tenant]
        found = [error for name in names if name in self._of for error in self._of[name].values()]
        return sorted(found, key=lambda each: -each.time_s)[:limit]
