"""Costs shown to a tenant: sums, curves, request costs and budgets. Operators see more."""

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.store.contract.bench import INFO
from tests.support.memory_store import MemoryStore
from tuneserve_client.wire.types import CurveResponse, RequestResponse, UsageResponse
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.core.records import TenantRecord, Update
from tuneserve_engine.core.usage import Usage
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.access.budgets import Budgets
from tuneserve_server.errors import BudgetUsedUp
from tuneserve_server.store_metrics import StoreMetrics

pytestmark = pytest.mark.anyio

DAY_S = 86_400.0
A, B = open_tenant("tml-a"), open_tenant("tml-b")


async def trained(service: Any, key: str = "tml-a") -> tuple[str, list[str]]:
    """A model with two gradients, a step and a sample of the base model, and the requests."""
    session = await service.session(key=key)
    model = await service.model(session, key=key)
    answers = [await service.forward_backward(model, seq, (1, 2, 3, 4), key=key) for seq in (1, 2)]
    step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.5}}
    answers.append(await service.post("/optim_step", step, key=key))
    sampler = await service.sampler(session, key=key)
    answers.append(await service.post("/asample", sample(sampler, 0), key=key))
    requests = [each["request_id"] for each in answers]
    for each in requests:
        assert (await service.poll(each, key=key)).status_code == 200
    return model, requests


def sample(sampler: str, seq: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3, "seed": 7, "temperature": 1.0},
    }


# --- sums and curves ------------------------------------------------------------------------------


async def test_usage_is_summed_by_model(service: Any) -> None:
    model, _ = await trained(service)
    used = UsageResponse.model_validate(await service.get("/usage"))
    assert used.tenant == A
    by_name = {each.name: each for each in used.by_model}
    assert by_name.keys() == {model, "tuneserve/fake"}
    of_model, of_base = by_name[model], by_name["tuneserve/fake"]
    assert (of_model.requests, of_model.trained_tokens) == (4, 6)
    assert of_model.flops == 4 * 1000 * 6  # the fake base model has 1,000 parameters
    assert (of_base.requests, of_base.prompt_tokens, of_base.sampled_tokens) == (1, 2, 6)
    assert used.total.requests == 5
    assert used.total.device_ms == pytest.approx(of_model.device_ms + of_base.device_ms, abs=0.01)
    assert used.budget is None


async def test_usage_can_be_limited_to_the_last_days(service: Any) -> None:
    await trained(service)
    tomorrow = int(datetime.now(UTC).timestamp() + DAY_S)
    assert (await service.get(f"/usage?since={tomorrow}"))["total"]["requests"] == 0
    assert (await service.get(f"/usage?since={tomorrow - 2 * int(DAY_S)}"))["by_model"]
    assert (await service.call("GET", "/usage?since=-1")).status_code == 422


async def test_the_curve_of_a_run_has_its_losses_and_steps(service: Any) -> None:
    model, _ = await trained(service)
    path = f"/training_runs/{model}/curve"
    points = CurveResponse.model_validate(await service.get(path)).points
    assert [(each.kind, each.seq_id) for each in points] == [
        ("forward_backward", 1),
        ("forward_backward", 2),
        ("optim_step", 3),
    ]
    # The fake logprob of y after x is -(1 + (x + y) % 8) / 8, so the losses are 4, 6 and 8 eighths.
    assert (points[0].loss_sum, points[0].tokens, points[0].weight) == (18 / 8, 3, 3.0)
    assert (points[2].step, points[2].learning_rate) == (1, 0.5)
    assert points[2].grad_norm is not None and points[2].grad_norm > 0
    later = (await service.get(f"{path}?after=2"))["points"]
    assert [each["seq_id"] for each in later] == [3]
    assert "loss_sum" not in later[0]


# --- one request ----------------------------------------------------------------------------------


