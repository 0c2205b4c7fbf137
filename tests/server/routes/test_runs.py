"""Training runs: their figures, search, notes and events."""

import json
from typing import Any

import pytest

from tests.server.access.test_keys import Operator, at_once, operator
from tuneserve_engine.core.records import ModelRecord, ModelStatus, Update
from tuneserve_server.access.auth import open_tenant

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def run_of(service: Any, model: str) -> dict[str, Any]:
    found: dict[str, Any] = await service.get(f"/training_runs/{model}")
    return found


async def change(service: Any, model: str, **metadata: str | None) -> dict[str, Any]:
    answer = await service.ok("PATCH", f"/training_runs/{model}", {"user_metadata": metadata})
    changed: dict[str, Any] = answer
    return changed


async def search(service: Any, query: str = "", key: str = "tml-a") -> list[str]:
    page = await service.get(f"/training_runs/search?{query}", key=key)
    assert page["cursor"]["total_count"] >= len(page["training_runs"])
    return [each["training_run_id"] for each in page["training_runs"]]


async def test_a_run_has_the_figures_of_its_requests(service: Any) -> None:
    model = await service.model(await service.session())
    fresh = await run_of(service, model)
    assert (fresh["state"], fresh.get("step"), fresh.get("loss")) == ("running", None, None)
    for seq in (1, 2):
        await service.poll((await service.forward_backward(model, seq, (1, 2, 3)))["request_id"])
    step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.5}}
    await service.result(await service.post("/optim_step", step))
    run = await run_of(service, model)
    points = (await service.get(f"/training_runs/{model}/curve"))["points"]
    summed = [each["loss_sum"] for each in points if each["kind"] == "forward_backward"]
    weights = [each["weight"] for each in points if each["kind"] == "forward_backward"]
    assert len(summed) == 2
    assert run["loss"] == pytest.approx(sum(summed) / sum(weights))
    assert run["step"] == 1
    assert run["duration_s"] >= 0
    assert "held_out_loss" not in run or run["held_out_loss"] is None


async def test_entries_are_set_and_removed_and_the_others_stay(service: Any) -> None:
    model = await service.model(await service.session())
    await change(service, model, name="first try", notes="lr too high", mine="1")
    changed = await change(service, model, notes=None, tags="a, b")
    assert changed["user_metadata"] == {"name": "first try", "mine": "1", "tags": "a, b"}
    assert changed["name"] == "first try"
    assert (await run_of(service, model))["user_metadata"] == changed["user_metadata"]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"adapter": "osft"}, "the entry adapter of a run cannot be changed"),
        ({"outcome": "great"}, "'great'; it must be finished, stopped, diverged or failed"),
        ({"notes": "x" * 70_000}, "the limit is 65536"),
    ],
)
async def test_changes_that_no_run_can_have_are_refused(
    service: Any, metadata: dict[str, str], says: str
) -> None:
    model = await service.model(await service.session())
    path = f"/training_runs/{model}"
    answer = await service.call("PATCH", path, json={"user_metadata": metadata})
    assert answer.status_code == 400
    assert says in answer.json()["detail"]
    assert not (await run_of(service, model))["user_metadata"]


async def test_the_state_is_the_outcome_or_how_the_session_ended(service: Any) -> None:
    models = {}
    for reason in ("success", "interrupted", "errored"):
        session = await service.session()
        models[reason] = await service.model(session)
        await service.post(f"/sessions/{session}/finish", {"reason": {"type": reason}})
    states = {reason: (await run_of(service, id))["state"] for reason, id in models.items()}
    assert states == {"success": "finished", "interrupted": "stopped", "errored": "stopped"}
    assert (await change(service, models["success"], outcome="diverged"))["state"] == "diverged"
    open_one = await service.model(await service.session())
    assert (await change(service, open_one, outcome="finished"))["state"] == "finished"
    assert (await change(service, open_one, outcome=None))["state"] == "running"
    failed = Update("model", open_one, {"status": ModelStatus.FAILED})
    await service.services.store.update_record(failed)
    assert (await run_of(service, open_one))["state"] == "failed"


async def test_a_search_finds_by_text_tag_state_and_archive(service: Any) -> None:
    a, b, c = [await service.model(await service.session()) for _ in range(3)]
    await change(service, a, name="Maths rank 8", tags="sweep, good", config='{"steps": 12}')
    await change(service, b, name="maths rank 64", tags="sweep", outcome="finished")
    await change(service, c, archived="true")
    assert await search(service) == [b, a]
    assert await search(service, "archived=true") == [c]
    assert await search(service, "archived=all") == [c, b, a]
    assert await search(service, "q=RANK%208") == [a]
    assert await search(service, f"q={b}") == [b]
    assert await search(service, "tag=good") == [a]
    assert await search(service, "tag=sweep&state=finished") == [b]
    assert await search(service, "q=nothing") == []
    assert await search(service, "sort=name&order=asc") == [b, a]
    assert await search(service, "limit=1&offset=1") == [a]
    assert await search(service, "order=asc") == [a, b]
    assert await search(service, "archived=all&sort=state") == [c, a, b]  # running, finished
    assert await search(service, "archived=all&sort=state&order=asc") == [b, c, a]
    assert (await run_of(service, a))["steps"] == 12


