"""The audit log over HTTP: real events, with the SDK's model of the answer."""

from datetime import UTC, datetime
from typing import Any

import pytest
from tinker import types

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tests.server.routes.test_listings import save

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def entries(api: Api, query: str = "", **options: Any) -> list[types.AuditLogEntry]:
    answer = await api.get(f"/audit{query}", **options)
    return types.AuditLogResponse.model_validate(answer).entries


async def test_each_change_of_a_checkpoint_is_an_event_with_its_key(
    service: Api, operator: Operator, at_once: None
) -> None:
    key, admin = await operator.key(), await operator.key("operator", scopes=["admin"])
    model = await service.model(await service.session(key=key), key=key)
    request = {"model_id": model, "seq_id": 1, "path": "a"}
    saved = await service.post("/save_weights", request, key=key)
    path = (await service.result(saved, key=key))["path"]
    url = f"/training_runs/{model}/checkpoints/weights/a"
    await service.ok("PUT", f"{url}/ttl", {"ttl_seconds": 3600}, key=key)
    await service.ok("POST", f"{url}/publish", key=key)
    await service.ok("DELETE", f"{url}/publish", key=key)
    await service.ok("GET", f"{url}/archive", key=key)
    await service.ok("POST", "/copy_weights", {"source_path": path}, key=key)
    await service.ok("DELETE", url, key=key)
    listed = await entries(service, "?event_type=checkpoints", key=admin)
    assert [each.event for each in reversed(listed)] == [
        *("checkpoint_ttl_set", "checkpoint_publish", "checkpoint_unpublish", "checkpoint_read"),
        *("checkpoint_copy", "checkpoint_delete"),
    ]
    copied = listed.pop(1)
    assert copied.event_details["source"] == path
    for each in listed:
        assert each.event_details["tenant"] == "alice"
        assert each.event_details["key_id"] == key.split("-")[1]
        assert (each.tinker_path, each.model_id) == (path, model)
    assert [each.purpose for each in listed] == [None, "download", None, None, None]
    # A refused call is no event.
    assert (await service.call("DELETE", url, key=key)).status_code == 404
    assert len(await entries(service, "?event_type=checkpoints", key=admin)) == 6


async def test_keys_and_tenants_are_events_of_the_organization(
    api: Api, operator: Operator, at_once: None
) -> None:
    admin = await operator.key("operator", scopes=["admin"])
    key = await operator.key("alice", name="laptop")
    await operator.ok("PATCH", "/tenants/alice", {"weight": 2.0})
    await operator.revoke(key)
    await operator.revoke(key)  # it is revoked once
    listed = await entries(api, "?event_type=organizations", key=admin)
    assert [each.event for each in listed] == [
        "key_revoke",
        "tenant_set",
        "key_create",
        "key_create",
    ]
    assert listed[0].event_details == {"tenant": "alice", "revoked": key.split("-")[1]}
    assert listed[1].event_details == {"tenant": "alice", "changes": '{"weight":2.0}'}
    made = listed[2].event_details
    assert (made["made"], made["name"], made["scopes"]) == (
        *(key.split("-")[1], "laptop", "sample train"),
    )
    secret = key.split("-")[2]
    assert secret not in (await api.call("GET", "/audit", key=admin)).text


async def test_the_log_is_for_admin_keys_only(api: Api, operator: Operator, at_once: None) -> None:
    for scopes in (["train"], ["sample"], ["train", "sample"]):
        key = await operator.key("bob", scopes=scopes)
        answer = await api.call("GET", "/audit", key=key)
        assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")


async def test_a_day_and_a_kind_are_chosen_and_others_are_refused(service: Any) -> None:
    model = await service.model(await service.session())
    await save(service, model, 1, "a")
    await service.ok("DELETE", f"/training_runs/{model}/checkpoints/weights/a")
    (event,) = await entries(service)
    assert event.timestamp.date() == datetime.now(UTC).date()
    assert await entries(service, f"?day={event.timestamp.date()}") == [event]
    assert await entries(service, "?day=2001-01-01") == []
    assert await entries(service, "?event_type=teams") == []
    for query in ("?day=yesterday", "?event_type=x"):
        answer = await service.call("GET", f"/audit{query}")
        assert (answer.status_code, answer.json()["code"]) == (422, "malformed")
