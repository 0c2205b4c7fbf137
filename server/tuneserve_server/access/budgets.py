"""The budgets of device time that tenants may use in a day (UTC)."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tuneserve_client.wire import types
from tuneserve_engine.core.jobs import JobKind
from tuneserve_engine.core.records import TenantRecord
from tuneserve_engine.core.usage import DAY_S, day_of
from tuneserve_engine.store.base import Store
from tuneserve_server.errors import BudgetUsedUp

SPENDING = frozenset({JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP, JobKind.SAMPLE})
"""The requests refused over budget. A tenant over its budget can still save and load."""

_FRESH_S = 1.0
_MOST_KNOWN = 10_000


@dataclass(frozen=True)
class _Budget:
    """The limit of a tenant (None if it has no limit) and its usage, at one moment."""

    asked_s: float
    limit_s: float | None
    used_s: float


class Budgets:
    """The budgets of tenants, in device seconds a day.

    A tenant's budget in the store, which the operator can change at any time, overrides the
    settings. Accepted requests still run when the budget is used up, so a tenant may exceed it.
    """

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
        self._known: OrderedDict[str, _Budget] = OrderedDict()

    async def check(self, tenant: str, kind: JobKind) -> None:
        """Raise ``BudgetUsedUp`` if the tenant has used its budget up.

        Asks the store no more than once a second.
        """
        if kind not in SPENDING:
            return
        budget = await self._budget(tenant)
        if budget.limit_s is not None and budget.used_s >= budget.limit_s:
            raise BudgetUsedUp(
                f"you have used {budget.used_s:.1f} device seconds today, and your budget is "
                f"{budget.limit_s:g} a day; nothing was accepted; the next day begins at "
                f"{self._resets():%H:%M} UTC: send this again then, or ask the operator for more "
                "(tuneserve tenants set NAME --device-s-a-day)"
            )

    async def told(self, tenant: str) -> types.BudgetResponse | None:
        """Return the tenant's budget, or None if it has none."""
        budget = await self._budget(tenant)
        if budget.limit_s is None:
            return None
        return types.BudgetResponse(
            limit_device_ms=1000 * budget.limit_s,
            used_device_ms=round(1000 * budget.used_s, 3),
            resets=self._resets(),
        )

    async def _budget(self, tenant: str) -> _Budget:
        now_s = self._clock()
        known = self._known.get(tenant)
        if known is not None and now_s - known.asked_s < _FRESH_S:
            return known
        own = await self._store.get_record(TenantRecord, tenant)
        limit_s = self._limits_s.get(tenant)
        if own is not None and own.device_s_a_day is not None:
            limit_s = own.device_s_a_day
        used = [] if limit_s is None else await self._store.usage(tenant, now_s)
        read = _Budget(now_s, limit_s, sum(each.total.device_s for each in used))
        self._known[tenant] = read
        self._known.move_to_end(tenant)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return read

    def _resets(self) -> datetime:
        return datetime.fromtimestamp((day_of(self._clock()) + 1) * DAY_S, UTC)