async def test_runs_without_the_figure_of_the_order_come_last(service: Any) -> None:
    models = [await service.model(await service.session()) for _ in range(3)]
    for number, model in enumerate(models[:2], 1):
        for seq in range(1, number + 1):
            step = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.5}}
            await service.result(await service.post("/optim_step", step))
    assert await search(service, "sort=step&order=desc") == [models[1], models[0], models[2]]
    assert await search(service, "sort=step&order=asc") == [models[0], models[1], models[2]]


async def test_events_are_kept_in_order_and_once(service: Any) -> None:
    model = await service.model(await service.session())
    path = f"/training_runs/{model}/events"
    samples = {"samples": [{"prompt": "a", "completion": "b"}]}
    event = {"kind": "samples", "step": 4, "data": samples, "event_id": "first"}
    for _ in range(2):
        kept = await service.ok("POST", path, event)
        assert (kept["event_id"], kept["data"]) == ("first", samples)
    await service.ok("POST", path, {"kind": "verdict", "step": 9, "data": {"verdict": "improved"}})
    events = (await service.get(path))["events"]
    assert [(each["kind"], each["step"]) for each in events] == [("samples", 4), ("verdict", 9)]


async def test_an_event_that_is_too_large_or_one_too_many_is_refused(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve_client.wire.run_types.MOST_EVENTS", 2)
    model = await service.model(await service.session())
    path = f"/training_runs/{model}/events"
    large = {"kind": "note", "step": 0, "data": {"text": "x" * 16_384}}
    answer = await service.call("POST", path, json=large)
    assert answer.status_code == 400 and "the limit is 16384" in answer.json()["detail"]
    note = {"kind": "note", "step": 0, "data": {}}
    for number in range(2):
        await service.ok("POST", path, note | {"event_id": f"e{number}"})
    answer = await service.call("POST", path, json=note)
    assert answer.status_code == 400
    assert "this run has 2 events with 4 bytes; the limits are 2 events" in answer.json()["detail"]
    await service.ok("POST", path, note | {"event_id": "e1"})  # a retry of one that is kept
    monkeypatch.setattr("tuneserve_client.wire.run_types.MOST_EVENTS", 3)
    monkeypatch.setattr("tuneserve_client.wire.run_types.MOST_EVENT_BYTES", 5)
    answer = await service.call("POST", path, json=note)
    assert answer.status_code == 400 and "3 events and 5 bytes" in answer.json()["detail"]


async def test_another_tenant_sees_nothing_and_changes_nothing(service: Any) -> None:
    model = await service.model(await service.session())
    path = f"/training_runs/{model}"
    body = {"user_metadata": {"name": "mine"}}
    event = {"kind": "note", "step": 0, "data": {}}
    calls = [("GET", path, None), ("PATCH", path, body), ("POST", f"{path}/events", event)]
    for method, at, sent in [*calls, ("GET", f"{path}/events", None)]:
        answer = await service.call(method, at, json=sent, key="tml-b")
        assert answer.status_code == 404, (method, at)
        assert open_tenant("tml-b") in json.dumps(answer.json())
    assert await search(service, key="tml-b") == []
    stored = await service.services.store.get_record(ModelRecord, model)
    assert stored.user_metadata == {}


async def test_an_admin_key_watches_all_runs_and_others_their_own(
    service: Any, operator: Operator, at_once: None
) -> None:
    alice, bob, carol = [await operator.key(name) for name in ("alice", "bob", "carol")]
    model = await service.model(await service.session(key=alice), key=alice)
    gradient = await service.forward_backward(model, 1, (1, 2), key=alice)
    await service.poll(gradient["request_id"], key=alice)
    note = {"kind": "note", "step": 0, "data": {"text": "hello"}}
    await service.post(f"/training_runs/{model}/events", note, key=alice)
    save = {"model_id": model, "seq_id": 2, "path": "a"}
    await service.result(await service.post("/save_weights", save, key=alice), key=alice)
    looking = await operator.key("carol", scopes=["admin"])
    for key, seen in ((alice, [model]), (bob, []), (carol, []), (looking, [model])):
        found = await service.get("/live/runs", key=key)
        assert [each["training_run_id"] for each in found["training_runs"]] == seen
        answer = await service.call("GET", f"/live/runs/{model}", key=key)
        assert answer.status_code == (200 if seen else 404)
    page = await service.get(f"/live/runs/{model}", key=looking)
    assert page["run"]["model_owner"] == "alice"
    assert [each["kind"] for each in page["points"]] == ["forward_backward"]
    assert [each["data"] for each in page["events"]] == [{"text": "hello"}]
    assert [each["tinker_path"] for each in page["checkpoints"]] == [f"tinker://{model}/weights/a"]
    for access, status in (("owned", 404), ("accessible", 200)):
        path = f"/training_runs/{model}?access_scope={access}"
        assert (await service.call("GET", path, key=looking)).status_code == status
    change = {"user_metadata": {"notes": "mine"}}
    answer = await service.call("PATCH", f"/training_runs/{model}", key=looking, json=change)
    assert answer.status_code == 403
