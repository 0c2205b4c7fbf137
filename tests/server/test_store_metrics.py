"""The metrics of the store's load and of tenants."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.server.access.test_budgets import spent
from tests.server.http.test_metrics import scraped
from tests.server.routes.test_usage import A, B, trained
from tests.support.memory_store import MemoryStore
from tuneserve_server.store_metrics import StoreMetrics

pytestmark = pytest.mark.anyio


async def test_the_store_reports_its_fill_level_and_tenants_are_not_shown(service: Any) -> None:
    await trained(service)
    found = await scraped(service)
    assert found["tuneserve_store_unfinished_requests"] == {(): 0}
    assert found["tuneserve_store_logged_requests"] == {(): 4}
    assert found["tuneserve_store_recovery_points"] == {(): 0}
    assert not [name for name in found if "tenant" in name]


async def test_tenants_are_shown_if_the_operator_enables_it(service: Any) -> None:
    services = service.services
    shown = StoreMetrics(services.store, tenants=True)
    service.app.state.services = replace(services, store_metrics=shown)
    await asyncio.gather(trained(service), trained(service, "tml-b"))
    found = await scraped(service)
    seconds = found["tuneserve_tenant_device_seconds_total"]
    assert seconds.keys() == {(A,), (B,)}
    used = (await service.get("/usage"))["total"]["device_ms"]
    assert seconds[A,] == pytest.approx(used / 1000, abs=1e-5)


async def test_tenants_beyond_the_first_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve_server.store_metrics.MOST_TENANTS", 2)
    now_s = 0.0
    store = MemoryStore()
    shown = StoreMetrics(store, tenants=True, clock=lambda: now_s)
    seconds = []
    for seq, (tenant, used) in enumerate([("b", 1.0), ("c", 2.0), ("a", 4.0), ("d", 8.0)]):
        await spent(store, tenant, used, seq)
        now_s += 10
        metrics = {each.name: each for each in await shown.metrics()}
        samples = metrics["tuneserve_tenant_device_seconds"].samples
        seconds.append({each.labels["tenant"]: each.value for each in samples})
    assert seconds[1:] == [
        {"b": 1.0, "c": 2.0},
        {"others": 4.0, "b": 1.0, "c": 2.0},
        {"others": 12.0, "b": 1.0, "c": 2.0},
    ]
    await store.close()
