"""Failures have one shape on every route, reveal nothing of other tenants, and are never a 5xx."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.app import PREFIX, ROUTERS

pytestmark = pytest.mark.anyio

WITHOUT_KEY = {
    "/api/v1/healthz",
    "/api/v1/files/{file_id}/{member}",
    "/api/v1/uploads/{upload_id}/{member}",
}


def routes() -> Iterator[tuple[str, str]]:
    """The method and path of every route."""
    for module in ROUTERS:
        for route in module.router.routes:
            assert isinstance(route, APIRoute)
            for method in sorted(route.methods):
                yield method, PREFIX + route.path


def concrete(path: str) -> str:
    return re.sub(r"\{\w+\}", "x", path)


def assert_failure(
    response: httpx.Response, status: int | None = None, *, below: int = 500
) -> None:
    assert status is None or response.status_code == status, response.text
    assert 400 <= response.status_code < below, response.text
    assert set(response.json()) == {"detail", "code"}
    assert response.json()["detail"]
    assert int(response.headers["content-length"]) == len(response.content) > 0
    assert response.headers["content-type"] == "application/json"


async def test_the_api_has_as_many_routes_as_the_wire_has_endpoints(api: Any) -> None:
    """Priority A and B of the wire have 32 endpoints, clients of sampling sessions three more,
    copies, custom losses and old SDKs one each. Newer SDKs have three more, one of them with links
    for files. Keys, the audit log, bills, projects, traces and the search of sessions have nine.

    The others serve downloads, tokenizers, uploads of adapters, three kinds of usage report, the
    search, notes and events of runs, and the dashboard.
    """
    assert len(set(routes())) == 64


async def test_every_route_but_two_requires_a_key(api: Any) -> None:
    for method, path in set(routes()):
        if path in WITHOUT_KEY:
            continue
        for headers in ({}, {"X-API-Key": "sk-other"}, {"Authorization": "Bearer tml-a"}):
            response = await api.http.request(method, concrete(path), headers=headers)
            assert_failure(response, 401)


async def test_keys_of_both_forms_are_accepted_and_belong_to_different_tenants(api: Any) -> None:
    sessions = {await api.session(key=key) for key in ("tml-a", "tml-b", "eyJhbGciOi.e30.x")}
    assert len(sessions) == 3
    assert len((await api.get("/sessions", key="tml-a"))["sessions"]) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b"[" * 500,
    ],
)
async def test_an_unreadable_body_is_refused_without_being_repeated(
    api: Any, content: bytes
) -> None:
    bodiless = {"/client/config", "/client/dynamic_config", "/telemetry", "/auth/token"}
    for method, path in set(routes()):
        name = path.removeprefix("/api/v1")
        if method != "POST" or name in bodiless or "{" in name:
            continue
        response = await api.call(method, name, content=content)
        if name in ("/create_session", "/sessions/search") and response.status_code == 200:
            assert content == b'{"a": NaN}'  # "a" is an unknown field, and all others have defaults
            continue
        assert_failure(response, 422)
        assert "ud800" not in response.text
        assert "NaN" not in response.text


async def test_an_error_about_metadata_does_not_repeat_its_keys(api: Any) -> None:
    body = {"user_metadata": {"my secret": {"a": 1}}}
    response = await api.call("POST", "/create_session", json=body)
    assert_failure(response, 422)
    assert response.json()["detail"].startswith("user_metadata: ")
    assert "secret" not in response.text


async def test_failures_on_unknown_paths_and_methods_have_the_same_shape(api: Any) -> None:
    assert_failure(await api.call("GET", "/nothing"), 404)
    assert_failure(await api.call("POST", "/forward", json={}), 404)
    assert_failure(await api.call("GET", "/asample"), 405)
    assert_failure(await api.call("GET", "/training_runs?limit=x"), 422)
    assert_failure(await api.call("GET", f"/training_runs?offset={2**70}"), 422)
    assert_failure(await api.call("GET", "/training_runs?offset=-1"), 422)


async def test_an_unexpected_error_is_500_without_details(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(api.services.store, "put_new_record", broken)
    transport = httpx.ASGITransport(api.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        response = await http.post(
            "/api/v1/create_session", json={}, headers={"X-API-Key": "tml-a"}
        )
    assert response.status_code == 500
    assert response.json()["code"] == "internal"
    assert "secret" not in response.text


@pytest.mark.parametrize("error", [StoreFailed, ConnectionError])
async def test_an_unusable_store_is_503_with_a_retry_after(
    api: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async def full(*_: object) -> None:
        raise error("database or disk is full")

    monkeypatch.setattr(api.services.store, "put_new_record", full)
    response = await api.call("POST", "/create_session", json={})
    assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
    assert int(response.headers["retry-after"]) == 1
    assert_failure(response, 503, below=600)


async def test_another_tenants_objects_look_absent_on_every_route(
    service: Any, bodies: Any
) -> None:
    session = await service.session()
    model = await service.model(session)
    sampler = await service.sampler(session)
    request = {"model_id": model, "seq_id": 1, "path": "a"}
    answer = await service.post("/save_weights", request)
    await service.result(answer)
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/create_model", bodies.create_model("@session")),
        ("POST", "/create_custom_loss", {"session_id": "@session", "custom_loss_seq_id": 0}),
        ("POST", "/session_heartbeat", {"session_id": "@session"}),
        ("POST", "/sessions/@session/finish", {"reason": {"type": "success"}}),
        ("GET", "/sessions/@session", None),
        ("GET", "/sessions/@session/trace_export", None),
        ("PUT", "/sessions/@session/project", {"project_id": "p"}),
        ("POST", "/get_info", {"model_id": "@model"}),
        ("POST", "/optim_step", {"model_id": "@model", "seq_id": 2, "adam_params": {}}),
        ("POST", "/optim_step", {"model_id": "@model", "seq_id": 2, "adam_params": 3}),
        ("POST", "/save_weights", {"model_id": "@model", "seq_id": 2, "path": "b"}),
        ("POST", "/save_weights_for_sampler", {"model_id": "@model", "seq_id": 2, "path": "b"}),
        ("POST", "/save_weights_external", {"model_id": "@model", "seq_id": 2, "path": "b"}),
        (
            "POST",
            "/load_weights",
            {"model_id": "@model", "seq_id": 2, "path": "x", "optimizer": True},
        ),
        (
            "POST",
            "/load_weights",
            {"session_id": "@session", "model_seq_id": 3, "path": "x", "optimizer": True},
        ),
        ("POST", "/weights_info", {"tinker_path": "tinker://@model/weights/a"}),
        ("POST", "/copy_weights", {"source_path": "tinker://@model/weights/a"}),
        (
            "POST",
            "/create_sampling_session",
            {"session_id": "@session", "sampling_session_seq_id": 5, "base_model": "x"},
        ),
        ("GET", "/samplers/@sampler", None),
        ("POST", "/asample", bodies.asample("@sampler", 0)),
        ("POST", "/retrieve_future", {"request_id": "@request"}),
        ("GET", "/training_runs/@model", None),
        ("GET", "/training_runs/@model/checkpoints", None),
        ("DELETE", "/training_runs/@model/checkpoints/weights/a", None),
        ("PUT", "/training_runs/@model/checkpoints/weights/a/ttl", {"ttl_seconds": None}),
        ("POST", "/training_runs/@model/checkpoints/weights/a/publish", None),
        ("DELETE", "/training_runs/@model/checkpoints/weights/a/publish", None),
        ("GET", "/training_runs/@model/checkpoints/weights/a/external_weights_urls", None),
        ("GET", "/training_runs/@model/checkpoints/weights/a/archive", None),
    ]
    theirs = {
        "@session": session,
        "@model": model,
        "@sampler": sampler,
        "@request": answer["request_id"],
    }
    absent = {name: value[:-4] + "zzzz" for name, value in theirs.items()}
    for method, path, body in calls:
        bodies_seen = []
        for ids in (theirs, absent):
            response = await service.call(
                method, fill(path, ids), key="tml-b", content=fill(json.dumps(body), ids)
            )
            assert_failure(response, 404)
            bodies_seen.append(replace_ids(response.text, ids))
        assert bodies_seen[0] == bodies_seen[1], path
    foreign = bodies.forward_backward(model, 2)
    response = await service.call("POST", "/forward_backward", content=foreign, key="tml-b")
    assert_failure(response, 404)
    for path in ("/sessions", "/training_runs", "/checkpoints"):
        listing = await service.get(path, key="tml-b")
        assert next(iter(listing.values())) == []
    assert (await service.get("/checkpoints"))["checkpoints"]  # no request above had an effect


def fill(text: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        text = text.replace(name, value)
    return text


def replace_ids(text: str, ids: dict[str, str]) -> str:
    """The text with ids replaced by names, longest first: a model's id contains its session's."""
    for name, value in sorted(ids.items(), key=lambda item: -len(item[1])):
        text = text.replace(value, name)
    return text


VALUES = [None, 0, -1, 2**31, 2**63, 2**64, 10**40, 1.5, -0.0, True, "", "x" * 3000, "\x00", [], {}]
LITERALS = [b"NaN", b"Infinity", b"1e999", b'"\\ud800"', b"\xff", b"[[[[", b"}", b'"\\u0000"']


def mutated(body: dict[str, Any], randomness: random.Random) -> bytes:
    """The body with one value replaced, or with broken bytes in its text."""
    copy = json.loads(json.dumps(body))
    holder, key = randomness.choice(list(places(copy)))
    if randomness.random() < 0.6:
        holder[key] = randomness.choice(VALUES)
        return json.dumps(copy).encode()
    holder[key] = "@@"
    return json.dumps(copy).encode().replace(b'"@@"', randomness.choice(LITERALS))


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


async def test_mutated_json_never_causes_a_5xx(service: Any, bodies: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    sampler = await service.sampler(session)
    save = {"model_id": model, "seq_id": 9, "path": "a", "ttl_seconds": 3600, "user_metadata": {}}
    targets = {
        "data": [1],
        "dtype": "int64",
        "shape": [1, 2],
        "sparse_crow_indices": [0, 1],
        "sparse_col_indices": [0],
    }
    full_sample = bodies.asample(
        sampler,
        1,
        target_prompt_logprobs=targets,
        sampling_params={"max_tokens": 2, "stop": ["a"], "top_k": 3, "top_p": 0.5},
    )
    templates: list[tuple[str, dict[str, Any]]] = [
        ("/create_session", {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "1"}),
        ("/create_model", bodies.create_model(session, 5)),
        ("/optim_step", {"model_id": model, "seq_id": 9, "adam_params": {"learning_rate": 0.1}}),
        (
            "/create_custom_loss",
            {
                "session_id": session,
                "custom_loss_seq_id": 1,
                "name": "a",
                "inputs": [{"name": "logprobs", "rank": 1}],
                "graph": {"nodes": [{"op": "output", "name": "a", "target": "a", "args": [1]}]},
            },
        ),
        ("/save_weights", save),
        ("/save_weights_for_sampler", {**save, "sampling_session_seq_id": 1}),
        ("/save_weights_external", {**save, "age_encryption_recipients": ["age1"]}),
        ("/load_weights", {"model_id": model, "seq_id": 9, "path": "x", "optimizer": True}),
        (
            "/load_weights",
            {"session_id": session, "model_seq_id": 9, "path": "x", "optimizer": True},
        ),
        ("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1}),
        ("/asample", full_sample),
        ("/retrieve_future", {"request_id": "req_x"}),
        (f"/sessions/{session}/finish", {"reason": {"type": "x"}, "detail": None}),
    ]
    randomness = random.Random(20)
    for _ in range(400):
        path, body = randomness.choice(templates)
        content = mutated(body, randomness)
        response = await service.call("POST", path, content=content)
        if response.status_code != 200:
            assert_failure(response)
        elif request_id := response.json().get("request_id"):
            outcome = await service.call(
                "POST", "/retrieve_future", json={"request_id": request_id}
            )
            assert outcome.status_code in (200, 408), (content, outcome.text)


async def test_mutated_protobuf_never_causes_a_5xx_and_is_never_lost(
    service: Any, bodies: Any
) -> None:
    model = await service.model(await service.session())
    good = bodies.forward_backward(model, 1)
    randomness = random.Random(21)
    for _ in range(150):
        content = bytearray(good)
        for _ in range(randomness.randint(1, 3)):
            content[randomness.randrange(len(content))] = randomness.randrange(256)
        content = content[: randomness.randint(0, len(content))]
        response = await service.call("POST", "/forward_backward", content=bytes(content))
        if response.status_code != 200:
            assert_failure(response)
    assert (await service.get("/healthz"))["worker"] == "ready"
