"""Checks of the start of a client, of sessions and of lists."""

import time
import uuid
from typing import Any

from tuneserve_server.conformance.checks import REST, SDK, Checks
from tuneserve_server.conformance.target import ServerUnderTest, expect

CHECKS = Checks()

_RUN = ("training_run_id", "base_model", "model_owner", "is_lora", "last_request_time")
_CHECKPOINT = ("checkpoint_id", "checkpoint_type", "time", "tinker_path")


@CHECKS.rule(SDK)
def client_config(target: ServerUnderTest) -> None:
    """A client's first call, POST client/config, answers a JSON object; {} is all defaults."""
    target.ask("POST", "client/config", {"sdk_version": "0.38.0"})


@CHECKS.rule(SDK)
def dynamic_config(target: ServerUnderTest) -> None:
    """POST client/dynamic_config answers a JSON object, or 404."""
    response = target.send("POST", "client/dynamic_config", {"sdk_version": "0.38.0"})
    if response.status_code != 404:
        expect(response.is_success, f"it answers {response.status_code}")
        expect(isinstance(response.json(), dict), "its answer is no JSON object")


@CHECKS.rule(SDK)
def capabilities(target: ServerUnderTest) -> None:
    """GET get_server_capabilities lists the models, each with its name."""
    served = target.ask("GET", "get_server_capabilities").get("supported_models")
    expect(isinstance(served, list) and served, "supported_models is no list, or empty")
    assert served
    expect(all(each.get("model_name") for each in served), "a model has no model_name")


