"""The views of the dashboard, read from the store once a second for any number of viewers.

Viewers that may see all tenants share one view; each other tenant has a separate view.
"""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from tuneserve_client.runs import RunState
from tuneserve_engine.core.records import ModelRecord, SessionRecord
from tuneserve_engine.core.usage import TenantUsage, Totals
from tuneserve_engine.store.base import ServedModel, Store, StoreStats
from tuneserve_server.base_models import BaseModels
from tuneserve_server.dashboard.curves import Curve, CurveReader
from tuneserve_server.dashboard.run_states import RunStates
from tuneserve_server.dashboard.state import DashboardState, Rates, Run, TenantRow, WorkerShown
from tuneserve_server.errors import TooManyRequests
from tuneserve_server.ttl_cache import CachedQuery

K = TypeVar("K")
V = TypeVar("V")

MOST_RUNS = 24
MOST_VIEWERS, MOST_VIEWERS_OF_TENANT = 256, 16
TICK_S = 1.0
_STATS_S = 2.0
_USAGE_S = 3.0  # for all tenants, it is a sum over the day's models
_LISTED = 100  # models read; the most recently used are shown
_KEPT = 1024  # views, curves and names; a long curve takes 100 KB
_LONGEST_NAME = 80  # tenants choose the names, and each event holds them
_DEVICE_S = "device_s"


class Dashboard:
    """The views, their shared data, and the number of their viewers."""

    def __init__(
        self, store: Store, served: BaseModels, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._served = served
        self._clock = clock
        self._viewers: Counter[str] = Counter()
        self._views: OrderedDict[str | None, CachedQuery[DashboardState]] = OrderedDict()
        self._curves: OrderedDict[str, CurveReader[Curve]] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()
        self._worked = Rates(clock)
        self._states = RunStates(store, clock)
        self.stats = CachedQuery(lambda: store.stats(), _STATS_S, clock)

    @contextmanager
    def viewed(self, tenant: str) -> Iterator[None]:
        """Count a viewer during the block. Raises ``TooManyRequests`` if there are too many."""
        if self._viewers.total() >= MOST_VIEWERS:
            raise TooManyRequests(
                f"{MOST_VIEWERS} dashboards of this server are open, which is the limit; try again "
                "later",
                15,
            )
        if self._viewers[tenant] >= MOST_VIEWERS_OF_TENANT:
            raise TooManyRequests(
                f"you have {MOST_VIEWERS_OF_TENANT} dashboards open, which is the limit; close one",
                retry_after_s=15,
            )
        self._viewers[tenant] += 1
        try:
            yield
        finally:
            self._viewers[tenant] -= 1
            self._viewers += Counter()  # drops tenants without a viewer

    async def look(self, tenant: str | None) -> DashboardState:
        """Return the state of the tenant, or of all tenants for None, up to ``TICK_S`` old."""
        view = _kept(self._views, tenant, lambda: self._view(tenant))
        return await view.get()

    def _view(self, tenant: str | None) -> CachedQuery[DashboardState]:
        used = Rates(self._clock)

        async def ask_usage() -> Sequence[TenantUsage]:
            found = await self._store.usage(tenant, time.time())
            used.add_counters({each.tenant: {_DEVICE_S: each.total.device_s} for each in found})
            return found

        usage = CachedQuery(ask_usage, _USAGE_S, self._clock)
        shown_s: dict[str, float] = {}

        async def ask() -> DashboardState:
            nonlocal shown_s
            asked_s, stats = await self.stats.dated()
            totals = {each.tenant: each.total for each in await usage.get()}
            names = {*totals, *stats.unfinished} if tenant is None else {tenant}
            tenants = [_tenant(name, totals, stats, used) for name in names]
            tenants.sort(key=lambda each: (-each.device_s, each.name))
            runs, curves = await self._runs(tenant, stats, asked_s)
            shown_s = {each: shown_s.get(each, time.time()) for each in curves}
            look = DashboardState(runs, tenants, curves, shown_s)
            if tenant is not None:
                return look
            return replace(look, workers=self._workers(await self._served.known()), store=stats)

        return CachedQuery(ask, 0.9 * TICK_S, self._clock)

    async def _runs(
        self, tenant: str | None, stats: StoreStats, asked_s: float
    ) -> tuple[list[Run], dict[str, Curve]]:
        page = await self._store.page_of_records(ModelRecord, tenant=tenant, limit=_LISTED)
        used = sorted(page.items, key=lambda each: -each.last_request_s)[:MOST_RUNS]
        models = sorted(used, key=lambda each: -each.created_s)
        states = await self._states.states_of(models, stats)
        runs = [
            _run(model, await self._name(model.parent), state)
            for model, state in zip(models, states, strict=True)
        ]
        curves = {}
        for each in models:
            reading = _kept(self._curves, each.key, lambda: CurveReader(Curve(), self._clock))
            idle_s = -math.inf if stats.unfinished.get(each.tenant) else asked_s
            curves[each.key] = await reading.go_on(self._store, each, idle_s)
        return runs, curves

    async def _name(self, session_key: str) -> str:
        """Return the client's name of its session, which never changes."""
        if session_key not in self._names:
            session = await self._store.get_record(SessionRecord, session_key)
            self._names[session_key] = _short((session and session.display_name) or "")
        return _kept(self._names, session_key, str)

    def _workers(self, served: Sequence[ServedModel]) -> list[WorkerShown]:
        workers = {
            f"{model.info.name} {worker}": (model.info.name, worker, told)
            for model in served
            for worker, told in model.metrics.items()
        }
        self._worked.add_counters({key: _counters(told) for key, (_, _, told) in workers.items()})
        return [
            WorkerShown(name, base_model, told, self._worked.rates_of(key))
            for key, (base_model, name, told) in workers.items()
        ]


def _counters(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that only grow."""
    return {name: value for name, value in figures.items() if name.endswith("_total")}


def _kept(known: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """Return the value of the key, made if there is none; the least recently used is dropped."""
    if key not in known:
        known[key] = make()
    known.move_to_end(key)
    if len(known) > _KEPT:
        known.popitem(last=False)
    return known[key]


def _run(model: ModelRecord, session_name: str, state: RunState) -> Run:
    return Run(
        model_id=model.key,
        tenant=model.tenant,
        name=_short(model.user_metadata.get("name", "")) or session_name,
        base_model=model.base_model,
        rank=model.config.rank,
        adapter=model.config.kind,
        status=model.status.value,
        state=state,
        diverged=model.diverged,
        created_s=model.created_s,
        last_request_s=model.last_request_s,
    )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _tenant(name: str, totals: Mapping[str, Totals], stats: StoreStats, used: Rates) -> TenantRow:
    total = totals.get(name, Totals())
    return TenantRow(
        name=name,
        unfinished=stats.unfinished.get(name, 0),
        device_s=total.device_s,
        device_rate=used.rates_of(name).get(_DEVICE_S),
        trained_tokens=total.trained_tokens,
        sampled_tokens=total.sampled_tokens,
    )
