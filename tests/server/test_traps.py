"""One test for each trap of the wire that the API can fall into, under the trap's number."""

import asyncio
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pydantic import ValidationError

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_client.wire.types import SampleRequest
from tuneserve_server import serve as serving
from tuneserve_server.cli import readiness
from tuneserve_server.commands.sampling import sample_command
from tuneserve_server.http.long_polls import LongPolls
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


async def test_protobuf_is_mandatory_both_ways(service: Any, bodies: Any) -> None:
    """Trap 1."""
    session = await service.session()
    model = await service.model(session)
    json_body = {"model_id": model, "seq_id": 1, "forward_backward_input": {}}
    response = await service.call("POST", "/forward_backward", json=json_body)
    assert response.status_code == 422
    assert "SDKs before 0.25" in response.json()["detail"]
    await service.output(await service.forward_backward(model, 1))
    sampler = await service.sampler(session)
    answer = await service.post("/asample", bodies.asample(sampler, 0))
    response = await service.poll(answer["request_id"])
    assert response.headers["content-type"] == "application/x-protobuf"
    assert len(wire.SampleResponse.FromString(response.content).sequences) == 1


@pytest.mark.parametrize("tokens", [[5], [99]], ids=["accepted", "rejected"])
async def test_every_sample_has_a_sequence_id(service: Any, bodies: Any, tokens: list[int]) -> None:
    """Trap 2: one id for each sample, also of a request that will fail."""
    sampler = await service.sampler(await service.session())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    body = bodies.asample(sampler, 3, num_samples=4, prompt=prompt)
    answer = await service.post("/asample", body)
    assert answer["sample_sequence_ids"] == [f"{sampler}:3:{i}" for i in range(4)]
    assert await service.post("/asample", body) == answer


async def test_a_model_id_consists_of_session_and_number(service: Any, bodies: Any) -> None:
    """Trap 3: the client computes the id, for created and for loaded models."""
    session = await service.session()
    for number in (0, 7):
        answer = await service.post("/create_model", bodies.create_model(session, number))
        assert (await service.result(answer))["model_id"] == f"{session}:train:{number}"
    save = {"model_id": f"{session}:train:7", "seq_id": 1, "path": "a"}
    path = (await service.result(await service.post("/save_weights", save)))["path"]
    load = {"session_id": session, "model_seq_id": 8, "path": path, "optimizer": True}
    await service.result(await service.post("/load_weights", load))
    info = await service.post("/get_info", {"model_id": f"{session}:train:8"})
    assert info["model_id"] == f"{session}:train:8"


