"""A session's timeline: the rules of Chrome's trace format, and the numbers that are in it."""

import contextlib
from collections import defaultdict
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tests.server.routes.test_listings import save
from tuneserve_engine.core.records import SessionRecord
from tuneserve_server import session_trace
from tuneserve_server.transfer import peft_download

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def link(api: Api, session: str, **options: Any) -> str:
    answer = await api.get(f"/sessions/{session}/trace_export", **options)
    assert answer["status"] == "ready"  # the SDK's poll ends with the first answer
    parts = urlsplit(answer["url"])
    return f"{parts.path}?{parts.query}"


async def trace(api: Api, session: str) -> Any:
    """The trace, fetched by the link and without a key, as the SDK does."""
    answer = await api.http.get(await link(api, session))
    assert answer.status_code == 200, answer.text
    assert f'filename="{session}.pftrace"' in answer.headers["content-disposition"]
    return answer.json()


def assert_well_formed(events: list[dict[str, Any]]) -> None:
    """The rules of the format for the phases that are used: "Trace Event Format", of Chrome."""
    open_slices: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        assert {"name", "ph", "pid"} <= set(event)
        if event["ph"] == "M":
            assert event["name"] == "process_name" and event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] == "p"
        else:  # nestable: a slice of an id ends after those that began within it
            key = (event["pid"], event["cat"], event["id"])
            if event["ph"] == "b":
                assert not open_slices[key] or event["ts"] >= open_slices[key][-1][1]
                open_slices[key].append((event["name"], event["ts"]))
            else:
                assert event["ph"] == "e"
                name, began = open_slices[key].pop()
                assert (name, True) == (event["name"], event["ts"] >= began)


async def test_requests_losses_and_checkpoints_are_in_the_trace(service: Any, bodies: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    gradient = await service.forward_backward(model, 1)
    await service.output(gradient)
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.25}}
    await service.result(await service.post("/optim_step", step))
    path = await save(service, model, 3, "c")
    refused = {"model_id": model, "seq_id": 4, "path": "c"}
    await service.result(await service.post("/save_weights", refused))
    sampler = await service.sampler(session)
    sampled = await service.post("/asample", bodies.asample(sampler, 0))
    await service.poll(sampled["request_id"])
    found = await trace(service, session)
    events = found["traceEvents"]
    assert_well_formed(events)
    assert found["otherData"]["session_id"] == session
    tracks = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert [name.partition(" ")[0] for name in tracks.values()] == ["session", "model", "sampler"]
    begun = [each for each in events if each["ph"] == "b" and "args" in each]
    assert [(each["name"], each["pid"], each["args"]["state"]) for each in begun] == [
        ("create_model", 1, "done"),
        ("forward_backward", 2, "done"),
        ("optim_step", 2, "done"),
        ("save_weights", 2, "done"),
        ("save_weights", 2, "failed"),
        ("sample", 3, "done"),
    ]
    by_id = {each["id"]: each["args"] for each in begun}
    assert by_id[gradient["request_id"]]["trained_tokens"] == 2
    assert by_id[sampled["request_id"]]["sampled_tokens"] == 3
    counters = {each["name"]: each["args"] for each in events if each["ph"] == "C"}
    # The losses of tokens 1 -> 2 and 2 -> 3 by the backend's formula; they have the weight 1.
    assert counters["loss"]["loss"] == pytest.approx(((1 + 3) / 8 + (1 + 5) / 8) / 2)
    assert counters["learning rate"] == {"learning rate": 0.25}
    (saved,) = (each for each in events if each["ph"] == "i")
    assert (saved["name"], saved["args"]["path"]) == ("weights/c", path)


async def test_samples_stay_in_the_trace_when_their_session_has_ended(
    service: Any, bodies: Any
) -> None:
    session = await service.session()
    for number in (0, 1):
        sampler = await service.sampler(session, number)
        sampled = await service.post("/asample", bodies.asample(sampler, 0))
        await service.poll(sampled["request_id"])
    await service.sampler(session, 2)  # without requests, it has no track
    before, finish = await trace(service, session), {"reason": {"type": "success"}}
    await service.post(f"/sessions/{session}/finish", finish)
    after = await trace(service, session)
    for found in (before, after):
        begun = [each for each in found["traceEvents"] if "args" in each and each["ph"] == "b"]
        assert [(each["name"], each["pid"]) for each in begun] == [("sample", 2), ("sample", 3)]


