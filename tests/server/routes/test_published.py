"""Published checkpoints: every tenant can read them by path, and only the owner can change them."""

import json
from typing import Any

import pytest

from tests.server.routes.test_copies import copy, loss_from, route, trained
from tests.server.test_errors import assert_failure
from tests.server.transfer.test_peft_upload import left

pytestmark = pytest.mark.anyio

OTHER = "tml-b"


async def published(service: Any) -> str:
    path = await trained(service, user_metadata={"note": "the owner's secret"})
    await service.ok("POST", f"{route(path)}/publish")
    return path


async def sampler_of(service: Any, path: str, number: int = 0) -> str:
    keys = {"session_id": await service.session(key=OTHER), "sampling_session_seq_id": number}
    body = {**keys, "model_path": path}
    answer = await service.post("/create_sampling_session", body, key=OTHER)
    sampler: str = answer["sampling_session_id"]
    return sampler


async def test_another_tenant_loads_samples_copies_and_downloads_it(
    service: Any, bodies: Any
) -> None:
    path = await published(service)
    assert await loss_from(service, path, 0, key=OTHER) == await loss_from(service, path, 0)
    model = await service.model(await service.session(key=OTHER), key=OTHER)
    load = {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    loaded = await service.result(await service.post("/load_weights", load, key=OTHER), key=OTHER)
    assert loaded["path"] == path
    sampler = await sampler_of(service, path)
    asked = await service.post("/asample", bodies.asample(sampler, 0), key=OTHER)
    assert (await service.poll(asked["request_id"], key=OTHER)).status_code == 200
    info = await service.post("/weights_info", {"tinker_path": path}, key=OTHER)
    assert info["lora_rank"] == 4
    archive = await service.get(f"{route(path)}/archive", key=OTHER)
    assert (await service.http.get(archive["url"])).status_code == 200
    copied = await copy(service, path, key=OTHER)
    assert await loss_from(service, copied, 0, key=OTHER) == await loss_from(service, path, 0)


async def test_a_published_export_gives_its_links_to_anyone(service: Any) -> None:
    model = await service.model(await service.session())
    body = {"model_id": model, "seq_id": 1, "path": "e"}
    answer = await service.result(await service.post("/save_weights_external", body))
    urls = f"{route(answer['path'])}/external_weights_urls"
    assert_failure(await service.call("GET", urls, key=OTHER), 404)
    await service.ok("POST", f"{route(answer['path'])}/publish")
    for url in (await service.get(urls, key=OTHER))["urls"].values():
        assert (await service.http.get(url)).status_code == 200


async def test_nothing_but_its_owner_changes_deletes_or_unpublishes_it(service: Any) -> None:
    path = await published(service)
    before = await service.get("/checkpoints")
    for method, suffix, body in (
        ("DELETE", "", None),
        ("PUT", "/ttl", {"ttl_seconds": 3600}),
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
    ):
        options = {} if body is None else {"json": body}
        absent = await service.call(method, f"{route(path)[:-1]}z{suffix}", key=OTHER, **options)
        foreign = await service.call(method, f"{route(path)}{suffix}", key=OTHER, **options)
        assert_failure(foreign, 404)
        told = foreign.json()["detail"].replace(path, "X")
        assert told == absent.json()["detail"].replace(f"{path[:-1]}z", "X")
    assert await service.get("/checkpoints") == before


async def test_nothing_else_of_the_owner_is_seen(service: Any) -> None:
    path = await published(service)
    model = path.split("/")[2]
    session = model.partition(":")[0]
    for address in (
        f"/training_runs/{model}",
        f"/training_runs/{model}/checkpoints",
        f"/training_runs/{model}/curve",
        f"/training_runs/{model}/events",
        f"/sessions/{session}",
    ):
        assert_failure(await service.call("GET", address, key=OTHER), 404)
    owner = (await service.get("/usage"))["tenant"]
    copied = await copy(service, path, key=OTHER)
    seen = [
        await service.post("/weights_info", {"tinker_path": path}, key=OTHER),
        await service.get(f"{route(path)}/archive", key=OTHER),
        await service.get(f"/samplers/{await sampler_of(service, path)}", key=OTHER),
        await service.get("/checkpoints", key=OTHER),
        await service.get("/training_runs", key=OTHER),
        await service.post("/weights_info", {"tinker_path": copied}, key=OTHER),
        (await service.http.get("/v1/models", headers={"X-API-Key": OTHER})).json(),
    ]
    for text in map(json.dumps, seen):
        assert "the owner's secret" not in text and owner not in text
    for listed in (seen[3], seen[4], seen[6]):
        assert model not in json.dumps(listed)


async def test_unpublishing_and_deleting_end_the_access(service: Any, bodies: Any) -> None:
    path = await published(service)
    sampler = await sampler_of(service, path)
    copied = await copy(service, path, key=OTHER)
    await service.ok("DELETE", f"{route(path)}/publish")
    refused = [await service.call("GET", f"{route(path)}/archive", key=OTHER)]
    for address, body in (
        ("/weights_info", {"tinker_path": path}),
        ("/copy_weights", {"source_path": path}),
        (
            "/create_sampling_session",
            {
                "session_id": await service.session(key=OTHER),
                "sampling_session_seq_id": 0,
                "model_path": path,
            },
        ),
    ):
        refused.append(await service.call("POST", address, json=body, key=OTHER))
    for each in refused:
        assert_failure(each, 404)
    await service.ok("DELETE", route(path))
    await service.services.unused.clean(older_than_s=0)
    assert left(service), "the sampler and the copy still need the file"
    asked = await service.post("/asample", bodies.asample(sampler, 0), key=OTHER)
    assert (await service.poll(asked["request_id"], key=OTHER)).status_code == 200
    await loss_from(service, copied, 0, key=OTHER)


async def test_a_checkpoint_that_replaces_a_published_one_is_not_published(service: Any) -> None:
    path = await published(service)
    model = path.split("/")[2]
    save = {"model_id": model, "seq_id": 4, "path": "a", "overwrite": True}
    await service.result(await service.post("/save_weights", save))
    answer = await service.call("POST", "/weights_info", json={"tinker_path": path}, key=OTHER)
    assert_failure(answer, 404)