async def test_requests_run_in_the_order_of_their_numbers_instead_of_their_arrival(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 4: the first chunk of a forward_backward arrives last, and its optim_step before it."""
    taken: list[int] = []
    take = api.services.store.take_jobs

    async def noting(*args: Any, **options: Any) -> Any:
        jobs = await take(*args, **options)
        taken.extend(job.position for job in jobs)
        return jobs

    monkeypatch.setattr(api.services.store, "take_jobs", noting)
    await api.start_worker()
    model = await api.model(await api.session())
    answers = {seq: await api.forward_backward(model, seq) for seq in (2, 3)}
    adam = {"model_id": model, "seq_id": 4, "adam_params": {}}
    answers[4] = await api.post("/optim_step", adam)
    for answer in answers.values():
        response = await api.call("POST", "/retrieve_future", json=answer)
        assert response.status_code == 408
    answers[1] = await api.forward_backward(model, 1)
    for answer in answers.values():
        assert (await api.poll(answer["request_id"])).status_code == 200
    assert taken == [0, 1, 2, 3, 4]


REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("/optim_step", {"adam_params": "x"}),
    ("/optim_step", {"adam_params": {"beta1": 2.0}}),
    ("/save_weights", {"path": "../x"}),
    ("/save_weights", {"path": ["x"]}),
    ("/save_weights_for_sampler", {"kind": "nonsense"}),
    ("/save_weights_external", {"path": None}),
    ("/load_weights", {"path": "nowhere", "optimizer": True}),
    ("/load_weights", {"optimizer": "perhaps"}),
]


@pytest.mark.parametrize(("path", "fields"), REJECTED)
async def test_a_rejected_request_leaves_no_gap(
    service: Any, path: str, fields: dict[str, Any]
) -> None:
    """Trap 5."""
    model = await service.model(await service.session())
    answer = await service.post(path, {"model_id": model, "seq_id": 1, **fields})
    await service.error(answer)
    await service.output(await service.forward_backward(model, 2))


async def test_a_resent_request_is_recognised_by_its_key_instead_of_its_body(service: Any) -> None:
    """Trap 6: a retried unnamed sampler save carries a new session number and idempotency key."""
    session = await service.session()
    model = await service.model(session)
    save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    headers = {"X-Idempotency-Key": "stainless-python-retry-1"}
    first = await service.post("/save_weights_for_sampler", save, headers=headers)
    save["sampling_session_seq_id"] = 1
    headers = {"X-Idempotency-Key": "stainless-python-retry-2"}
    again = await service.post("/save_weights_for_sampler", save, headers=headers)
    assert again == first
    assert (await service.result(again))["sampling_session_id"] == f"{session}:sample:0"
    # One idempotency key over different requests does not join them.
    answers = [await service.forward_backward(model, seq, headers=headers) for seq in (2, 3)]
    assert answers[0]["request_id"] != answers[1]["request_id"]


async def test_a_poll_is_held_and_then_ends_quietly(api: Any, bodies: Any) -> None:
    """Trap 7: not at once (the client would loop), and well before the client's 45 seconds."""
    answer = await api.post("/create_model", bodies.create_model(await api.session()))
    started_s = time.monotonic()
    response = await api.call("POST", "/retrieve_future", json=answer)
    held_s = time.monotonic() - started_s
    assert response.status_code == 408
    assert 0.2 <= held_s < 2
    assert ApiSettings().poll_s == 25
    with pytest.raises(ValidationError):
        ApiSettings(poll_s=41)


async def test_no_successful_answer_has_an_error_key(service: Any, bodies: Any) -> None:
    """Trap 8: the client reads even ``"error": null`` as a failure."""
    session = await service.session()
    model = await service.model(session)
    sampler = await service.sampler(session)
    save = {"model_id": model, "seq_id": 1, "path": "a"}
    saved = await service.post("/save_weights", save)
    path = (await service.result(saved))["path"]
    adam = {"model_id": model, "seq_id": 2, "adam_params": {}}
    successes = [
        saved,
        await service.result(saved),
        await service.result(await service.post("/optim_step", adam)),
        await service.post("/get_info", {"model_id": model}),
        await service.post("/weights_info", {"tinker_path": path}),
        await service.post("/asample", bodies.asample(sampler, 0)),
        await service.post("/session_heartbeat", {"session_id": session}),
        await service.get(f"/samplers/{sampler}"),
        await service.get(f"/training_runs/{model}"),
        await service.get(f"/training_runs/{model}/checkpoints"),
        await service.get("/training_runs"),
        await service.get("/checkpoints"),
        await service.get("/sessions"),
        await service.get(f"/sessions/{session}"),
        await service.get("/get_server_capabilities"),
        await service.get("/healthz"),
    ]
    assert all("error" not in body for body in successes)


async def test_a_failed_request_is_a_200_with_its_category(service: Any) -> None:
    """Trap 9: a 5xx would hang the client, a 4xx would lose the category."""
    model = await service.model(await service.session())
    answer = await service.forward_backward(model, 1, (1, 99))
    response = await service.poll(answer["request_id"])
    assert response.status_code == 200
    assert set(response.json()) == {"error", "category"}
    assert response.json()["category"] == "user"
    assert "99" in response.json()["error"]


async def test_a_taken_checkpoint_name_is_a_user_error_and_never_a_409(service: Any) -> None:
    """Trap 10: the client retries a 409 for five minutes."""
    model = await service.model(await service.session())
    for seq_id in (1, 2):
        save = {"model_id": model, "seq_id": seq_id, "path": "a"}
        answer = await service.post("/save_weights", save)
        if seq_id == 1:
            await service.result(answer)
    assert "overwrite" in await service.error(answer)


async def test_a_session_can_be_finished_more_than_once(service: Any) -> None:
    """Trap 11: otherwise every ``with ServiceClient()`` ends with an exception."""
    session = await service.session()
    for reason in ("success", "errored", "interrupted"):
        finish = {"reason": {"type": reason}, "detail": None}
        assert await service.post(f"/sessions/{session}/finish", finish) == {}


async def test_metric_names_have_one_colon(service: Any) -> None:
    """Trap 12."""
    model = await service.model(await service.session())
    output = await service.output(await service.forward_backward(model, 1))
    assert output.metrics
    assert all(name.count(":") == 1 for name in output.metrics)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", '"\\ud800"'])
async def test_numbers_that_json_does_not_have_are_refused(service: Any, literal: str) -> None:
    """Trap 13, seen from the server: a framework's own handler answers these with a 500."""
    body = f'{{"session_id": "x", "model_seq_id": {literal}, "base_model": {literal}}}'
    response = await service.call("POST", "/create_model", content=body)
    assert response.status_code == 422


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        (None, None, None),
        ("\n\n", None, ["\n\n"]),
        (["a", "b"], None, ["a", "b"]),
        ([3, 4], [3, 4], None),
        ([], [], None),
    ],
)
async def test_every_form_of_stop_has_its_meaning(
    stop: Any, tokens: list[int] | None, strings: list[str] | None
) -> None:
    """Trap 14: an absent stop means EOS, and an empty list means no stop at all."""
    request = SampleRequest.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {} if stop is None else {"stop": stop},
        }
    )
    command = sample_command(request, None, None)
    assert (command.stop_tokens, command.stop_strings) == (tokens, strings)


