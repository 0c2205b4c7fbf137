"""The search for checkpoints: filters, pages, and whose checkpoints are found."""

from typing import Any

import pytest

from tests.server.routes.test_external_uploads import uploaded
from tests.server.test_errors import assert_failure

pytestmark = pytest.mark.anyio


async def search(service: Any, key: str = "tml-a", **fields: Any) -> list[str]:
    answer = await service.post("/checkpoints/search", fields, key=key)
    return [each["tinker_path"] for each in answer["checkpoints"]]


async def run(service: Any, project: str) -> tuple[str, str]:
    """A training and a sampler checkpoint, in a project."""
    body = {"project_id": project, "sdk_version": "0.39.0"}
    session = (await service.post("/create_session", body))["session_id"]
    model = await service.model(session)
    paths = []
    for seq, route in enumerate(("save_weights", "save_weights_for_sampler"), 1):
        request = {"model_id": model, "seq_id": seq, "path": "a"}
        request["user_metadata"] = {"project": project, "kind": route}
        paths.append((await service.result(await service.post(f"/{route}", request)))["path"])
    return paths[0], paths[1]


async def test_filters_find_what_matches_all_of_them_newest_first(service: Any) -> None:
    first, second = await run(service, "p"), await run(service, "q")
    external = await uploaded(service)
    everything = [external, *reversed(second), *reversed(first)]
    assert await search(service) == everything
    for fields, expected in (
        ({"checkpoint_type": "training"}, [second[0], first[0]]),
        ({"checkpoint_type": "external"}, [external]),
        ({"user_metadata": {"project": "p"}}, [first[1], first[0]]),
        ({"user_metadata": {"project": "p", "kind": "save_weights"}}, [first[0]]),
        ({"user_metadata": {"project": "nowhere"}}, []),
        ({"project_ids": ["q"]}, [second[1], second[0]]),
        ({"project_ids": ["p"], "checkpoint_type": "sampler"}, [first[1]]),
        ({"project_ids": []}, []),
        ({"base_models": ["tuneserve/fake"]}, everything),
        ({"base_models": ["other", "tuneserve/fake:peft:64"]}, everything),
        ({"base_models": ["other"]}, []),
        ({"base_models": []}, []),
        ({"owner": {"type": "accessible"}}, everything),
        ({"owner": {"type": "user", "owner_urns": ["someone"]}}, []),
    ):
        assert await search(service, **fields) == expected, fields


async def test_an_owner_is_a_tenant(service: Any) -> None:
    (path, _) = await run(service, "p")
    owner = (await service.get(f"/training_runs/{path.split('/')[2]}"))["model_owner"]
    mine = {"owner": {"type": "user", "owner_urns": ["other", owner]}}
    assert len(await search(service, **mine)) == 2
    assert await search(service, key="tml-b", **mine) == []


async def test_pages_follow_each_other_without_gap_or_repetition(service: Any) -> None:
    await run(service, "p")
    await run(service, "q")
    await uploaded(service)
    found, fields = [], {"limit": 2}
    for left in (3, 1, 0):
        answer = await service.post("/checkpoints/search", fields)
        found += [each["tinker_path"] for each in answer["checkpoints"]]
        assert ("next_cursor" in answer) == bool(left)
        fields = {"limit": 2, "cursor": answer.get("next_cursor")}
    assert found == await search(service, limit=200)


async def test_other_tenants_find_nothing_even_of_published_ones(service: Any) -> None:
    path, _ = await run(service, "p")
    await service.ok("POST", f"/training_runs/{path[9:].replace('/', '/checkpoints/', 1)}/publish")
    for owner in ("own", "accessible"):
        assert await search(service, key="tml-b", owner={"type": owner}) == []


async def test_a_malformed_search_is_refused(service: Any) -> None:
    place = {"last_checkpoint_uuid": "x"}
    for fields in (
        {"limit": 0},
        {"limit": 201},
        {"checkpoint_type": "other"},
        {"owner": {"type": "all"}},
        {"cursor": {**place, "last_created_at": "today"}},
        {"cursor": {**place, "last_created_at": "2026-11-01T00:00:00"}},  # of no time zone
    ):
        assert_failure(await service.call("POST", "/checkpoints/search", json=fields), 422)