async def test_a_result_carries_its_request_cost_each_time(service: Any) -> None:
    _, requests = await trained(service)
    answers = [await service.poll(requests[0]) for _ in range(2)]
    assert answers[0].headers["Server-Timing"] == answers[1].headers["Server-Timing"]
    told = dict(
        re.findall(r"(\w+);dur=([0-9.]+)", answers[0].headers["Server-Timing"]),
    )
    times = {name: float(ms) for name, ms in told.items()}
    assert times.keys() == {"total", "held", "queue", "run", "pack", "device", "transfer"}
    assert times["pack"] + times["transfer"] <= times["run"] + 0.01
    assert times["device"] <= times["run"] + 0.01
    parts = times["held"] + times["queue"] + times["run"]
    assert parts >= times["total"] - 0.01  # the worker's clock and the store's may differ
    cost = dict(each.split("=") for each in answers[0].headers["X-Tuneserve-Cost"].split(", "))
    assert (cost["trained_tokens"], cost["padded_tokens"], cost["flops"]) == ("3", "13", "12000")


async def test_a_single_request_can_be_described(api: Any) -> None:
    session = await api.session()
    model = {"session_id": session, "model_seq_id": 0, "base_model": "tuneserve/fake"}
    request = (await api.post("/create_model", model))["request_id"]
    waiting = await api.get(f"/requests/{request}")
    assert waiting == {"request_id": request, "kind": "create_model", "status": "ready"}
    await api.start_worker()
    await api.poll(request)
    done = RequestResponse.model_validate(await api.get(f"/requests/{request}"))
    assert done.status == "done"
    assert done.timings is not None and done.timings.total_ms >= done.timings.run_ms
    assert done.cost is not None and done.cost.trained_tokens == 0


async def test_a_failed_request_is_described_as_failed(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    answer = await service.forward_backward(model, 1, (1, 999))
    await service.error(answer)
    found = await service.get(f"/requests/{answer['request_id']}")
    assert (found["kind"], found["status"]) == ("forward_backward", "failed")


# --- budgets --------------------------------------------------------------------------------------


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


async def test_a_tenant_with_a_spent_budget_is_refused_for_now_and_keeps_accepted_requests(
    service: Any, bodies: Any
) -> None:
    session = await service.session()
    model = await service.model(session)
    accepted = await service.forward_backward(model, 1)
    await service.poll(accepted["request_id"])
    services = service.services
    budgets = Budgets(services.store, {A: 1e-9})
    service.app.state.services = replace(services, budgets=budgets)
    body = bodies.forward_backward(model, 2)
    headers = {"Content-Type": "application/x-protobuf"}
    refused = await service.call("POST", "/forward_backward", content=body, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (402, "budget_spent")
    assert refused.headers["Retry-After"] == "30"
    assert await service.forward_backward(model, 1) == accepted  # a resend
    save = {"model_id": model, "seq_id": 2, "path": "kept"}
    assert "path" in await service.result(await service.post("/save_weights", save))
    other = await service.model(await service.session(key="tml-b"), key="tml-b")
    await service.forward_backward(other, 1, key="tml-b")
    told = (await service.get("/usage"))["budget"]
    assert told["used_device_ms"] >= told["limit_device_ms"]


# --- metrics --------------------------------------------------------------------------------------


async def scraped(api: Any) -> dict[str, dict[tuple[str, ...], float]]:
    text = (await api.http.get("/metrics")).text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            found.setdefault(each.name, {})[tuple(each.labels.values())] = each.value
    return found


async def test_requests_are_counted_by_route_and_status(service: Any) -> None:
    model, _ = await trained(service)
    await service.call("GET", f"/training_runs/{model}")
    await service.call("GET", f"/training_runs/{model}", key="tml-b")
    await service.http.get("/no/such/path")
    await service.http.request("BREW", "/no/such/path")
    await service.http.request("BREW", "/api/v1/create_session")
    found = await scraped(service)
    counted = found["tuneserve_http_requests_total"]
    route = "/api/v1/training_runs/{model_id}"
    assert (counted["GET", route, "200"], counted["GET", route, "404"]) == (1, 1)
    assert counted["POST", "/api/v1/forward_backward", "200"] == 2
    assert counted["none", "none", "404"] == 2
    assert counted["none", "/api/v1/create_session", "405"] == 1
    assert found["tuneserve_http_request_duration_seconds_count"]["GET", route] == 2


async def test_a_request_that_raises_is_counted_as_a_500(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api.services.store, "usage", broken)
    with pytest.raises(ZeroDivisionError):
        await api.call("GET", "/usage")
    counted = (await scraped(api))["tuneserve_http_requests_total"]
    assert counted["GET", "/api/v1/usage", "500"] == 1


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
