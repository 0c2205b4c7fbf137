"""The search of sessions, with the SDK's requests and its models of the answers."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tinker import types

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tests.server.routes.test_listings import save
from tuneserve_engine.core.records import SessionRecord

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def search(api: Api, key: str = "tml-a", **fields: Any) -> types.SessionSearchResponse:
    request = types.SessionSearchRequest(**fields)
    body = request.model_dump(mode="json", exclude_none=True)
    answer = await api.post("/sessions/search", body, key=key)
    return types.SessionSearchResponse.model_validate(answer)


async def ids(api: Api, key: str = "tml-a", **fields: Any) -> list[str]:
    return [each.session_id for each in (await search(api, key, **fields)).sessions]


async def create(api: Api, key: str = "tml-a", **fields: Any) -> str:
    session_id: str = (await api.post("/create_session", fields, key=key))["session_id"]
    return session_id


async def test_a_session_is_found_with_its_facts(service: Any) -> None:
    made = await create(
        service, display_name="Nightly run", project_id="p", user_metadata={"team": "red"}
    )
    model = await service.model(made)
    sizes = []
    for seq in (1, 2):
        path = await save(service, model, seq, f"c{seq}")
        listed = (await service.get("/checkpoints"))["checkpoints"]
        sizes += [each["size_bytes"] for each in listed if each["tinker_path"] == path]
    (found,) = (await search(service)).sessions
    assert (found.session_id, found.display_name, found.project_id) == (made, "Nightly run", "p")
    assert found.user_metadata == {"team": "red"}
    assert isinstance(found.status, types.session_status.SessionActive)
    assert (found.checkpoints_count, found.checkpoint_storage_bytes) == (2, sum(sizes))
    assert abs(found.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert found.owner.startswith("t-")


async def test_sessions_are_filtered(api: Any) -> None:
    red = await create(
        api, display_name="Nightly RL run", project_id="p", user_metadata={"a": "1", "b": "2"}
    )
    blue = await create(api, display_name="nightly sft", project_id="q", user_metadata={"a": "1"})
    bare = await create(api)
    for fields, wanted in (
        ({}, [bare, blue, red]),
        ({"display_name": "NIGHT"}, [blue, red]),
        ({"display_name": "run nightly"}, [red]),
        ({"display_name": "weekly"}, []),
        ({"session_id": bare}, [bare]),
        ({"session_id": bare, "display_name": "sft"}, [bare, blue]),
        ({"session_id": "s-none"}, []),
        ({"project_ids": ["p"]}, [red]),
        ({"project_ids": ["p", "q", "r"]}, [blue, red]),
        ({"project_ids": []}, []),
        ({"user_metadata": {"a": "1"}}, [blue, red]),
        ({"user_metadata": {"a": "1", "b": "2"}}, [red]),
        ({"user_metadata": {"a": "2"}}, []),
    ):
        assert await ids(api, **fields) == wanted, fields


async def test_sessions_are_filtered_by_status(api: Any) -> None:
    active, good, bad, silent = [await create(api) for _ in range(4)]
    for session, reason in ((good, "success"), (bad, "errored")):
        await api.post(f"/sessions/{session}/finish", {"reason": {"type": reason}})
    await api.services.store.end_session(silent, "expired")
    finished = {"type": "client_finished"}
    for statuses, wanted in (
        ([{"type": "active"}], [active]),
        ([finished], [bad, good]),
        ([{**finished, "reasons": ["success"]}], [good]),
        ([{**finished, "reasons": ["interrupted"]}], []),
        ([{"type": "active"}, {**finished, "reasons": ["errored"]}], [bad, active]),
        ([{"type": "failed"}, {"type": "cancelled"}], []),
    ):
        assert await ids(api, statuses=statuses) == wanted, statuses
    summaries = {each.session_id: each.status for each in (await search(api)).sessions}
    assert summaries[silent] is None
    reason = summaries[bad].reason  # type: ignore[union-attr]
    assert reason.type == "errored"


async def test_pages_follow_each_other_whatever_the_order_of_storing(api: Any) -> None:
    """Sessions may be stored in another order than that of their times."""
    tenant = await search_owner(api)
    times = [100.0, 130.0, 110.0, 130.0, 120.0000004, 120.0000001, 90.0]
    for number, at_s in enumerate(times):
        await api.services.store.put_record(
            SessionRecord(f"s-{number}", tenant, created_s=1e9 + at_s, last_seen_s=1e9)
        )
    seen: list[str] = []
    cursor = None
    for _ in range(4):
        page = await search(api, display_name=None, limit=2, cursor=cursor, session_id=None)
        seen += [each.session_id for each in page.sessions]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert cursor is None
    # Times within a microsecond are equal on the wire, and ids order them.
    assert seen == ["s-3", "s-1", "s-5", "s-4", "s-2", "s-0", "s-6"]


async def search_owner(api: Api) -> str:
    """The tenant of the tests' key, whose only session is deleted again."""
    session = await create(api)
    owner = (await search(api)).sessions[0].owner
    await api.services.store.delete_record(SessionRecord, session)
    return owner


async def test_only_an_admin_finds_the_sessions_of_others(
    api: Api, operator: Operator, at_once: None
) -> None:
    key, other = await operator.key("alice"), await operator.key("bob")
    admin = await operator.key("operator", scopes=["admin"])
    mine, theirs = await create(api, key), await create(api, other)
    owners: Sequence[Any] = ({"type": "own"}, {"type": "accessible"})
    for owner in owners:
        assert await ids(api, key, owner=owner) == [mine]
        assert await ids(api, key, owner=owner, session_id=theirs) == []
    named = {"type": "user", "owner_urns": ["bob"]}
    assert await ids(api, key, owner=named) == []
    assert await ids(api, admin) == []
    assert await ids(api, admin, owner={"type": "accessible"}) == [theirs, mine]
    assert await ids(api, admin, owner=named) == [theirs]
    assert (await api.call("POST", "/sessions/search", json={}, key="tml-x")).status_code == 401


async def test_a_wrong_search_is_refused(api: Any) -> None:
    for body in (
        {"limit": 0},
        {"limit": 201},
        {"display_name": ""},
        {"statuses": []},
        {"owner": {"type": "everybody"}},
        {"cursor": {"last_created_at": "yesterday", "last_session_id": "s"}},
        {"session_ids": ["a"]},
    ):
        answer = await api.call("POST", "/sessions/search", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "malformed"), body
