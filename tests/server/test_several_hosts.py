"""Two API processes and their workers on one Redis, as on two hosts with shared files."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.redis_server import RedisServer
from tests.server.conftest import Api
from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.store.open import open_store
from tuneserve_server.app import create_app
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio

OTHER = replace(FAKE_INFO, name="other/model")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@contextlib.asynccontextmanager
async def host(name: str, redis: RedisServer, folder: Path) -> AsyncIterator[Api]:
    """A separate API process, as far as one process can imitate it."""
    settings = ApiSettings(
        data_dir=folder / name,
        files_dir=folder / "shared",
        store=redis.url,
        base_model_name="tuneserve/fake",
        poll_s=0.5,
        sweep_s=0.05,  # sweep in both processes, all the time
    )
    store = await open_store(settings)
    app = create_app(settings, store)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        api = Api(app, http)
        yield api
        await api.kill_workers()
    await store.close()
    assert not (folder / name).exists()  # no part of the store is on this host


@pytest.fixture
async def hosts(redis: RedisServer, tmp_path: Path) -> AsyncIterator[tuple[Api, Api]]:
    async with host("a", redis, tmp_path) as a, host("b", redis, tmp_path) as b:
        yield a, b


async def test_one_api_process_answers_for_requests_that_another_accepted(
    hosts: tuple[Api, Api], bodies: Any
) -> None:
    a, b = hosts
    session = await a.session()
    await b.post("/session_heartbeat", {"session_id": session})
    await a.start_worker("on-a")
    answer = await b.post("/create_model", bodies.create_model(session))
    assert await a.post("/create_model", bodies.create_model(session)) == answer
    await a.result(answer)
    model = f"{session}:train:0"
    steps = [await (a, b)[seq % 2].forward_backward(model, seq) for seq in (2, 1, 3)]
    polls = [(b, a)[number % 2].output(step) for number, step in enumerate(steps)]
    assert len(await asyncio.gather(*polls)) == 3


async def test_every_api_process_knows_the_workers_of_all(hosts: tuple[Api, Api]) -> None:
    a, b = hosts
    assert (await a.get("/healthz"))["worker"] == "absent"
    await a.start_worker("on-a")
    await b.start_worker("on-b", OTHER)
    await asyncio.sleep(0.5)  # an earlier answer stays cached for this long
    for api in hosts:
        health = await api.get("/healthz")
        assert (health["worker"], health["store"]) == ("ready", "redis")
        assert health["durability"] == "always"
        assert {each["name"]: each["workers"] for each in health["base_models"]} == {
            "tuneserve/fake": 1,
            "other/model": 1,
        }


async def test_a_worker_on_another_host_takes_over_from_a_dead_one(
    hosts: tuple[Api, Api], bodies: Any
) -> None:
    a, b = hosts
    await a.start_worker("worker")
    session = await a.session()
    model = await a.model(session)
    await a.output(await a.forward_backward(model, 1))
    await a.kill_worker("worker")
    step = {"model_id": model, "seq_id": 2, "adam_params": {}}
    waiting = await a.post("/optim_step", step)
    save = await b.post("/save_weights", {"model_id": model, "seq_id": 3, "path": "x"})
    await b.start_worker("worker")
    assert "error" not in await b.result(waiting)
    path = (await a.result(save))["path"]
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    await a.result(await b.post("/load_weights", load))


async def test_a_poll_on_one_host_is_woken_by_a_result_from_another(
    hosts: tuple[Api, Api], bodies: Any
) -> None:
    a, b = hosts
    answer = await a.post("/create_model", bodies.create_model(await a.session()))
    waiting = asyncio.create_task(a.result(answer))
    await asyncio.sleep(0.1)
    await b.start_worker("on-b")
    assert (await waiting)["model_id"] == answer["model_id"]


async def test_clients_of_a_sampling_session_may_connect_to_any_host(
    hosts: tuple[Api, Api], bodies: Any
) -> None:
    a, b = hosts
    sampler = await a.sampler(await a.session())
    joining = (
        api.post("/join_sampling_session", {"sampling_session_id": sampler}) for api in hosts
    )
    assert {each["client_counter"] for each in await asyncio.gather(*joining)} == {1, 2}
    first, second = [await a.post("/asample", bodies.asample(sampler, seq)) for seq in (0, 1)]
    poll = {"target": {"sampling_session_id": sampler}}
    waiting = asyncio.create_task(a.post("/retrieve_futures", poll))
    await asyncio.sleep(0.1)
    await b.post("/cancel_future", {"request_id": first["request_id"]})
    told = await waiting
    assert told["completions"] == [{"state": "failed", "request_id": first["request_id"]}]
    poll["prev_cursor"] = told["cursor"]
    waiting = asyncio.create_task(b.post("/retrieve_futures", poll))
    await asyncio.sleep(0.1)
    await a.start_worker("on-a")
    # the completion took longer than poll_s
    while not (completions := (await waiting)["completions"]):
        waiting = asyncio.create_task(b.post("/retrieve_futures", poll))
    (done,) = completions
    assert (done["state"], done["request_id"]) == ("finished", second["request_id"])


async def test_while_redis_is_away_requests_are_refused_for_now_and_polls_are_held(
    hosts: tuple[Api, Api], redis: RedisServer, bodies: Any
) -> None:
    a, _ = hosts
    session = await a.session()
    answer = await a.post("/create_model", bodies.create_model(session))
    redis.kill()
    response = await a.call("POST", "/create_model", json=bodies.create_model(session, 1))
    assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
    response = await a.call("POST", "/retrieve_future", json=answer)
    assert (response.status_code, response.json()["queue_state"]) == (408, "paused_capacity")
    redis.start()
    async with asyncio.timeout(5):
        while (await a.call("POST", "/session_heartbeat", json={"session_id": session})).is_error:
            await asyncio.sleep(0.05)
    await a.start_worker("on-a")
    await a.result(answer)
