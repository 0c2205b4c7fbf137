"""Copies of checkpoints: one file for both, and a life of their own."""

import json
import time
from itertools import product
from typing import Any

import pytest

from tests.server.routes.test_checkpoints import saved
from tests.server.routes.test_external_uploads import uploaded
from tests.server.test_errors import assert_failure
from tests.server.transfer.test_peft_upload import left
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.records import TenantRecord

pytestmark = pytest.mark.anyio


def route(path: str) -> str:
    """The address of a checkpoint."""
    return f"/training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"


async def copy(service: Any, path: str, *, key: str = "tml-a", **fields: Any) -> str:
    headers = fields.pop("headers", {})
    body = {"source_path": path, "destination_project_id": "p", **fields}
    answer = await service.post("/copy_weights", body, key=key, headers=headers)
    copied: str = answer["tinker_path"]
    return copied


async def loss_from(service: Any, path: str, number: int, **options: Any) -> float:
    """The loss of a model that is made from the checkpoint."""
    session = await service.session(**options)
    load = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True}
    answer = await service.post("/load_weights", load, **options)
    loaded = await service.result(answer, **options)
    assert "error" not in loaded, loaded
    found = await service.forward_backward(loaded["model_id"], 1, **options)
    response = await service.poll(found["request_id"], **options)
    loss: float = wire.ForwardBackwardOutput.FromString(response.content).metrics["loss:sum"]
    return loss


async def trained(service: Any, name: str = "a", **fields: Any) -> str:
    """The path of a checkpoint whose loss differs from a new model's."""
    model = await service.model(await service.session())
    await service.output(await service.forward_backward(model, 1))
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    await service.result(await service.post("/optim_step", step))
    return await saved(service, model, 3, name, **fields)


async def test_a_copy_has_its_sources_numbers_kind_and_file(service: Any) -> None:
    source = await trained(service, user_metadata={"note": "mine"})
    files = left(service)
    copied = await copy(service, source)
    assert copied.startswith("tinker://copy-") and copied.endswith("/weights/a")
    assert left(service) == files, "storage is shared"
    assert await loss_from(service, copied, 0) == await loss_from(service, source, 0)
    (listed,) = (await service.get(f"/training_runs/{copied.split('/')[2]}/checkpoints"))[
        "checkpoints"
    ]
    assert listed["user_metadata"] == {"note": "mine"}
    assert not listed["public"] and "expires_at" not in listed
    found = await service.post("/checkpoints/search", {"project_ids": ["p"]})
    assert [each["tinker_path"] for each in found["checkpoints"]] == [copied]


async def test_a_copy_outlives_its_source(service: Any) -> None:
    source = await trained(service)
    copied = await copy(service, source)
    loss = await loss_from(service, copied, 0)
    await service.ok("DELETE", route(source))
    await service.services.unused.clean(older_than_s=0)
    assert await loss_from(service, copied, 0) == loss
    await service.ok("DELETE", route(copied))
    assert_failure(await service.call("POST", "/weights_info", json={"tinker_path": copied}), 404)


@pytest.mark.parametrize("kind", ["sampler_weights", "external_weights", "uploaded"])
async def test_every_kind_of_checkpoint_is_copied(service: Any, kind: str) -> None:
    if kind == "uploaded":
        source = await uploaded(service)
    else:
        model = await service.model(await service.session())
        save = {"sampler_weights": "for_sampler", "external_weights": "external"}[kind]
        body = {"model_id": model, "seq_id": 1, "path": "s"}
        answer = await service.post(f"/save_weights_{save}", body)
        source = (await service.result(answer))["path"]
    copied = await copy(service, source)
    assert copied.split("/")[3:] == source.split("/")[3:]
    for path in (source, copied):
        archive = await service.get(f"{route(path)}/archive")
        assert (await service.http.get(archive["url"])).status_code == 200
    if kind == "uploaded":
        await loss_from(service, copied, 0)


async def test_a_retry_makes_one_copy_and_another_key_another(service: Any) -> None:
    source = await trained(service)
    keys = [{"X-Idempotency-Key": key} for key in ("k", "k", "l")]
    first, again, other = [await copy(service, source, headers=each) for each in keys]
    assert first == again != other
    await service.ok("DELETE", route(source))
    assert await copy(service, source, headers=keys[0]) == first


async def test_a_ttl_is_the_copys_own(service: Any) -> None:
    source = await trained(service, ttl_seconds=7200)
    copied = await copy(service, source, ttl_seconds=3600)
    ends = [(await listing(service, each))["expires_at"] for each in (copied, source)]
    assert ends[0] < ends[1]
    assert "expires_at" not in (await listing(service, await copy(service, source)))


async def listing(service: Any, path: str) -> Any:
    found = (await service.get("/checkpoints"))["checkpoints"]
    return next(each for each in found if each["tinker_path"] == path)


async def test_a_copy_that_cannot_be_made_is_refused(service: Any) -> None:
    body = {"source_path": await trained(service)}
    for fields, words in (
        ({"ttl_seconds": 5}, "ttl_seconds is 5; it must be 3600"),
        ({"session_id": "s", "model_seq_id": 0}, "belongs to no session; leave them out"),
    ):
        answer = await service.call("POST", "/copy_weights", json={**body, **fields})
        assert_failure(answer, 400)
        assert words in answer.json()["detail"]


async def test_a_copy_counts_against_the_tenants_bytes(service: Any) -> None:
    source = await trained(service)
    size = (await listing(service, source))["size_bytes"]
    tenant = (await service.get("/usage"))["tenant"]
    limits = TenantRecord(tenant, tenant, time.time(), max_checkpoint_bytes=2 * size)
    await service.services.store.put_record(limits)
    await copy(service, source)
    answer = await service.call("POST", "/copy_weights", json={"source_path": source})
    assert_failure(answer, 400)
    assert f"the limit is {2 * size} bytes" in answer.json()["detail"]


async def test_a_token_opens_nothing_and_the_refusal_says_so(service: Any) -> None:
    source = await trained(service)
    secret = "tok-4711"
    refused = []
    for path, place in product((source, source[:-1] + "z"), ("header", "body")):
        body, headers = {"source_path": path}, {}
        if place == "header":
            headers["X-Tinker-Weights-Access-Token"] = secret
        else:
            body["weights_access_token"] = secret
        options = {"json": body, "headers": headers, "key": "tml-b"}
        answer = await service.call("POST", "/copy_weights", **options)
        assert_failure(answer, 404)
        refused.append(answer.json()["detail"].replace(path, "X"))
    assert len(set(refused)) == 1
    assert "this server issues no such tokens; ask the checkpoint's owner" in refused[0]
    assert secret not in json.dumps(refused)
    assert await copy(service, source, headers={"X-Tinker-Weights-Access-Token": secret})


@pytest.mark.parametrize("form", ["new", "into"])
async def test_a_load_with_a_token_is_refused_in_the_same_words(service: Any, form: str) -> None:
    source = await trained(service)
    session = await service.session(key="tml-b")
    keys = {"session_id": session, "model_seq_id": 1}
    if form == "into":
        keys = {"model_id": await service.model(session, key="tml-b"), "seq_id": 1}
    load = {**keys, "path": source, "optimizer": False, "weights_access_token": "tok-4711"}
    said = await service.error(await service.post("/load_weights", load, key="tml-b"), key="tml-b")
    assert "this server issues no such tokens" in said and "tok-4711" not in said
