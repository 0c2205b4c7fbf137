"""Keys in front of the API, and the operator's routes that manage them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.conftest import Api
from tuneserve_server.access import auth
from tuneserve_server.admin import create_admin_app
from tuneserve_server.app import PREFIX, create_app
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Operator:
    """A client of the operator's socket."""

    http: httpx.AsyncClient

    async def ok(self, method: str, path: str, json: Any = None) -> Any:
        answer = await self.http.request(method, path, json=json)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def key(self, tenant: str = "alice", **fields: Any) -> str:
        made: str = (await self.ok("POST", "/keys", {"tenant": tenant, **fields}))["key"]
        return made

    async def revoke(self, key: str) -> None:
        await self.ok("POST", f"/keys/{key.split('-')[1]}/revoke")


@pytest.fixture
async def operator(api: Api) -> AsyncIterator[Operator]:
    app = create_admin_app(api.services.store, api.services.secret, api.services.unused)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
        yield Operator(http)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the caches of keys: a moment ago is too old."""
    monkeypatch.setattr(auth, "FRESH_S", 0.0)


async def test_keys_of_one_tenant_share_its_objects_and_others_do_not_see_them(
    service: Api, operator: Operator, at_once: None
) -> None:
    first, second = await operator.key("alice"), await operator.key("alice")
    other = await operator.key("bob")
    session = await service.session(key=first)
    model = await service.model(session, key=first)
    for key, found in ((first, 200), (second, 200), (other, 404)):
        answer = await service.call("GET", f"/training_runs/{model}", key=key)
        assert answer.status_code == found
    run = await service.get(f"/training_runs/{model}", key=second)
    assert run["model_owner"] == "alice"


async def test_a_tenant_of_the_open_mode_can_get_keys(
    api: Api, operator: Operator, at_once: None
) -> None:
    before = await api.session(key="tml-you")
    key = await operator.key(auth.open_tenant("tml-you"))
    assert (await api.get("/sessions", key=key))["sessions"] == [before]
    answer = await api.call("GET", "/sessions", key="tml-you")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


async def test_a_revoked_key_is_refused_by_every_process_within_five_seconds(
    api: Api, operator: Operator, settings: ApiSettings, tmp_path: Path
) -> None:
    """The test runs on the real clock, with a busy client and a second process on the same
    store.
    """
    own_dir = settings.model_copy(update={"data_dir": tmp_path / "b"})
    other = create_app(own_dir, api.services.store)
    key = await operator.key()

    async def refused_s(app: FastAPI, revoked: asyncio.Event) -> float:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            while True:
                answer = await http.get(f"{PREFIX}/sessions", headers={"X-API-Key": key})
                if answer.status_code != 200:
                    assert revoked.is_set(), answer.text
                    assert answer.json()["code"] == "unauthorized"
                    return asyncio.get_running_loop().time()
                await asyncio.sleep(0.05)

    async with other.router.lifespan_context(other):
        revoked = asyncio.Event()
        trying = [asyncio.create_task(refused_s(app, revoked)) for app in (api.app, other)]
        await asyncio.sleep(0.3)
        assert not any(each.done() for each in trying)
        await operator.revoke(key)
        revoked.set()
        revoked_s = asyncio.get_running_loop().time()
        ended_s = await asyncio.wait_for(asyncio.gather(*trying), 10)
        assert max(ended_s) - revoked_s < 5.0


async def test_a_body_is_not_read_for_a_wrong_key(api: Api, operator: Operator) -> None:
    await operator.key()
    sent = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal sent
        sent += 1
        yield b"{}"

    answer = await api.http.post(f"{PREFIX}/create_session", content=content(), headers={})
    assert (answer.status_code, sent) == (401, 0)


async def test_health_says_whether_keys_are_required(
    api: Api, operator: Operator, at_once: None
) -> None:
    assert (await api.get("/healthz", key=None))["keys_required"] is False
    await operator.key()
    assert (await api.get("/healthz", key=None))["keys_required"] is True


async def test_an_endless_series_of_wrong_keys_is_refused_for_now(
    api: Api, operator: Operator, at_once: None
) -> None:
    right = await operator.key()
    await api.get("/sessions", key=right)
    wrong = f"{right[:-1]}{'0' if right[-1] != '0' else '1'}"
    answers = [await api.call("GET", "/sessions", key=wrong) for _ in range(30)]
    codes = [each.json()["code"] for each in answers]
    assert codes[:10] == ["unauthorized"] * 10
    assert codes.count("too_many_failed_logins") >= 10
    assert {each.headers.get("Retry-After") for each in answers if each.status_code == 429} == {"1"}
    await api.get("/sessions", key=right)


async def test_the_process_that_makes_the_first_key_requires_keys_at_once(api: Api) -> None:
    """Otherwise what a client makes in the next two seconds would belong to another tenant."""
    services = api.services
    assert (await api.call("GET", "/sessions", key="tml-anybody")).status_code == 200
    app = create_admin_app(
        services.store, services.secret, services.unused, services.authenticator.require_keys
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
        key = await Operator(http).key("alice")
    assert (await api.call("GET", "/sessions", key="tml-anybody")).status_code == 401
    assert (await api.call("GET", "/sessions", key=key)).status_code == 200
