"""Costs shown to a tenant: sums, curves, request costs and budgets. Operators see more."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tuneserve_client.wire.run_types import CurveResponse
from tuneserve_client.wire.types import RequestResponse, UsageResponse
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.access.budgets import Budgets

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