@CHECKS.rule(SDK)
def session_life(target: ServerUnderTest) -> None:
    """A session has an id without a slash, takes heartbeats and telemetry, and can be finished."""
    session = target.new_session(display_name="conformance")
    expect("/" not in session, f"the session id {session!r} has a slash")
    target.ask("POST", "session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    event = {
        "event": "SESSION_START",
        "event_id": uuid.uuid4().hex,
        "event_session_index": 0,
        "severity": "INFO",
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    body = {"events": [event], "platform": "any", "sdk_version": "0.38.0", "session_id": session}
    told = target.ask("POST", "telemetry", {**body, "process_uuid": uuid.uuid4().hex})
    expect(told.get("status") == "accepted", "the status of telemetry is not 'accepted'")
    for _ in range(2):  # the SDK may repeat the call
        done = {"reason": {"type": "success"}, "detail": None}
        response = target.send("POST", f"sessions/{session}/finish", done)
        expect(response.is_success, f"finish answers {response.status_code}")


@CHECKS.rule(SDK)
def refusals_have_a_body(target: ServerUnderTest) -> None:
    """A refusal has a body and its length; otherwise clients take it for a proxy's."""
    body = {"model_id": f"{target.session}:train:999999", "type": "get_info"}
    response = target.send("POST", "get_info", body)
    status = response.status_code
    expect(400 <= status < 500, f"an unknown model answers {status}; it must be a 4xx")
    expect(response.content, f"the {status} has no body")
    expect("Content-Length" in response.headers, f"the {status} has no Content-Length")


@CHECKS.rule(SDK)
def model_ids(target: ServerUnderTest) -> None:
    """The id of a model is <session id>:train:<model_seq_id>; the client computes it itself."""
    model = target.new_model()
    session, _, number = model.id.rpartition(":train:")
    expect(session == target.session and number.isdigit(), f"the model's id is {model.id!r}")


@CHECKS.rule(SDK)
def model_info(target: ServerUnderTest) -> None:
    """get_info names the model, and its base model as model_data.model_name."""
    model = target.new_model()
    info = target.ask("POST", "get_info", {"model_id": model.id, "type": "get_info"})
    expect(info.get("model_id") == model.id, f"model_id is {info.get('model_id')!r}")
    data: dict[str, Any] = info.get("model_data") or {}
    expect(data.get("model_name"), "model_data.model_name is missing")


@CHECKS.rule(REST)
def training_runs(target: ServerUnderTest) -> None:
    """A run has all required fields, and its user_metadata as the client sent it."""
    metadata = {"renderer_name": "a renderer", "note": "é"}
    model = target.new_model(user_metadata=metadata)
    run = target.ask("GET", f"training_runs/{model.id}?access_scope=owned")
    for name in _RUN:
        expect(run.get(name) is not None, f"the run has no {name}")
    expect(run["training_run_id"] == model.id, "training_run_id is another's")
    expect(run.get("user_metadata") == metadata, f"user_metadata is {run.get('user_metadata')}")
    listed = target.ask("GET", "training_runs?limit=20&offset=0&access_scope=owned")
    cursor = listed.get("cursor") or {}
    for name in ("offset", "limit", "total_count"):
        expect(isinstance(cursor.get(name), int), f"the list's cursor has no {name}")
    runs = listed.get("training_runs") or []
    expect(any(each["training_run_id"] == model.id for each in runs), "the list lacks the new run")


@CHECKS.rule(REST)
def sessions(target: ServerUnderTest) -> None:
    """A session lists its runs and samplers, with its name and metadata."""
    session = target.new_session(display_name="a name", user_metadata={"a": "b"})
    listed = target.ask("GET", "sessions?limit=100&offset=0&access_scope=owned").get("sessions")
    expect(isinstance(listed, list) and session in listed, "the list lacks the new session")
    found = target.ask("GET", f"sessions/{session}?access_scope=owned")
    for name in ("training_run_ids", "sampler_ids"):
        expect(isinstance(found.get(name), list), f"the session has no list {name}")


@CHECKS.rule(REST)
def checkpoint_calls(target: ServerUnderTest) -> None:
    """Calls without a body carry a JSON content type; ids in paths have colons and two segments."""
    model = target.new_model()
    path = model.saved("save_weights")
    listed = target.ask("GET", f"training_runs/{model.id}/checkpoints").get("checkpoints") or []
    expect(len(listed) == 1, f"the run lists {len(listed)} checkpoints instead of 1")
    for name in _CHECKPOINT:
        expect(listed[0].get(name), f"the checkpoint has no {name}")
    expect(listed[0]["tinker_path"] == path, f"tinker_path is {listed[0]['tinker_path']!r}")
    kind, _, name = listed[0]["checkpoint_id"].partition("/")
    expect(kind == "weights" and name, f"checkpoint_id is {listed[0]['checkpoint_id']!r}")
    base = f"training_runs/{model.id}/checkpoints/{kind}/{name}"
    for method, part, body in (
        ("PUT", "/ttl", {"ttl_seconds": 7200}),
        ("PUT", "/ttl", {"ttl_seconds": None}),
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
        ("DELETE", "", None),
    ):
        response = target.send(method, base + part, body)
        expect(response.is_success, f"{method} {part or 'checkpoint'}: {response.status_code}")
    left = target.ask("GET", f"training_runs/{model.id}/checkpoints").get("checkpoints")
    expect(left == [], "a deleted checkpoint is still listed")


@CHECKS.rule(REST)
def weights_info(target: ServerUnderTest) -> None:
    """weights_info tells a checkpoint's base model and rank."""
    path = target.new_model().saved("save_weights")
    info = target.ask("POST", "weights_info", {"tinker_path": path})
    expect(info.get("base_model"), "base_model is missing")
    expect(info.get("is_lora") is True, f"is_lora is {info.get('is_lora')!r}")
    expect(info.get("lora_rank") in (4, None), f"lora_rank is {info.get('lora_rank')!r}")


@CHECKS.rule(REST)
def download(target: ServerUnderTest) -> None:
    """An exported adapter is PEFT's two files, at addresses that need no key."""
    path = target.new_model().saved("save_weights_external")
    _, _, rest = path.partition("tinker://")
    run, _, checkpoint = rest.partition("/")
    answer = target.ask(
        "GET", f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls"
    )
    urls: dict[str, str] = answer.get("urls") or {}
    expect(answer.get("expires"), "the answer does not say when the addresses expire")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        expect(name in urls, f"there is no {name}")
        expect(target.download(urls[name]), f"{name} is empty")
