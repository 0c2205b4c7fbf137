"""The routes of the caller's own key, with the SDK's models of their answers."""

import time
from typing import Any

import pytest
from tinker.cli.auth_api import SelfApiKeyResponse
from tinker.lib import _jwt_auth

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tuneserve_server.access import tokens
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def token_of(api: Api, key: str) -> str:
    token: str = (await api.post("/auth/token", {}, key=key))["jwt"]
    return token


async def test_a_token_has_the_things_and_the_scopes_of_its_key(
    api: Api, operator: Operator, at_once: None
) -> None:
    key = await operator.key(scopes=["sample"])
    token = await token_of(api, key)
    assert 3590 < _jwt_auth._seconds_until_expiry(token) <= 3600
    session = await api.session(key=token)
    assert (await api.get("/sessions", key=key))["sessions"] == [session]
    other = await operator.key("bob")
    answer = await api.call("GET", f"/sessions/{session}", key=await token_of(api, other))
    assert answer.status_code == 404
    refused = await api.call("POST", "/create_model", key=token, json={})
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_missing")


async def test_a_token_ends_with_its_key_and_is_not_prolonged(
    api: Api, operator: Operator, at_once: None
) -> None:
    key = await operator.key()
    now_s = time.time()
    claims = tokens.TokenClaims("alice", key.split("-")[1], now_s + 600)
    token = tokens.new_token(api.services.secret, claims, now_s)
    again = await token_of(api, token)
    assert _jwt_auth._jwt_expiry(again) == _jwt_auth._jwt_expiry(token) == int(now_s + 600)
    await operator.revoke(key)
    for text in (token, again):
        answer = await api.call("GET", "/sessions", key=text)
        assert answer.status_code == 401
        assert _jwt_auth._is_invalid_token(answer)  # the SDK then exchanges its key again
    assert (await api.call("POST", "/auth/token", key=key)).status_code == 401


async def test_in_open_mode_a_token_stands_for_the_same_tenant(api: Api) -> None:
    session = await api.session(key="tml-you")
    token = await token_of(api, "tml-you")
    assert (await api.get("/sessions", key=token))["sessions"] == [session]
    assert _jwt_auth.jwt_claims(token)["org_id"].startswith("t-")


async def test_only_a_setting_makes_sdks_use_tokens(api: Api, settings: ApiSettings) -> None:
    assert "pjwt_auth_enabled" not in await api.post("/client/config", {})
    changed = settings.model_copy(update={"token_auth": True})
    object.__setattr__(api.services, "settings", changed)
    assert (await api.post("/client/config", {}))["pjwt_auth_enabled"] is True


async def test_a_key_is_described_as_login_expects(
    api: Api, operator: Operator, at_once: None
) -> None:
    key = await operator.key(name="laptop", scopes=["train", "admin"])
    found = SelfApiKeyResponse.model_validate(await api.get("/auth/apikey/me", key=key))
    assert (found.name, found.note) == ("laptop", "scopes: admin, train")
    assert found.details.org_details.name == "alice"
    assert found.key_id == int(key.split("-")[1], 36)
    unnamed = await api.get("/auth/apikey/me", key=await operator.key("bob"))
    assert SelfApiKeyResponse.model_validate(unnamed).details.org_details.name == "bob"
    wrong = await api.call("GET", "/auth/apikey/me", key=f"{key}0")
    assert (wrong.status_code, wrong.json()["code"]) == (401, "unauthorized")


async def test_a_key_revokes_itself_and_no_other(
    api: Api, operator: Operator, at_once: None
) -> None:
    key, other = await operator.key(), await operator.key()
    token = await token_of(api, key)
    refused = await api.call("DELETE", "/auth/apikey/me", key=token)
    assert (refused.status_code, "send the key itself" in refused.text) == (400, True)
    await api.ok("DELETE", "/auth/apikey/me", key=key)
    for text in (key, token):
        assert (await api.call("GET", "/sessions", key=text)).status_code == 401
    await api.get("/sessions", key=other)
    states = {each["id"]: each["state"] for each in await operator.ok("GET", "/keys")}
    assert states == {key.split("-")[1]: "revoked", other.split("-")[1]: "active"}


async def test_in_open_mode_there_is_no_key_to_revoke(api: Api) -> None:
    found: Any = SelfApiKeyResponse.model_validate(await api.get("/auth/apikey/me"))
    assert found.name == "open mode"
    answer = await api.call("DELETE", "/auth/apikey/me")
    assert (answer.status_code, "no keys" in answer.text) == (400, True)
