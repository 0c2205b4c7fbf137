"""Overload: requests over a limit are refused for now, and accepted requests continue."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import SessionRecord, Update
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server import errors
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.access.limits import DiskGuard
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    return ApiSettings(
        data_dir=tmp_path,
        base_model_name="tuneserve/fake",
        poll_s=0.2,
        max_model_jobs=3,
        max_tenant_jobs=5,
        max_server_jobs=8,
        max_tenant_models=2,
        max_polls_per_tenant=2,
        max_checkpoints=2,
    )


def assert_put_off(response: httpx.Response, code: str = "overloaded", status: int = 429) -> str:
    """The reason of a refusal. It must have the shape of every failure and a ``Retry-After``."""
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    assert set(response.json()) == {"detail", "code"}
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert int(response.headers["content-length"]) == len(response.content)
    detail: str = response.json()["detail"]
    return detail


async def forward_backward(api: Any, bodies: Any, model: str, seq_id: int) -> httpx.Response:
    body = bodies.forward_backward(model, seq_id)
    response: httpx.Response = await api.call("POST", "/forward_backward", content=body)
    return response


async def test_a_request_over_the_limit_of_its_model_is_refused_for_now_and_accepted_later(
    api: Any, bodies: Any
) -> None:
    session = await api.session()
    model = f"{session}:train:0"
    created = await api.post("/create_model", bodies.create_model(session))
    accepted = [await api.forward_backward(model, seq) for seq in (1, 2)]
    detail = assert_put_off(await forward_backward(api, bodies, model, 3))
    assert f"model {model} has 3 unfinished requests" in detail
    # A resent request that was accepted before is not a new request.
    assert await api.forward_backward(model, 2) == accepted[1]
    await api.start_worker()
    await api.result(created)
    for answer in accepted:
        await api.output(answer)
    await api.output(await api.forward_backward(model, 3))


async def test_a_tenant_at_its_limit_is_refused_for_now_and_others_are_not(
    api: Any, bodies: Any
) -> None:
    sampler = await api.sampler(await api.session())
    for seq in range(5):
        await api.post("/asample", bodies.asample(sampler, seq))
    put_off = await api.call("POST", "/asample", json=bodies.asample(sampler, 5))
    assert "5 unfinished requests" in assert_put_off(put_off)
    theirs = await api.sampler(await api.session(key="tml-b"), key="tml-b")
    for seq in range(3):
        await api.post("/asample", bodies.asample(theirs, seq), key="tml-b")
    everyone = await api.call("POST", "/asample", json=bodies.asample(theirs, 3), key="tml-b")
    assert "the server has 8" in assert_put_off(everyone)


async def test_a_tenant_has_a_limited_number_of_active_models(
    service: Any, bodies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = await service.session()
    for number in range(4):  # above two models, the idlest is parked for the next
        await service.model(session, number)
    await service.stop_worker()
    for number in (4, 5):  # these models wait for a worker, so they are not idle
        await service.post("/create_model", bodies.create_model(session, number))
    again = await service.session()
    with caplog.at_level(logging.WARNING):
        waiting = await service.post("/create_model", bodies.create_model(again, 0))
    assert waiting["model_id"] == f"{again}:train:0"
    assert f"model {again}:train:0 waits for room" in caplog.text
    assert open_tenant("tml-a") in caplog.text and "max_tenant_models" in caplog.text
    response = await service.call("POST", "/retrieve_future", json=waiting)
    assert (response.status_code, response.json()["queue_state"]) == (408, "paused_capacity")
    assert "2 models are in use" in response.json()["queue_state_reason"]
    await service.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    await service.start_worker()
    await service.app.state.services.store.sweep(time.time(), SweepPolicy())
    assert (await service.result(waiting))["model_id"] == f"{again}:train:0"


async def test_models_above_the_limit_of_waiting_models_are_refused_for_now(
    api: Any, bodies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = api.app.state.services.store
    store._policy = replace(store._policy, waiting_models=1)
    session = await api.session()
    for number in range(3):
        await api.post("/create_model", bodies.create_model(session, number))
    errors._put_off.forget()
    with caplog.at_level(logging.WARNING):
        last = bodies.create_model(session, 99)
        response = await api.call("POST", "/create_model", json=last)
    assert "you have 2 models in use" in assert_put_off(response)
    assert "2 models in use" in caplog.text and open_tenant("tml-a") in caplog.text


async def test_polls_above_the_tenants_limit_end_after_a_second(api: Any, bodies: Any) -> None:
    """They do not end at once, because the client repeats a poll at once."""
    services = api.app.state.services
    api.app.state.services = replace(
        services, settings=services.settings.model_copy(update={"poll_s": 3.0})
    )
    answer = await api.post("/create_model", bodies.create_model(await api.session()))

    async def poll(**options: Any) -> tuple[str, float]:
        started_s = time.monotonic()
        response = await api.call("POST", "/retrieve_future", json=answer, **options)
        assert response.status_code == 408, response.text
        return response.json()["queue_state"], time.monotonic() - started_s

    states = await asyncio.gather(*(poll() for _ in range(4)))
    assert [state for state, _ in states] == ["paused_capacity"] * 2 + ["paused_rate_limit"] * 2
    assert all(3.0 <= held_s for _, held_s in states[:2])
    assert all(1.0 <= held_s < 3.0 for _, held_s in states[2:])
    assert (await poll())[0] == "paused_capacity"  # polls that ended no longer count


async def test_a_poll_over_the_limit_still_returns_a_result(service: Any, bodies: Any) -> None:
    session = await service.session()
    waiting = await service.post("/optim_step", await _held(service, session))
    done = await service.post("/create_model", bodies.create_model(session, 1))
    await service.result(done)
    polls = [
        asyncio.create_task(service.call("POST", "/retrieve_future", json=waiting))
        for _ in range(2)
    ]
    await asyncio.sleep(0.05)
    response = await service.call("POST", "/retrieve_future", json=done)
    assert (response.status_code, response.json()["model_id"]) == (200, f"{session}:train:1")
    await asyncio.gather(*polls)


async def _held(service: Any, session: str) -> dict[str, Any]:
    """A request that waits for an earlier one, which never arrives."""
    model = await service.model(session)
    return {"model_id": model, "seq_id": 2, "adam_params": {}}


async def test_every_tenant_has_its_own_limit_of_polls(api: Any, bodies: Any) -> None:
    answers = {
        key: await api.post(
            "/create_model", bodies.create_model(await api.session(key=key)), key=key
        )
        for key in ("tml-a", "tml-b")
    }
    polls = [
        api.call("POST", "/retrieve_future", json=answer, key=key)
        for key, answer in answers.items()
        for _ in range(2)
    ]
    responses = await asyncio.gather(*polls)
    assert {each.json()["queue_state"] for each in responses} == {"paused_capacity"}


async def test_a_tenant_stores_a_limited_number_of_checkpoints_and_may_replace_them(
    service: Any,
) -> None:
    model = await service.model(await service.session())

    async def save(seq_id: int, name: str, route: str = "/save_weights", **fields: Any) -> Any:
        request = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
        return await service.post(route, request)

    for seq, name in enumerate(("a", "b"), 1):
        await service.result(await save(seq, name))
    assert "you have 2 checkpoints" in await service.error(await save(3, "c"))
    export = await save(4, "c", "/save_weights_external")
    assert "you have 2 checkpoints" in await service.error(export)
    await service.result(await save(5, "a", overwrite=True))
    unnamed = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0}
    await service.result(await service.post("/save_weights_for_sampler", unnamed))
    await service.ok("DELETE", f"/training_runs/{model}/checkpoints/weights/a")
    await service.result(await save(7, "c"))


async def test_on_a_nearly_full_disk_requests_are_refused_for_now_and_deletions_work(
    service: Any, bodies: Any
) -> None:
    session = await service.session()
    model = await service.model(session)
    save = {"model_id": model, "seq_id": 1, "path": "a"}
    await service.result(await service.post("/save_weights", save))
    services = service.app.state.services
    full = DiskGuard([Path("data")], 2**30, free_bytes=lambda _: 2**30 - 1)
    service.app.state.services = replace(services, disk=full)
    detail = assert_put_off(
        await forward_backward(service, bodies, model, 2), code="disk_full", status=503
    )
    assert "1073741823 bytes left, of which 1073741824 are reserved" in detail
    await service.ok("DELETE", f"/training_runs/{model}/checkpoints/weights/a")
    assert (await service.get("/healthz"))["disk"] == "full"
    service.app.state.services = services
    await service.output(await service.forward_backward(model, 2))


@pytest.mark.parametrize("path", ["/create_session", "/forward_backward"])
async def test_an_upload_in_progress_is_refused_for_now_when_the_process_stops(
    api: Any, path: str
) -> None:
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await asyncio.Event().wait()

    uploading = asyncio.create_task(api.call("POST", path, content=endless()))
    await begun.wait()
    api.services.polls.release()
    response = await asyncio.wait_for(uploading, 5)
    assert "stopping" in assert_put_off(response, code="store_unavailable", status=503)
    await api.session()  # a request that arrives whole is still accepted


@pytest.mark.parametrize("error", [StoreFailed, ConnectionError])
async def test_while_the_store_is_unreachable_requests_are_refused_and_polls_continue(
    api: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    answer = await api.post("/create_model", bodies.create_model(await api.session()))
    store = api.services.store

    async def away(*_: object, **__: object) -> None:
        raise error("the store is away")

    with monkeypatch.context() as patch:
        names = ("submit", "job_key", "wait", "get_record", "base_models", "update_record")
        for name in (*names, "put_new_record"):
            patch.setattr(store, name, away)
        for path, body in (
            ("/create_session", {}),
            ("/create_model", bodies.create_model("s-x")),
            ("/optim_step", {"model_id": "s-x:train:0", "seq_id": 1, "adam_params": {}}),
            ("/asample", bodies.asample("s-x:sample:0", 1)),
        ):
            response = await api.call("POST", path, json=body)
            assert_put_off(response, code="store_unavailable", status=503)
        started_s = time.monotonic()
        response = await api.call("POST", "/retrieve_future", json=answer)
        assert (response.status_code, response.json()["queue_state"]) == (408, "paused_capacity")
        assert "store" in response.json()["queue_state_reason"]
        assert time.monotonic() - started_s >= 0.2
        health = await api.call("GET", "/healthz", key=None)
        assert_put_off(health, code="store_unavailable", status=503)
    await api.start_worker()
    await api.result(answer)


async def test_a_poll_counts_as_a_heartbeat_of_its_session(api: Any, bodies: Any) -> None:
    session = await api.session()
    sampler = await api.sampler(session)
    answers = [
        await api.post("/create_model", bodies.create_model(session)),
        await api.forward_backward(f"{session}:train:0", 1),
        await api.post("/asample", bodies.asample(sampler, 0)),
    ]
    store = api.services.store
    for number, answer in enumerate(answers):
        await store.update_record(Update("session", session, {"last_seen_s": 1.0}))
        api.services.last_seen._noted_s.clear()  # as if half a minute had passed
        await api.call("POST", "/retrieve_future", json=answer)
        seen_s = (await store.get_record(SessionRecord, session)).last_seen_s
        assert abs(seen_s - time.time()) < 10, number
    await store.update_record(Update("session", session, {"last_seen_s": 1.0}))
    response = await api.call("POST", "/retrieve_future", json=answers[0], key="tml-b")
    assert response.status_code == 404
    # another tenant's poll does not count
    assert (await store.get_record(SessionRecord, session)).last_seen_s == 1.0


async def test_a_session_that_was_silent_for_an_hour_continues_where_it_was(
    service: Any, bodies: Any
) -> None:
    session = await service.session()
    model = await service.model(session)
    sampler = await service.sampler(session)
    store, policy = service.services.store, service.services.settings.sweep_policy
    hour_ago_s = time.time() - 3600
    await store.update_record(Update("session", session, {"last_seen_s": hour_ago_s}))
    await store.sweep(time.time(), policy)
    await service.post("/session_heartbeat", {"session_id": session})
    await service.output(await service.forward_backward(model, 1))
    assert (
        await service.poll(
            (await service.post("/asample", bodies.asample(sampler, 0)))["request_id"]
        )
    ).status_code == 200


async def test_queued_samples_of_a_silent_session_are_dropped_with_a_reason(
    api: Any, bodies: Any
) -> None:
    session = await api.session()
    sampler = await api.sampler(session)
    answer = await api.post("/asample", bodies.asample(sampler, 0))
    store, policy = api.services.store, api.services.settings.sweep_policy
    await store.update_record(Update("session", session, {"last_seen_s": time.time() - 119}))
    await store.sweep(time.time(), policy)
    response = await api.call("POST", "/retrieve_future", json=answer)
    assert response.status_code == 408
    await store.update_record(Update("session", session, {"last_seen_s": time.time() - 121}))
    await store.sweep(time.time(), policy)
    assert "120 s" in await api.error(answer)
