"""Several base models in one service, each with its own workers."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.records import ModelRecord, Update
from tuneserve_server.base_models import BaseModels

pytestmark = pytest.mark.anyio

SMALL = replace(FAKE_INFO, name="other/small", context_length=32, max_rank=16, vocab_size=40)


@pytest.fixture
async def two(api: Any) -> Any:
    """The API with one worker for each of two base models."""
    await api.start_worker("fake")
    await api.start_worker("small", SMALL)
    return api


async def test_the_capabilities_and_health_list_every_base_model_with_a_worker(two: Any) -> None:
    await two.start_worker("small-2", SMALL)
    capabilities = await two.get("/get_server_capabilities")
    assert {
        model["model_name"]: model["max_context_length"]
        for model in capabilities["supported_models"]
    } == {"tuneserve/fake": 64, "other/small": 32}
    health = await two.get("/healthz", key=None)
    assert (health["worker"], health["base_model"]) == ("ready", "tuneserve/fake")
    assert [(each["name"], each["workers"]) for each in health["base_models"]] == [
        ("tuneserve/fake", 1),
        ("other/small", 2),
    ]
    await two.stop_worker("fake")
    health = await two.get("/healthz", key=None)
    assert (health["worker"], health["base_model"]) == ("ready", "other/small")
    await two.stop_worker("small")
    await two.stop_worker("small-2")
    health = await two.get("/healthz", key=None)
    assert health["worker"] == "absent"
    assert {each["name"]: each["workers"] for each in health["base_models"]} == {
        "tuneserve/fake": 0,
        "other/small": 0,
    }


async def test_each_model_is_trained_by_a_worker_of_its_base_model(two: Any, bodies: Any) -> None:
    session = await two.session()
    for number, name in enumerate(("tuneserve/fake", "other/small")):
        request = bodies.create_model(session, number, base_model=name)
        await two.result(await two.post("/create_model", request))
        model = f"{session}:train:{number}"
        await two.output(await two.forward_backward(model, 1))
        info = await two.post("/get_info", {"model_id": model})
        assert (info["model_name"], info["model_data"]["model_name"]) == (name, name)
        run = await two.get(f"/training_runs/{model}")
        assert run["base_model"] == name


async def test_a_rank_is_checked_against_the_limits_of_its_base_model(
    two: Any, bodies: Any
) -> None:
    session = await two.session()
    lora = {"rank": 17, "seed": 1}
    small = bodies.create_model(session, 0, base_model="other/small", lora_config=lora)
    error = await two.error(await two.post("/create_model", small))
    assert "lora_config.rank is 17; this server takes 1 to 16 for 'other/small'" in error
    large = bodies.create_model(session, 1, lora_config=lora)
    await two.result(await two.post("/create_model", large))


async def test_a_prompt_is_checked_against_the_base_model_of_its_sampler(
    two: Any, bodies: Any
) -> None:
    session = await two.session()
    for number, name in enumerate(("tuneserve/fake", "other/small")):
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": name}
        await two.post("/create_sampling_session", body)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [40]}]}
    fits = await two.post("/asample", bodies.asample(f"{session}:sample:0", 0, prompt=prompt))
    assert (await two.poll(fits["request_id"])).headers["content-type"].endswith("protobuf")
    wrong = await two.post("/asample", bodies.asample(f"{session}:sample:1", 0, prompt=prompt))
    assert "token 40; token ids are 0 to 39" in await two.error(wrong)


async def test_an_unserved_base_model_is_refused_with_the_names_of_the_served_ones(
    two: Any, bodies: Any
) -> None:
    request = bodies.create_model(await two.session(), base_model="third/model")
    response = await two.call("POST", "/create_model", json=request)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
    detail = response.json()["detail"]
    assert all(name in detail for name in ("'third/model'", "'tuneserve/fake'", "'other/small'"))


async def test_requests_for_a_base_model_without_a_worker_wait_and_say_so(
    two: Any, bodies: Any
) -> None:
    session = await two.session()
    await two.stop_worker("small")
    request = bodies.create_model(session, 0, base_model="other/small")
    created = await two.post("/create_model", request)
    step = await two.forward_backward(f"{session}:train:0", 1)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "other/small"}
    await two.post("/create_sampling_session", body)
    sampled = await two.post("/asample", bodies.asample(f"{session}:sample:0", 0))
    for answer in (created, step, sampled):
        response = await two.call("POST", "/retrieve_future", json=answer)
        assert response.status_code == 408
        assert response.json()["queue_state"] == "paused_capacity"
        reason = response.json()["queue_state_reason"]
        assert reason == "no worker for other/small is connected; waiting for one"
    # Requests for the other base model are not held up.
    await two.model(session, 1)
    held = {"model_id": f"{session}:train:1", "seq_id": 2, "adam_params": {}}
    waiting = await two.post("/optim_step", held)
    response = await two.call("POST", "/retrieve_future", json=waiting)
    assert (response.status_code, response.json()["queue_state"]) == (408, "active")
    await two.start_worker("small", SMALL)
    await two.result(created)
    await two.output(step)
    assert (await two.poll(sampled["request_id"])).status_code == 200


async def test_models_wait_beside_workers_that_only_sample_and_say_so(
    two: Any, bodies: Any
) -> None:
    session = await two.session()
    creation = bodies.create_model(session, 0, base_model="other/small")
    await two.result(await two.post("/create_model", creation))
    await two.stop_worker("small")
    await two.services.store.lease("sampler", "a process", SMALL, 0.0)
    step = await two.forward_backward(f"{session}:train:0", 1)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "other/small"}
    await two.post("/create_sampling_session", body)
    sampled = await two.post("/asample", bodies.asample(f"{session}:sample:0", 0))
    reason = "no worker that trains other/small is connected; waiting for one"
    for answer, told in ((step, ("paused_capacity", reason)), (sampled, ("active", None))):
        response = await two.call("POST", "/retrieve_future", json=answer)
        found = response.json()
        assert (found["queue_state"], found.get("queue_state_reason")) == told
    (small,) = (
        each
        for each in (await two.get("/healthz", key=None))["base_models"]
        if each["name"] == "other/small"
    )
    assert (small["workers"], small["samplers"]) == (1, 1)


async def test_a_checkpoint_loads_only_into_its_own_base_model(two: Any, bodies: Any) -> None:
    session = await two.session()
    model = await two.model(session)
    save = {"model_id": model, "seq_id": 1, "path": "a"}
    path = (await two.result(await two.post("/save_weights", save)))["path"]
    other = bodies.create_model(session, 1, base_model="other/small")
    await two.result(await two.post("/create_model", other))
    message = "was trained on 'tuneserve/fake' and cannot be used with 'other/small'"
    into = {"model_id": f"{session}:train:1", "seq_id": 1, "path": path, "optimizer": True}
    assert message in await two.error(await two.post("/load_weights", into))
    new = {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": True}
    answer = await two.post("/load_weights", {**new, "base_model": "other/small"})
    assert message in await two.error(answer)
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    response = await two.call(
        "POST", "/create_sampling_session", json={**sampling, "base_model": "other/small"}
    )
    assert (response.status_code, message in response.json()["detail"]) == (400, True)
    # Its own base model is accepted, whether the request names it or not.
    await two.result(await two.post("/load_weights", {**new, "model_seq_id": 3}))
    await two.post("/create_sampling_session", sampling)
    info = await two.post("/get_info", {"model_id": f"{session}:train:3"})
    assert info["model_name"] == "tuneserve/fake"


async def test_facts_of_a_base_model_outlive_its_workers(two: Any, bodies: Any) -> None:
    session = await two.session()
    request = bodies.create_model(session, base_model="other/small")
    await two.result(await two.post("/create_model", request))
    await two.stop_worker("small")
    info = await two.post("/get_info", {"model_id": f"{session}:train:0"})
    assert (info["model_data"]["arch"], info["model_data"]["tokenizer_id"]) == (
        "fake",
        "tuneserve/fake",
    )


async def test_clients_get_the_tokenizer_that_the_worker_names_for_them(
    two: Any, bodies: Any
) -> None:
    named = replace(SMALL, name="a/model", tokenizer_id="/here", client_tokenizer_id="hub/model")
    await two.start_worker("named", named)
    session = await two.session()
    await two.result(
        await two.post("/create_model", bodies.create_model(session, base_model="a/model"))
    )
    info = await two.post("/get_info", {"model_id": f"{session}:train:0"})
    assert info["model_data"]["tokenizer_id"] == "hub/model"


async def test_a_base_model_is_dropped_a_quarter_of_an_hour_after_its_last_worker(
    two: Any, bodies: Any
) -> None:
    await two.stop_worker("small")
    services = two.app.state.services
    request = bodies.create_model(await two.session(), base_model="other/small")

    def at(seconds: float) -> Any:
        """The service at a later time, with its other worker still alive."""
        import time

        later = BaseModels(services.store, "x", fresh_s=0.0, clock=lambda: time.time() + seconds)
        return replace(services, served=later)

    two.app.state.services = at(901)
    response = await two.call("POST", "/create_model", json=request)
    assert response.status_code == 400
    two.app.state.services = at(890)
    assert (await two.call("POST", "/create_model", json=request)).status_code == 200
    two.app.state.services = services


async def test_a_run_that_was_restored_with_other_results_says_so(service: Any) -> None:
    model = await service.model(await service.session())
    run = await service.get(f"/training_runs/{model}")
    assert (run["corrupted"], run["diverged"]) == (False, False)
    await service.services.store.update_record(Update("model", model, {"diverged": True}))
    assert (await service.services.store.get_record(ModelRecord, model)).diverged
    run = await service.get(f"/training_runs/{model}")
    assert (run["corrupted"], run["diverged"]) == (True, True)


async def test_a_run_whose_state_is_lost_is_corrupted_but_not_diverged(service: Any) -> None:
    model = await service.model(await service.session())
    await service.services.store.update_record(Update("model", model, {"status": "lost"}))
    run = await service.get(f"/training_runs/{model}")
    assert (run["corrupted"], run["diverged"]) == (True, False)


async def test_health_and_models_show_the_revision_of_a_base_model_from_the_hub(
    two: Any, bodies: Any
) -> None:
    await two.start_worker("pinned", replace(SMALL, name="hub/model", revision="a" * 40))
    health = await two.get("/healthz", key=None)
    assert {each["name"]: each.get("revision") for each in health["base_models"]} == {
        "tuneserve/fake": None,
        "other/small": None,
        "hub/model": "a" * 40,
    }
    session = await two.session()
    for number, (name, revision) in enumerate((("hub/model", "a" * 40), ("other/small", None))):
        request = bodies.create_model(session, number, base_model=name)
        await two.result(await two.post("/create_model", request))
        info = await two.post("/get_info", {"model_id": f"{session}:train:{number}"})
        assert info.get("base_model_revision") == revision
