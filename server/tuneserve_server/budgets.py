"""Budgets: what tenants may use of the device in a day, in UTC."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from tuneserve_client import types
from tuneserve_engine.jobs import JobKind
from tuneserve_engine.queue.base import Store
from tuneserve_engine.usage import DAY_S, day_of
from tuneserve_server.errors import BudgetSpent

SPENDING = frozenset({JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP, JobKind.SAMPLE})
"""What is refused. Who has nothing left can still save what it has, and load it."""

_FRESH_S = 1.0


class Budgets:
    """Device seconds a day of those tenants that have a budget. What runs when it is spent ends, so
    that a tenant may pass it by what it had accepted."""

    def __init__(
        self,
        store: Store,
        limits_s: Mapping[str, float],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._limits_s = limits_s
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}  # when it was asked, and the answer

    async def check(self, tenant: str, kind: JobKind) -> None:
        """Raises ``BudgetSpent``. Asks the store at most once a second."""
        limit_s = self._limits_s.get(tenant)
        if limit_s is None or kind not in SPENDING:
            return
        used_s = await self._used_s(tenant)
        if used_s >= limit_s:
            raise BudgetSpent(
                f"you have used {used_s:.1f} device seconds today, of {limit_s:g} that you have a "
                f"day; nothing was accepted; the next day begins at {self._resets():%H:%M} UTC: "
                "send this again then, or ask the operator for more (tenant_budgets)"
            )

    async def told(self, tenant: str) -> types.BudgetResponse | None:
        """The tenant's budget, if it has one."""
        if tenant not in self._limits_s:
            return None
        return types.BudgetResponse(
            limit_device_ms=1000 * self._limits_s[tenant],
            used_device_ms=round(1000 * await self._used_s(tenant), 3),
            resets=self._resets(),
        )

    async def _used_s(self, tenant: str) -> float:
        now_s = self._clock()
        asked_s, used_s = self._used.get(tenant, (-float("inf"), 0.0))
        if now_s - asked_s >= _FRESH_S:
            used_s = sum(each.total.device_s for each in await self._store.usage(tenant, now_s))
            self._used[tenant] = now_s, used_s
        return used_s

    def _resets(self) -> datetime:
        return datetime.fromtimestamp((day_of(self._clock()) + 1) * DAY_S, UTC)
