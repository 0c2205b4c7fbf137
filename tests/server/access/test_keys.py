"""Keys in front of the API, and the operator's routes that manage them."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.conftest import Api
from tuneserve_engine.core.records import KeyRecord
from tuneserve_server.access import auth
from tuneserve_server.access.scopes import SCOPES
from tuneserve_server.admin import create_admin_app
from tuneserve_server.app import PREFIX, create_app
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio

KEY = re.compile("tml-[0-9a-f]{12}-[0-9a-f]{64}")
TENANT = {
    *("tenant", "weight", "max_jobs", "max_models", "max_checkpoints", "max_checkpoint_bytes"),
    "device_s_a_day",
}


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


# --- scopes --------------------------------------------------------------------------------------


def operations(app: FastAPI) -> Iterator[tuple[str, str, bool]]:
    """For every route: its method, its path, and whether it requires a key."""
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, "security" in operation


async def test_every_route_that_requires_a_key_has_a_scope_and_no_other(api: Api) -> None:
    wanting = [
        f"{m} {path.removeprefix(PREFIX)}" for m, path, wants in operations(api.app) if wants
    ]
    assert sorted(SCOPES) == sorted(wanting)
    assert all(SCOPES.values())


TRAINS = {
    *("POST /create_model", "POST /load_weights", "POST /forward_backward", "POST /optim_step"),
    *("POST /save_weights", "POST /save_weights_for_sampler", "POST /save_weights_external"),
    "POST /checkpoints/import",
    "DELETE /training_runs/{model_id}/checkpoints/{kind}/{name}",
    "PUT /training_runs/{model_id}/checkpoints/{kind}/{name}/ttl",
    "POST /training_runs/{model_id}/checkpoints/{kind}/{name}/publish",
    "DELETE /training_runs/{model_id}/checkpoints/{kind}/{name}/publish",
}
SAMPLES = {
    *("POST /create_sampling_session", "POST /join_sampling_session", "POST /asample"),
    *("POST /retrieve_futures", "POST /cancel_future"),
    *("POST /v1/completions", "POST /v1/chat/completions"),
}


async def test_a_key_is_refused_outside_its_scopes(
    api: Api, operator: Operator, at_once: None
) -> None:
    allowed: dict[str, set[str]] = {}
    for scope in ("train", "sample"):
        key = await operator.key(scopes=[scope])
        for method, path, wants in operations(api.app):
            if not wants:
                continue
            url = re.sub(r"{.*?}", "x", path)
            answer = await api.http.request(method, url, content=b"{", headers={"X-API-Key": key})
            route = f"{method} {path.removeprefix(PREFIX)}"
            if answer.status_code != 403:
                assert answer.status_code in (200, 400, 404, 422), (route, answer.text)
                allowed.setdefault(scope, set()).add(route)
                continue
            body = answer.json()
            body = body["error"] if path.startswith("/v1/") else body
            assert body["code"] == "scope_missing"
            other = "sample" if scope == "train" else "train"
            said = body.get("detail") or body["message"]
            assert f"with the scope {other}; yours has {scope};" in said
            assert body.get("type", "permission_error") == "permission_error"
    assert set(SCOPES) - allowed["train"] == SAMPLES
    assert set(SCOPES) - allowed["sample"] == TRAINS


async def test_a_sampling_key_cannot_end_a_session_with_models(
    service: Api, operator: Operator, at_once: None
) -> None:
    sampling = await operator.key(scopes=["sample"])
    training = await operator.key(scopes=["train"])
    ending = {"reason": {"type": "success"}}
    mine = await service.session(key=sampling)
    await service.post(f"/sessions/{mine}/finish", ending, key=sampling)
    theirs = await service.session(key=training)
    model = await service.model(theirs, key=training)
    answer = await service.call("POST", f"/sessions/{theirs}/finish", json=ending, key=sampling)
    assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")
    await service.forward_backward(model, 1, key=training)  # the model still exists
    await service.post(f"/sessions/{theirs}/finish", ending, key=training)


# --- keys and tenants ----------------------------------------------------------------------------


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


# --- the operator's socket ------------------------------------------------------------------------


async def test_the_public_api_has_no_operator_routes(api: Api, operator: Operator) -> None:
    key = await operator.key()
    for path in ("/keys", "/tenants", "/admin/keys", f"{PREFIX}/keys", f"{PREFIX}/tenants"):
        answer = await api.http.get(path, headers={"X-API-Key": key})
        assert answer.status_code == 404, path


async def test_a_key_is_shown_once_and_its_secret_is_stored_nowhere(
    api: Api, operator: Operator
) -> None:
    made = await operator.ok("POST", "/keys", {"tenant": "alice", "name": "laptop"})
    secret = made["key"].rpartition("-")[2]
    assert KEY.fullmatch(made["key"])
    listed = await operator.ok("GET", "/keys")
    assert [made] == [{**each, "key": made["key"]} for each in listed]
    stored = await api.services.store.get_record(KeyRecord, made["id"])
    assert stored is not None
    for text in (json.dumps(listed), repr(stored)):
        assert secret not in text
        assert base64.b64encode(bytes.fromhex(secret)).decode() not in text
    assert stored.digest not in json.dumps(listed)


async def test_keys_are_listed_with_their_state_newest_first(operator: Operator) -> None:
    first = await operator.key("alice", name="a", expires_days=30)
    await operator.key("bob", name="b", scopes=["sample"])
    await operator.revoke(first)
    listed = await operator.ok("GET", "/keys")
    shown = [(each["name"], each["tenant"], each["scopes"], each["state"]) for each in listed]
    assert shown == [
        ("b", "bob", ["sample"], "active"),
        ("a", "alice", ["sample", "train"], "revoked"),
    ]
    assert listed[1]["expires_s"] - listed[1]["created_s"] == 30 * 86_400
    revoked_s = listed[1]["revoked_s"]
    await operator.revoke(first)
    assert (await operator.ok("GET", "/keys"))[1]["revoked_s"] == revoked_s


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/keys", {}, 422),
        ("POST", "/keys", {"tenant": "a b"}, 422),
        ("POST", "/keys", {"tenant": "../a"}, 422),
        ("POST", "/keys", {"tenant": "a\n"}, 422),
        ("POST", "/keys", {"tenant": "a", "scopes": []}, 422),
        ("POST", "/keys", {"tenant": "a", "scopes": ["operator"]}, 422),
        ("POST", "/keys", {"tenant": "a", "expires_days": 0}, 422),
        ("POST", "/keys", {"tenant": "a", "secret": "mine"}, 422),
        ("POST", "/keys/nobody/revoke", None, 404),
        ("GET", "/tenants/nobody", None, 404),
        ("PATCH", "/tenants/a", {"weight": 0}, 422),
        ("PATCH", "/tenants/a", {"max_jobs": -1}, 422),
        ("PATCH", "/tenants/a", {"max_jobs": 2**60}, 422),
        ("PATCH", "/tenants/a%20b", {"max_jobs": 1}, 422),
    ],
)
async def test_an_invalid_command_is_refused_and_changes_nothing(
    operator: Operator, method: str, path: str, body: Any, status: int
) -> None:
    answer = await operator.http.request(method, path, json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"detail", "code"}
    assert await operator.ok("GET", "/keys") == await operator.ok("GET", "/tenants") == []


async def test_a_tenants_new_limits_apply_to_its_next_request(
    api: Api, operator: Operator, bodies: Any, at_once: None
) -> None:
    keys = {name: await operator.key(name) for name in ("alice", "bob")}
    assert [each["tenant"] for each in await operator.ok("GET", "/tenants")] == ["alice", "bob"]
    changed = await operator.ok("PATCH", "/tenants/alice", {"max_jobs": 1, "weight": 2})
    assert changed == dict.fromkeys(TENANT) | {"tenant": "alice", "max_jobs": 1, "weight": 2.0}
    for name, wanted in (("alice", [200, 429]), ("bob", [200, 200])):
        sampler = await api.sampler(await api.session(key=keys[name]), key=keys[name])
        answers = [
            await api.call("POST", "/asample", json=bodies.asample(sampler, n), key=keys[name])
            for n in range(2)
        ]
        assert [each.status_code for each in answers] == wanted
    await operator.ok("PATCH", "/tenants/alice", {"max_jobs": None})
    assert (await operator.ok("GET", "/tenants/alice"))["weight"] == 2.0
    alice = keys["alice"]
    sampler = await api.sampler(await api.session(key=alice), key=alice)
    await api.post("/asample", bodies.asample(sampler, 1), key=alice)
