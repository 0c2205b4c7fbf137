"""The Prometheus metrics of the store's load and of the tenants' usage."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tuneserve_engine.store.base import Store, StoreStats
from tuneserve_server.metric_names import PREFIX, STORE_METRICS, TENANT_METRICS

MOST_TENANTS = 200
OTHERS = "others"
"""The label of all tenants that appear after the first ``MOST_TENANTS``."""

_FRESH_S = 5.0


class StoreMetrics:
    """The store's metrics, read no more than once every five seconds.

    A tenant with its own label keeps the label while this process lives, so that no counter falls.
    """

    def __init__(
        self, store: Store, *, tenants: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._tenants = tenants
        self._clock = clock
        self._named: set[str] = set()
        self._asked_s = -float("inf")
        self._metrics: list[Metric] = []

    async def metrics(self) -> list[Metric]:
        if self._clock() - self._asked_s >= _FRESH_S:
            stats = await self._store.stats()
            self._metrics = list(_of_store(stats))
            if self._tenants:
                used = {each.tenant: each.total.device_s for each in await self._store.usage()}
                self._metrics += self._of_tenants(used, stats.unfinished)
            self._asked_s = self._clock()
        return self._metrics

    def _of_tenants(
        self, used: Mapping[str, float], unfinished: Mapping[str, int]
    ) -> Iterable[Metric]:
        values = (used, unfinished)
        for (name, meaning), of in zip(TENANT_METRICS.items(), values, strict=True):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"{PREFIX}{name}", meaning, labels=["tenant"])
            shown: dict[str, float] = {}
            for tenant, value in of.items():
                label = self._label(tenant)
                shown[label] = shown.get(label, 0.0) + value
            for label, value in shown.items():
                metric.add_metric([label], value)
            yield metric

    def _label(self, tenant: str) -> str:
        if len(self._named) < MOST_TENANTS:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHERS


def _of_store(stats: StoreStats) -> Iterable[Metric]:
    values = (sum(stats.unfinished.values()), stats.logged, stats.points)
    for (name, meaning), value in zip(STORE_METRICS.items(), values, strict=True):
        yield GaugeMetricFamily(f"{PREFIX}{name}", meaning, value=value)
