"""Sessions: limits on their number, rate and size, and their retention."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tuneserve_engine.core.records import SessionRecord
from tuneserve_server.access.limits import DiskGuard
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    return ApiSettings(
        data_dir=tmp_path,
        base_model_name="tuneserve/fake",
        poll_s=0.2,
        max_tenant_sessions=3,
        max_server_sessions=5,
        max_tenant_sessions_a_minute=6,
        max_tenant_samplers_a_minute=2,
        max_session_metadata_bytes=1000,
    )


async def create(api: Any, key: str = "tml-a", **fields: Any) -> httpx.Response:
    request = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", **fields}
    response: httpx.Response = await api.call("POST", "/create_session", json=request, key=key)
    return response


async def finish(api: Any, session_id: str) -> None:
    await api.post(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}})


def put_off(response: httpx.Response, below: int = 31) -> str:
    assert (response.status_code, response.json()["code"]) == (429, "overloaded"), response.text
    assert 1 <= int(response.headers["retry-after"]) < below
    detail: str = response.json()["detail"]
    return detail


async def test_tenants_and_the_server_have_limits_of_open_sessions(api: Any) -> None:
    sessions = [(await create(api)).json()["session_id"] for _ in range(3)]
    assert "your key has 3 sessions" in put_off(await create(api))
    for _ in range(2):
        assert (await create(api, key="tml-b")).status_code == 200
    assert "the server has 5 sessions" in put_off(await create(api, key="tml-c"))
    await finish(api, sessions[0])
    assert (await create(api)).status_code == 200


async def test_sessions_that_ended_count_for_a_minute(api: Any) -> None:
    for _ in range(6):
        await finish(api, (await create(api)).json()["session_id"])
    detail = put_off(await create(api), below=61)
    assert "you created 6 sessions within a minute" in detail and "send this again in" in detail
    assert (await create(api, key="tml-b")).status_code == 200


async def test_a_resent_session_is_the_same_even_at_the_limit(api: Any) -> None:
    headers = {"X-Idempotency-Key": "one"}
    request = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    first = await api.post("/create_session", request, headers=headers)
    for _ in range(2):
        assert (await create(api)).status_code == 200
    assert await api.post("/create_session", request, headers=headers) == first


@pytest.mark.parametrize(
    "fields",
    [
        {"user_metadata": {"about": "x" * 990}},
        {"user_metadata": {"about": "\U0001f600" * 250}},  # four bytes each
        {"tags": ["x" * 200] * 5},
        {"display_name": "x" * 1000},
    ],
)
async def test_the_texts_of_a_session_have_a_limit_of_bytes(
    api: Any, fields: dict[str, Any]
) -> None:
    refused = await create(api, **fields)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert "the limit is 1000 (max_session_metadata_bytes)" in refused.json()["detail"]
    assert (await create(api, user_metadata={"about": "x" * 980})).status_code == 200


async def test_a_tenant_creates_a_limited_number_of_sampling_sessions_a_minute(api: Any) -> None:
    session = await api.session()
    for number in range(2):
        await api.sampler(session, number)
    request = {
        "session_id": session,
        "sampling_session_seq_id": 2,
        "base_model": "tuneserve/fake",
    }
    refused = await api.call("POST", "/create_sampling_session", json=request)
    assert "you created 2 samplers within a minute" in put_off(refused, below=61)
    await api.sampler(session, 1)  # it exists already


async def test_on_a_full_disk_no_session_starts_and_every_session_can_end(
    api: Any, settings: ApiSettings
) -> None:
    session = await api.session()
    guard = DiskGuard([settings.data_dir], 100, free_bytes=lambda _: 99)
    api.app.state.services = replace(api.app.state.services, disk=guard)
    request = {
        "session_id": session,
        "sampling_session_seq_id": 0,
        "base_model": "tuneserve/fake",
    }
    for refused in (
        await create(api),
        await api.call("POST", "/create_sampling_session", json=request),
    ):
        assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
        assert "retry-after" in refused.headers
    await api.post("/session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    await finish(api, session)
    assert (await api.services.store.get_record(SessionRecord, session)).ended == "success"


async def test_an_ended_session_is_listed_until_its_time_is_over(api: Any) -> None:
    session = await api.session()
    await finish(api, session)
    policy = api.services.settings.sweep_policy
    await api.services.store.sweep(time.time() + policy.ended_session_ttl_s - 60, policy)
    assert (await api.get("/sessions"))["sessions"] == [session]
    await api.services.store.sweep(time.time() + policy.ended_session_ttl_s + 60, policy)
    assert (await api.get("/sessions"))["sessions"] == []