async def test_stages_fill_the_time_of_their_request(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    answer = await service.forward_backward(model, 1)
    await service.output(answer)
    told = (await service.get(f"/requests/{answer['request_id']}"))["timings"]
    events = [
        each
        for each in (await trace(service, session))["traceEvents"]
        if each.get("id") == answer["request_id"]
    ]
    (whole_ms,) = [
        (end["ts"] - begin["ts"]) / 1000 for begin, end in zip(events[:1], events[-1:], strict=True)
    ]
    assert whole_ms == pytest.approx(told["total_ms"], abs=0.01)
    spans: dict[str, float] = {}
    for each in events[1:-1]:
        sign = 1 if each["ph"] == "e" else -1
        spans[each["name"]] = spans.get(each["name"], 0.0) + sign * each["ts"] / 1000
    assert sum(spans.values()) == pytest.approx(told["total_ms"], abs=0.02)
    assert spans.get("queued", 0.0) == pytest.approx(told["queue_ms"], abs=0.01)
    assert spans.get("held", 0.0) == pytest.approx(told["held_ms"], abs=0.01)


async def test_a_request_that_has_not_ended_has_no_end(api: Any, bodies: Any) -> None:
    session = await api.session()
    answer = await api.post("/create_model", bodies.create_model(session))
    events = (await trace(api, session))["traceEvents"]
    phases = [each["ph"] for each in events if each.get("id") == answer["request_id"]]
    assert phases == ["b"]


async def test_a_trace_has_a_bounded_number_of_requests(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_trace, "MOST_REQUESTS", 3)
    session = await service.session()
    model = await service.model(session)
    for seq in range(1, 6):
        await service.output(await service.forward_backward(model, seq))
    events = (await trace(service, session))["traceEvents"]
    numbers = [each["args"]["seq_id"] for each in events if each["ph"] == "b" and "args" in each]
    assert numbers == ["0", "4", "5"]  # the creation, and the newest of the model
    assert sum(each["ph"] == "C" and each["name"] == "loss" for each in events) == 5
    monkeypatch.setattr(session_trace, "MOST_POINTS", 2)
    events = (await trace(service, session))["traceEvents"]
    assert sum(each["ph"] == "C" and each["name"] == "loss" for each in events) == 2


async def test_a_tenant_downloads_few_traces_at_once(service: Any) -> None:
    url = await link(service, await service.session())
    tenant = (await service.get("/usage"))["tenant"]
    with contextlib.ExitStack() as downloads:
        for _ in range(peft_download.OF_TENANT):
            downloads.enter_context(service.services.archives.counted(tenant))
        answer = await service.http.get(url)
        assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert (await service.http.get(url)).status_code == 200


async def test_a_link_is_for_one_session_of_one_tenant(
    service: Any, operator: Operator, at_once: None
) -> None:
    key, other = await operator.key("alice"), await operator.key("bob")
    session, second = [await service.session(key=key) for _ in "12"]
    url = await link(service, session, key=key)
    assert (await service.http.get(url)).status_code == 200
    for changed in (
        url.replace(session, second),
        url.replace("tenant=alice", "tenant=bob"),
        url.replace("expires=1", "expires=2"),
        url.partition("?")[0],
    ):
        answer = await service.http.get(changed)
        assert (answer.status_code, answer.json()["code"]) == (403, "link_invalid")
    foreign = await service.call("GET", f"/sessions/{session}/trace_export", key=other)
    missing = await service.call("GET", "/sessions/s-none/trace_export", key=key)
    assert {foreign.status_code, missing.status_code} == {404}
    await service.services.store.delete_record(SessionRecord, session)
    gone = await service.http.get(url)
    assert (gone.status_code, "forgotten" in gone.text) == (404, True)
