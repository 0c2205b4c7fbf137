"""Usage and storage in the SDK's form, against the usage that the server reports itself."""

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from tinker import types

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tests.server.routes.test_listings import save
from tuneserve_engine.core.records import ModelRecord, SessionRecord, Update

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures

HOUR = timedelta(hours=1)


def hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)


def midnight() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def window(start: datetime, end: datetime) -> str:
    """The query as the SDK makes it."""
    request = types.GetBillingUsageRequest(starting_on=start, ending_before=end)
    return urlencode(request.model_dump(mode="json", exclude_none=True))


async def events(
    api: Api, start: datetime, end: datetime, **options: Any
) -> types.BillingUsageResponse:
    answer = await api.get(f"/billing/usage/events?{window(start, end)}", **options)
    return types.BillingUsageResponse.model_validate(answer)


async def used(service: Any, bodies: Any, key: str = "tml-a") -> tuple[str, str]:
    """A session and its model, with a gradient over two tokens and a sample of three."""
    request = {"user_metadata": {"team": "red"}, "project_id": "p"}
    session = (await service.post("/create_session", request, key=key))["session_id"]
    model = await service.model(session, key=key)
    answer = await service.forward_backward(model, 1, key=key)
    await service.poll(answer["request_id"], key=key)
    sampler = await service.sampler(session, key=key)
    sampled = await service.post("/asample", bodies.asample(sampler, 0), key=key)
    await service.poll(sampled["request_id"], key=key)
    return session, model


async def test_tokens_are_reported_by_day_model_and_kind(service: Any, bodies: Any) -> None:
    session, _ = await used(service, bodies)
    start = midnight()
    found = await events(service, start, start + 24 * HOUR)
    total = (await service.get("/usage"))["total"]
    assert total["trained_tokens"] == 2 and total["sampled_tokens"] == 3  # by hand
    told = {each.event_info.type: each for each in found.data}
    counts = {kind: each.event_info.token_count for kind, each in told.items()}
    assert counts == {
        "training": 2,
        "sampling_sample": 3,
        "sampling_prefill": total["prompt_tokens"],
    }
    assert [each.event_info.token_count for each in found.data] == sorted(
        counts.values(), reverse=True
    )
    for each in found.data:
        assert (each.bucket_start, each.bucket_end) == (start, start + 24 * HOUR)
        assert each.base_model == "tuneserve/fake"
        assert each.user_id is not None and each.user_id.startswith("t-")
        assert each.estimated_cost_usd is None
    training, sample = told["training"], told["sampling_sample"]
    assert (training.session_id, training.project_id) == (session, "p")
    assert (sample.session_id, sample.project_id) == (None, None)
    assert found.sessions == {session: types.BillingUsageSession(user_metadata={"team": "red"})}


async def test_windows_side_by_side_count_each_token_once(service: Any, bodies: Any) -> None:
    await used(service, bodies)
    start = midnight()
    windows = [(start - 24 * HOUR, start), (start, start + HOUR), (start + HOUR, start + 24 * HOUR)]
    counts = []
    for first, last in windows:
        if first <= datetime.now(UTC):
            counts.append(len((await events(service, first, last)).data))
    assert counts[:2] == [0, 3] and sum(counts) == 3


async def test_usage_of_forgotten_models_stays(service: Any, bodies: Any) -> None:
    session, model = await used(service, bodies)
    store = service.services.store
    await store.delete_record(ModelRecord, model)
    await store.delete_record(SessionRecord, session)
    found = await events(service, midnight(), midnight() + 24 * HOUR)
    (training,) = (each for each in found.data if each.event_info.type == "training")
    assert (training.session_id, training.base_model) == (session, None)
    assert found.sessions == {}


async def test_a_wrong_window_is_refused(api: Any) -> None:
    now = hour(datetime.now(UTC))
    for start, end, reason in (
        (now - HOUR / 2, now, "full hours"),
        (now, now, "after starting_on"),
        (now, now - HOUR, "after starting_on"),
        (now - 15 * 24 * HOUR, now, "14 days"),
        (now + 2 * HOUR, now + 3 * HOUR, "in the future"),
    ):
        answer = await api.call("GET", f"/billing/usage/events?{window(start, end)}")
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
        assert reason in answer.json()["detail"]
    answer = await api.call("GET", "/billing/usage/events?starting_on=x&ending_before=y")
    assert answer.status_code == 422
    assert (await api.call("GET", "/billing/usage/events")).status_code == 422
    naive = "starting_on=2026-11-01T00:00:00&ending_before=2026-11-02T00:00:00"
    assert (await api.get(f"/billing/usage/events?{naive}"))["data"] == []


async def test_another_tenant_sees_nothing_and_an_admin_everything(
    service: Any, bodies: Any, operator: Operator, at_once: None
) -> None:
    key, other = await operator.key("alice"), await operator.key("bob")
    admin = await operator.key("operator", scopes=["admin"])
    _, model = await used(service, bodies, key=key)
    await service.result(
        await service.post("/save_weights", {"model_id": model, "seq_id": 2, "path": "a"}, key=key),
        key=key,
    )
    today = midnight(), midnight() + 24 * HOUR
    storage = "/billing/usage/checkpoints/current"
    assert (await events(service, *today, key=other)).data == []
    assert (await service.get(storage, key=other))["data"] == []
    for reader in (key, admin):
        seen = (await events(service, *today, key=reader)).data
        assert {each.user_id for each in seen} == {"alice"}
        kept = (await service.get(storage, key=reader))["data"]
        assert [each["org_user_urn"] for each in kept] == ["alice"]
    answer = await service.call("GET", storage, key="tml-nobody")
    assert answer.status_code == 401


async def test_checkpoints_are_counted_by_project(service: Any, bodies: Any) -> None:
    _, model = await used(service, bodies)
    loose = await service.model(await service.session())
    paths = [await save(service, model, seq, f"c{seq}") for seq in (2, 3)]
    paths.append(await save(service, loose, 1, "c"))
    sizes = {
        each["tinker_path"]: each["size_bytes"]
        for each in (await service.get("/checkpoints"))["checkpoints"]
    }
    path = "/billing/usage/checkpoints/current"
    answer = types.CurrentCheckpointStorageUsageResponse.model_validate(await service.get(path))
    found = {each.project_id: each for each in answer.data}
    assert set(found) == {"p", None}
    assert (found["p"].checkpoint_count, found[None].checkpoint_count) == (2, 1)
    assert found["p"].size_bytes == sizes[paths[0]] + sizes[paths[1]]
    assert found["p"].size_gigabytes == pytest.approx(found["p"].size_bytes / 1e9)
    assert answer.effective_rate_usd_per_gigabyte_month is None
    (only,) = (await service.get(f"{path}?project_id=p"))["data"]
    assert only["checkpoint_count"] == 2
    assert (await service.get(f"{path}?project_id=q"))["data"] == []
    expired = Update("checkpoint", paths[2], {"expires_s": 1.0})
    await service.services.store.update_record(expired)
    assert len((await service.get(path))["data"]) == 1
