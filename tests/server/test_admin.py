"""The operator's routes: keys and the limits of tenants."""

import base64
import json
import re
from typing import Any

import pytest

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tuneserve_engine.core.records import KeyRecord
from tuneserve_server.app import PREFIX

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures

KEY = re.compile("tml-[0-9a-f]{12}-[0-9a-f]{64}")
TENANT = {
    *("tenant", "weight", "max_jobs", "max_models", "max_checkpoints", "max_checkpoint_bytes"),
    "device_s_a_day",
}


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
