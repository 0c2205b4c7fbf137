"""Creating and training models: accepted requests, refused ones, and the form of refusals."""

import asyncio
import math
from typing import Any

import pytest

pytestmark = pytest.mark.anyio


async def test_a_model_is_created_trained_and_described(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    assert model == f"{session}:train:0"
    # The fake backend's logprob of y after x is -(1 + (x + y) % 8) / 8; here x + y is 3, then 5.
    output = await service.output(await service.forward_backward(model, 1, (1, 2, 3)))
    assert output.metrics == {"loss:sum": pytest.approx(4 / 8 + 6 / 8)}
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    result = await service.result(await service.post("/optim_step", step))
    assert "error" not in result
    info = await service.post("/get_info", {"model_id": model, "type": "get_info"})
    assert info["model_data"]["model_name"] == "tuneserve/fake"
    assert info["model_data"]["tokenizer_id"] == "tuneserve/fake"
    assert (info["lora_rank"], info["is_lora"]) == (4, True)
    assert info["optimizer_config"] == {"type": "adamw"}


async def test_the_seed_is_chosen_once_if_none_is_given(service: Any, bodies: Any) -> None:
    session = await service.session()
    request = bodies.create_model(session, lora_config={"rank": 2})
    first = await service.post("/create_model", request)
    again = await service.post("/create_model", request)
    assert first == again
    await service.result(first)
    other = await service.post(
        "/create_model", bodies.create_model(session, 1, lora_config={"rank": 2})
    )
    await service.result(other)
    seeds = {service.backend._adapters[f"{session}:train:{n}"].state.config.seed for n in (0, 1)}
    assert len(seeds) == 2


async def test_an_unknown_base_model_is_refused_with_the_one_that_is_served(
    api: Any, bodies: Any
) -> None:
    request = bodies.create_model(await api.session(), base_model="Qwen/Qwen3-8B")
    response = await api.call("POST", "/create_model", json=request)
    assert response.status_code == 400
    assert "'tuneserve/fake'" in response.json()["detail"]


async def test_a_base_model_name_may_carry_a_suffix(service: Any, bodies: Any) -> None:
    request = bodies.create_model(await service.session(), base_model="tuneserve/fake:peft:64")
    model = (await service.result(await service.post("/create_model", request)))["model_id"]
    info = await service.post("/get_info", {"model_id": model})
    assert info["model_name"] == "tuneserve/fake"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lora_config": {"rank": 0}}, "lora_config.rank is 0; this server takes 1 to 32"),
        ({"lora_config": {"rank": 33}}, "rank is 33"),
        ({"lora_config": {"rank": 4, "seed": -1}}, "seed is -1"),
        ({"lora_config": {"rank": 10**40}}, "rank is a number of 133 bits"),
        (
            {
                "lora_config": {
                    "rank": 4,
                    "train_attn": False,
                    "train_mlp": False,
                    "train_unembed": False,
                }
            },
            "trains nothing",
        ),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "whose rule is not public"),
        ({"optimizer_config": {"type": "lion"}}, "optimizer_config.type is not an optimizer"),
        ({"lora_config": "x"}, "lora_config"),
        ({"user_metadata": {"a": "x" * 70_000}}, "user_metadata has 70001 bytes"),
        ({"user_metadata": {"a": {"b": 1}}}, "user_metadata"),
    ],
)
async def test_a_creation_that_cannot_be_carried_out_fails_in_its_future(
    service: Any, bodies: Any, fields: dict[str, Any], named: str
) -> None:
    session = await service.session()
    answer = await service.post("/create_model", bodies.create_model(session, **fields))
    assert named in await service.error(answer)
    response = await service.call("POST", "/get_info", json={"model_id": f"{session}:train:0"})
    assert response.status_code == 404


async def test_before_the_first_worker_a_rank_is_checked_by_the_worker_to_come(
    api: Any, bodies: Any
) -> None:
    request = bodies.create_model(await api.session(), lora_config={"rank": 33})
    answer = await api.post("/create_model", request)
    await api.start_worker()
    assert "rank is 33; this server takes 1 to 32" in await api.error(answer)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"learning_rate": -1.0}, "adam_params.learning_rate is -1.0; it must be at least 0"),
        ({"beta1": 1.0}, "adam_params.beta1 is 1.0; it must be at least 0 and below 1"),
        ({"beta2": -0.1}, "adam_params.beta2 is -0.1"),
        ({"eps": -1e-9}, "adam_params.eps is -1e-09"),
        ({"weight_decay": -0.5}, "adam_params.weight_decay is -0.5"),
        ({"grad_clip_norm": "1"}, "adam_params.grad_clip_norm"),
        (None, "adam_params is missing"),
    ],
)
async def test_a_bad_hyper_parameter_is_named_and_uses_its_position(
    service: Any, params: dict[str, Any] | None, named: str
) -> None:
    model = await service.model(await service.session())
    step: dict[str, Any] = {"model_id": model, "seq_id": 1}
    if params is None:
        step["optimizer_params"] = {"type": "dimuon", "learning_rate": 1.0}
    else:
        step["adam_params"] = params
    assert named in await service.error(await service.post("/optim_step", step))
    good = {"model_id": model, "seq_id": 2, "adam_params": {}}
    assert "error" not in await service.result(await service.post("/optim_step", good))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_a_non_finite_hyper_parameter_is_refused(service: Any, literal: str) -> None:
    model = await service.model(await service.session())
    body = f'{{"model_id":"{model}","seq_id":1,"adam_params":{{"learning_rate":{literal}}}}}'
    answer = await service.post("/optim_step", content=body)
    assert "adam_params.learning_rate" in await service.error(answer)


