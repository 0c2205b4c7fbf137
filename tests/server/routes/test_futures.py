"""Clients of a sampling session receive many results per poll, cancel requests, and join."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tuneserve_engine.core.records import SessionRecord
from tuneserve_engine.store.errors import StoreFailed

pytestmark = pytest.mark.anyio


async def submitted(api: Any, bodies: Any, sampler: str, *seqs: int, **fields: Any) -> list[str]:
    answers = [await api.post("/asample", bodies.asample(sampler, seq, **fields)) for seq in seqs]
    return [answer["request_id"] for answer in answers]


async def heard(
    api: Any, sampler: str, cursor: int = 0, have: Sequence[str] = (), **fields: Any
) -> tuple[list[dict[str, Any]], int]:
    """The completions that a poll of the first client returns, and its cursor."""
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [*have], **fields}
    answer = await api.post("/retrieve_futures", body)
    assert set(answer) == {"completions", "cursor"}
    return answer["completions"], answer["cursor"]


async def all_heard(api: Any, sampler: str, count: int) -> list[dict[str, Any]]:
    """Poll until ``count`` completions have arrived, as the SDK does."""
    completions: list[dict[str, Any]] = []
    cursor = 0
    async with asyncio.timeout(10):
        while len(completions) < count:
            more, cursor = await heard(api, sampler, cursor)
            completions += more
    return completions


# --- hearing of many results ----------------------------------------------------------------------


async def test_each_result_is_reported_once_with_its_size(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    good = await submitted(service, bodies, sampler, 0, 1)
    (bad,) = await submitted(service, bodies, sampler, 2, num_samples=-1)
    told = {each["request_id"]: each for each in await all_heard(service, sampler, 3)}
    assert set(told) == {*good, bad}
    assert told[bad] == {"state": "failed", "request_id": bad}
    for request_id in good:
        result = await service.poll(request_id)
        assert told[request_id] == {
            "state": "finished",
            "request_id": request_id,
            "response_payload_uncompressed_size": len(result.content),
        }
    assert (await service.result({"request_id": bad}))["category"] == "user"


async def test_a_poll_is_held_until_a_result_exists(api: Any, bodies: Any) -> None:
    sampler = await api.sampler(await api.session())
    api.services.settings.__dict__["poll_s"] = 1.0
    started_s = time.monotonic()
    assert await heard(api, sampler, 7) == ([], 7)
    assert time.monotonic() - started_s > 0.9
    for timeout in (0, 0.0):
        started_s = time.monotonic()
        assert await heard(api, sampler, 7, timeout=timeout) == ([], 7)
        assert time.monotonic() - started_s < 0.9
    await submitted(api, bodies, sampler, 0)
    api.services.settings.__dict__["poll_s"] = 10.0
    polling = asyncio.create_task(heard(api, sampler))
    await asyncio.sleep(0.05)
    assert not polling.done()
    await api.start_worker()
    completions, cursor = await asyncio.wait_for(polling, 5)
    assert len(completions) == 1 and cursor > 0
    assert await heard(api, sampler, cursor, timeout=0) == ([], cursor)


async def test_completions_are_reported_again_until_the_cursor_moves(
    service: Any, bodies: Any
) -> None:
    """An answer may be lost on its way."""
    sampler = await service.sampler(await service.session())
    await submitted(service, bodies, sampler, 0)
    first = await heard(service, sampler)
    await submitted(service, bodies, sampler, 1)
    both = await all_heard(service, sampler, 2)
    assert both[:1] == first[0]
    for _ in range(2):
        assert (await heard(service, sampler))[0] == both
    assert (await heard(service, sampler, first[1]))[0] == both[1:]


async def test_results_that_the_client_has_are_dropped(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    had, wanted = await submitted(service, bodies, sampler, 0, 1)
    await all_heard(service, sampler, 2)
    for _ in range(2):  # the answer to the first poll may have been lost
        told, _ = await heard(service, sampler, have=[had, "req_unknown"], timeout=0)
        assert [each["request_id"] for each in told] == [wanted]
    gone = await service.poll(had)
    assert (gone.status_code, gone.json()["code"]) == (410, "result_expired")
    assert (await service.poll(wanted)).status_code == 200


async def test_a_client_cannot_drop_the_results_of_others(service: Any, bodies: Any) -> None:
    session = await service.session()
    mine, other = [await service.sampler(session, number) for number in (0, 1)]
    foreign = await service.sampler(await service.session(key="tml-b"), key="tml-b")
    (of_other,) = await submitted(service, bodies, other, 0)
    answer = await service.post("/asample", bodies.asample(foreign, 0), key="tml-b")
    (of_clone,) = await submitted(service, bodies, mine, 10**9)
    for request_id, key in ((of_other, "tml-a"), (answer["request_id"], "tml-b")):
        assert (await service.poll(request_id, key=key)).status_code == 200
    await service.poll(of_clone)
    await heard(service, mine, have=[of_other, of_clone, answer["request_id"]], timeout=0)
    for request_id, key in (
        (of_other, "tml-a"),
        (of_clone, "tml-a"),
        (answer["request_id"], "tml-b"),
    ):
        assert (await service.poll(request_id, key=key)).status_code == 200


async def test_an_ended_session_still_reports_its_results(service: Any, bodies: Any) -> None:
    session = await service.session()
    sampler = await service.sampler(session)
    (request_id,) = await submitted(service, bodies, sampler, 0)
    await service.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    (told,) = await all_heard(service, sampler, 1)
    assert told["request_id"] == request_id
    assert (await heard(service, sampler, have=[request_id], timeout=0))[0] == []


async def test_polls_count_as_heartbeats(api: Any) -> None:
    session = await api.session()
    sampler = await api.sampler(session)
    stored = await api.services.store.get_record(SessionRecord, session)
    await api.services.store.put_record(replace(stored, last_seen_s=0.0))
    await heard(api, sampler, timeout=0)
    assert (
        await api.services.store.get_record(SessionRecord, session)
    ).last_seen_s > time.time() - 60


async def test_a_tenant_with_too_many_polls_is_held_for_a_second_only(api: Any) -> None:
    sampler = await api.sampler(await api.session())
    api.services.settings.__dict__.update(poll_s=10.0, max_polls_per_tenant=1)
    held = asyncio.create_task(heard(api, sampler))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        assert await heard(api, sampler, 3) == ([], 3)
    assert not held.done()
    api.services.polls.release()
    assert await asyncio.wait_for(held, 5) == ([], 0)


async def test_a_store_that_refuses_acknowledgements_still_reports(
    service: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise StoreFailed("database or disk is full")

    sampler = await service.sampler(await service.session())
    (request_id,) = await submitted(service, bodies, sampler, 0)
    before = await all_heard(service, sampler, 1)
    monkeypatch.setattr(service.services.store, "acknowledge", full)
    assert (await heard(service, sampler, have=[request_id]))[0] == before
    monkeypatch.setattr(service.services.store, "completions", full)
    body = {"target": {"sampling_session_id": sampler}}
    response = await service.call("POST", "/retrieve_futures", json=body)
    assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", {"type": "model", "sampling_session_id": "x"}),
        ("target", {"sampling_session_id": "x", "cloned_sampler_id": -1}),
        ("prev_cursor", -1),
        ("prev_cursor", 2**63),
        ("timeout", -1),
        ("retrieved_request_ids", [3]),
    ],
)
async def test_a_malformed_poll_is_refused(api: Any, field: str, value: Any) -> None:
    body = {"target": {"sampling_session_id": "x"}, field: value}
    response = await api.call("POST", "/retrieve_futures", json=body)
    assert (response.status_code, field in response.json()["detail"]) == (422, True)


# --- cancelling -----------------------------------------------------------------------------------


async def test_a_cancelled_sample_ends_at_once(api: Any, bodies: Any) -> None:
    sampler = await api.sampler(await api.session())
    (request_id,) = await submitted(api, bodies, sampler, 0)
    polling = asyncio.create_task(api.poll(request_id))
    await asyncio.sleep(0.05)
    for _ in range(2):
        assert await api.post("/cancel_future", {"request_id": request_id}) == {}
    answer = await polling
    assert answer.status_code == 200
    assert answer.json()["category"] == "user"
    assert "was cancelled" in answer.json()["error"]
    assert (await heard(api, sampler))[0] == [{"state": "failed", "request_id": request_id}]


async def test_a_cancelled_sample_makes_room(api: Any, bodies: Any) -> None:
    api.services.store._policy = replace(api.services.store._policy, tenant_jobs=1)
    sampler = await api.sampler(await api.session())
    (request_id,) = await submitted(api, bodies, sampler, 0)
    assert (await api.call("POST", "/asample", json=bodies.asample(sampler, 1))).status_code == 429
    await api.post("/cancel_future", {"request_id": request_id})
    await submitted(api, bodies, sampler, 1)


async def test_an_ended_request_is_not_cancelled(service: Any, bodies: Any) -> None:
    sampler = await service.sampler(await service.session())
    (request_id,) = await submitted(service, bodies, sampler, 0)
    result = (await service.poll(request_id)).content
    assert await service.post("/cancel_future", {"request_id": request_id}) == {}
    assert (await service.poll(request_id)).content == result


async def test_a_models_request_cannot_be_cancelled(api: Any, bodies: Any) -> None:
    answer = await api.post("/create_model", bodies.create_model(await api.session()))
    body = {"request_id": answer["request_id"]}
    response = await api.call("POST", "/cancel_future", json=body)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
    assert "only samples can be cancelled" in response.json()["detail"]
    await api.start_worker()
    assert "model_id" in await api.result(answer)


# --- joining --------------------------------------------------------------------------------------


async def test_every_client_that_joins_gets_a_new_number(api: Any) -> None:
    session = await api.session()
    sampler, other = [await api.sampler(session, number) for number in (0, 1)]
    body = {"sampling_session_id": sampler, "type": "join_sampling_session"}
    answers = await asyncio.gather(*(api.post("/join_sampling_session", body) for _ in range(9)))
    assert sorted(each["client_counter"] for each in answers) == list(range(1, 10))
    assert await api.post("/join_sampling_session", {**body, "sampling_session_id": other}) == {
        "type": "join_sampling_session",
        "client_counter": 1,
    }
    await api.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    response = await api.call("POST", "/join_sampling_session", json=body)
    assert (response.status_code, response.json()["code"]) == (410, "session_ended")