async def test_sampling_numbers_have_64_bits(service: Any, bodies: Any) -> None:
    """Trap 20: copies of a client count from a billion times a random number."""
    sampler = await service.sampler(await service.session())
    seq_id = 987_654_321 * 10**9 + 5
    chunks = [{"type": "encoded_text", "tokens": [token]} for token in range(30)]
    body = bodies.asample(sampler, seq_id, prompt={"chunks": chunks})
    answer = await service.post("/asample", body)
    assert answer["sample_sequence_ids"] == [f"{sampler}:{seq_id}:0"]
    assert (await service.poll(answer["request_id"])).status_code == 200
    response = await service.call("POST", "/asample", json=bodies.asample(sampler, 2**63))
    assert response.status_code == 422


async def test_an_error_has_a_body_and_its_length(api: Any, bodies: Any) -> None:
    """Trap 21: without them the client takes a 400 for a proxy's."""
    request = bodies.create_model(await api.session(), base_model="other")
    response = await api.call("POST", "/create_model", json=request)
    assert response.status_code == 400
    assert int(response.headers["content-length"]) == len(response.content) > 0


async def test_calls_without_a_body_may_declare_json(service: Any) -> None:
    """Trap 22."""
    model = await service.model(await service.session())
    save = {"model_id": model, "seq_id": 1, "path": "a"}
    await service.result(await service.post("/save_weights", save))
    path = f"/training_runs/{model}/checkpoints/weights/a"
    for method, suffix in (("POST", "/publish"), ("DELETE", "/publish"), ("DELETE", "")):
        headers = {"Content-Type": "application/json", "Content-Length": "0"}
        response = await service.call(method, path + suffix, headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("colon", [":", "%3A"])
async def test_colons_in_ids_are_ordinary(service: Any, colon: str) -> None:
    """Trap 23: colons work also when a client escapes them."""
    session = await service.session()
    model = (await service.model(session)).replace(":", colon)
    assert (await service.get(f"/training_runs/{model}"))["training_run_id"] == (
        f"{session}:train:0"
    )
    sampler = (await service.sampler(session)).replace(":", colon)
    assert (await service.get(f"/samplers/{sampler}"))["sampler_id"] == f"{session}:sample:0"


async def test_a_run_has_all_fields_that_the_client_requires_and_its_metadata(
    service: Any, bodies: Any
) -> None:
    """Trap 24: the cookbook reads ``renderer_name`` back when it resumes."""
    session = await service.session()
    metadata = {"renderer_name": "qwen3"}
    request = bodies.create_model(session, user_metadata=metadata)
    await service.result(await service.post("/create_model", request))
    run = await service.get(f"/training_runs/{session}:train:0?access_scope=owned")
    assert run["user_metadata"] == metadata
    assert {"training_run_id", "base_model", "model_owner", "is_lora", "last_request_time"} <= set(
        run
    )
    assert (run["base_model"], run["is_lora"], run["lora_rank"]) == ("tuneserve/fake", True, 4)


async def test_downloads_need_no_key(service: Any) -> None:
    """Trap 25: clients fetch signed links with a bare HTTP library."""
    model = await service.model(await service.session())
    save = {"model_id": model, "seq_id": 1, "path": "out"}
    await service.result(await service.post("/save_weights_external", save))
    links = await service.get(
        f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    )
    for url in links["urls"].values():
        response = await service.http.get(url)
        assert (response.status_code, "x-api-key" in response.request.headers) == (200, False)


async def test_idle_connections_outlive_the_pauses_of_a_client(tmp_path: Path) -> None:
    """Trap 26."""
    assert ApiSettings().keep_alive_s >= 75
    with pytest.raises(ValidationError):
        ApiSettings(keep_alive_s=5)


async def test_the_server_keeps_idle_connections_as_long_as_its_settings_say(
    settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 26: the web server's own default is five seconds."""
    seen: list[uvicorn.Config] = []

    class Server:
        def __init__(self, config: uvicorn.Config, polls: LongPolls) -> None:
            seen.append(config)

        async def serve(self, sockets: Any) -> None:
            pass

    monkeypatch.setattr(serving, "_ApiServer", Server)
    monkeypatch.setattr(serving.pauses, "shorten", lambda: None)  # this process runs further tests
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chosen = settings.model_copy(update={"port": port})
    assert await serving._serve(chosen, asyncio.Event()) == 0
    assert [config.timeout_keep_alive for config in seen] == [settings.keep_alive_s]


async def test_a_proxy_in_the_environment_does_not_hide_the_server_from_its_starter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trap 26: proxies also catch loopback traffic unless they are bypassed."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"worker": "ready"}')

        def log_message(self, *_: Any) -> None:
            pass

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        answering = asyncio.create_task(asyncio.to_thread(server.handle_request))
        url = f"http://127.0.0.1:{server.server_port}"
        assert await asyncio.to_thread(readiness.health_of, url) == {"worker": "ready"}
        await answering


async def test_hundreds_of_samples_are_accepted_at_once(api: Any, bodies: Any) -> None:
    """Trap 27: a request is stored and answered before it runs."""
    sampler = await api.sampler(await api.session())
    posts = [api.post("/asample", bodies.asample(sampler, seq)) for seq in range(300)]
    started_s = time.monotonic()
    answers = await asyncio.gather(*posts)
    assert time.monotonic() - started_s < 10
    assert len({answer["request_id"] for answer in answers}) == 300


async def test_a_failing_request_does_not_hold_up_later_posts(api: Any, bodies: Any) -> None:
    """Trap 28: posts continue before anything ran, and the failing request reports its failure."""
    session = await api.session()
    created = await api.post("/create_model", bodies.create_model(session))
    model = f"{session}:train:0"
    bad = await api.forward_backward(model, 1, (1, 99))
    step = await api.post("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    good = await api.forward_backward(model, 3)
    await api.start_worker()
    await api.result(created)
    assert "99" in await api.error(bad)
    assert "error" not in await api.result(step)
    await api.output(good)