async def test_a_negative_clip_norm_means_no_clipping(service: Any) -> None:
    model = await service.model(await service.session())
    step = {"model_id": model, "seq_id": 1, "adam_params": {"grad_clip_norm": -1.0}}
    assert "error" not in await service.result(await service.post("/optim_step", step))


async def test_a_zstd_body_is_accepted(service: Any, bodies: Any) -> None:
    import zstandard

    model = await service.model(await service.session())
    body = zstandard.compress(bodies.forward_backward(model, 1))
    answer = await service.forward_backward(
        model, 1, content=body, headers={"Content-Encoding": "zstd"}
    )
    assert (await service.output(answer)).metrics["loss:sum"] == pytest.approx(10 / 8)


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
async def test_broken_zstd_is_malformed(service: Any, bodies: Any, cut: int) -> None:
    import zstandard

    model = await service.model(await service.session())
    body = zstandard.compress(bodies.forward_backward(model, 1))[:cut]
    response = await service.call(
        "POST", "/forward_backward", content=body, headers={"Content-Encoding": "zstd"}
    )
    assert response.status_code == 422


async def test_a_decompression_bomb_is_stopped_at_the_limit(service: Any, bodies: Any) -> None:
    import zstandard

    model = await service.model(await service.session())
    plain = bodies.forward_backward(model, 1) + bytes.fromhex("1a80808064") + bytes(200 * 2**20)
    bomb = zstandard.compress(plain)
    assert len(bomb) < 10_000
    response = await service.call(
        "POST", "/forward_backward", content=bomb, headers={"Content-Encoding": "zstd"}
    )
    assert response.status_code == 413
    assert "67108864 bytes after decompression" in response.json()["detail"]
    await service.output(await service.forward_backward(model, 2))


async def test_another_encoding_is_refused(service: Any) -> None:
    response = await service.call(
        "POST", "/forward_backward", content=b"x", headers={"Content-Encoding": "gzip"}
    )
    assert (response.status_code, response.json()["code"]) == (415, "unknown_encoding")


async def test_a_body_over_the_limit_is_413_and_uses_its_position(
    service: Any, bodies: Any
) -> None:
    model = await service.model(await service.session())
    body = bodies.forward_backward(model, 1) + bytes.fromhex("1a80808008") + bytes(17 * 2**20)
    response = await service.call("POST", "/forward_backward", content=body)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert "16777216 bytes" in response.json()["detail"]
    output = await service.output(await service.forward_backward(model, 2))
    assert math.isfinite(output.metrics["loss:sum"])


async def test_a_truncated_message_uses_its_position(service: Any, bodies: Any) -> None:
    model = await service.model(await service.session())
    answer = await service.forward_backward(
        model, 1, content=bodies.forward_backward(model, 1)[:-3]
    )
    assert "not a whole ForwardBackwardRequest" in await service.error(answer)
    await service.output(await service.forward_backward(model, 2))


async def test_the_same_number_for_another_kind_of_request_is_refused(service: Any) -> None:
    model = await service.model(await service.session())
    await service.forward_backward(model, 1)
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    response = await service.call("POST", "/optim_step", json=step)
    assert (response.status_code, response.json()["code"]) == (422, "malformed")


async def test_an_ended_session_accepts_no_more_requests(service: Any, bodies: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    sampler = await service.sampler(session)
    finish = {"reason": {"type": "success"}, "detail": None}
    await service.post(f"/sessions/{session}/finish", finish)
    for path, body in (
        ("/create_model", bodies.create_model(session, 1)),
        ("/asample", bodies.asample(sampler, 0)),
        ("/session_heartbeat", {"session_id": session}),
    ):
        response = await service.call("POST", path, json=body)
        assert (response.status_code, response.json()["code"]) == (410, "session_ended"), path
        assert "(success)" in response.json()["detail"]
    assert "ended" in await service.error(await service.forward_backward(model, 1))


async def test_a_model_whose_creation_failed_says_so(service: Any, bodies: Any) -> None:
    session = await service.session()

    def refuse(*_: object) -> None:
        raise RuntimeError("device on fire")

    service.backend.create_adapter = refuse
    answer = await service.post("/create_model", bodies.create_model(session))
    assert (await service.result(answer))["category"] == "server"
    later = await service.forward_backward(f"{session}:train:0", 1)
    assert "creation failed" in await service.error(later)


async def test_a_poll_is_woken_by_the_result(api: Any, bodies: Any) -> None:
    session = await api.session()
    answer = await api.post("/create_model", bodies.create_model(session))
    waiting = asyncio.create_task(api.result(answer))
    await asyncio.sleep(0.05)
    await api.start_worker()
    assert (await waiting)["model_id"] == f"{session}:train:0"
