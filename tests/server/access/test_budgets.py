"""Budgets of device time a day."""

from datetime import UTC, datetime

import pytest

from tests.engine.store.contract.bench import INFO
from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.records import TenantRecord, Update
from tuneserve_engine.core.usage import DAY_S, Usage
from tuneserve_server.access.budgets import Budgets
from tuneserve_server.errors import BudgetUsedUp

pytestmark = pytest.mark.anyio


async def spent(store: MemoryStore, tenant: str, seconds: float, seq: int = 0) -> None:
    job = Job(tenant, JobKind.SAMPLE, "s:sample:0", seq, base_model="tiny")
    request = (await store.submit(job)).request_id
    epoch = (await store.lease("worker", "process", INFO)).epoch
    await store.finish(epoch, [Outcome(request, usage=Usage(seconds))])


async def test_a_budget_lasts_for_a_day() -> None:
    now_s = 10 * DAY_S + 3600
    store = MemoryStore(clock=lambda: now_s)
    budgets = Budgets(store, {"a": 5.0, "none": 0.0}, clock=lambda: now_s)
    await spent(store, "a", 4.0)
    await spent(store, "b", 400.0)
    for tenant in "ab":
        await budgets.check(tenant, JobKind.SAMPLE)
    await spent(store, "a", 2.5, seq=1)
    now_s += 2
    for kind in (JobKind.SAMPLE, JobKind.FORWARD_BACKWARD, JobKind.OPTIM_STEP):
        with pytest.raises(
            BudgetUsedUp, match=r"used 6\.5 device seconds today, .* is 5 a day; .* 00:00 UTC"
        ):
            await budgets.check("a", kind)
    await budgets.check("a", JobKind.SAVE_WEIGHTS)
    await budgets.check("b", JobKind.SAMPLE)
    with pytest.raises(BudgetUsedUp):
        await budgets.check("none", JobKind.SAMPLE)
    told = await budgets.told("a")
    assert told is not None
    assert (told.used_device_ms, told.limit_device_ms) == (6500.0, 5000.0)
    assert told.resets == datetime.fromtimestamp(11 * DAY_S, UTC)
    now_s += DAY_S
    await budgets.check("a", JobKind.SAMPLE)
    await store.close()


async def test_a_tenants_own_budget_overrides_the_setting_at_once() -> None:
    now_s = 10 * DAY_S
    store = MemoryStore(clock=lambda: now_s)
    budgets = Budgets(store, {"a": 100.0}, clock=lambda: now_s)
    for tenant in "ab":
        await spent(store, tenant, 4.0)
        await budgets.check(tenant, JobKind.SAMPLE)
        await store.put_new_record(TenantRecord(tenant, tenant, now_s, device_s_a_day=3.0))
    now_s += 1
    for tenant in "ab":
        with pytest.raises(BudgetUsedUp, match=r"used 4\.0 device seconds today, .* is 3 a"):
            await budgets.check(tenant, JobKind.SAMPLE)
        await store.update_record(Update("tenant", tenant, {"device_s_a_day": None}))
    now_s += 1
    for tenant, limit_ms in (("a", 100_000.0), ("b", None)):
        await budgets.check(tenant, JobKind.SAMPLE)
        told = await budgets.told(tenant)
        assert (told and told.limit_device_ms) == limit_ms
    await store.close()
