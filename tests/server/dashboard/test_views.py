"""The dashboard shows everything, or the viewer's own tenant. One read a second serves all
viewers.
"""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.routes.test_usage import trained
from tuneserve_engine.core.records import Scope
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.dashboard import views as living
from tuneserve_server.dashboard.views import Dashboard
from tuneserve_server.dependencies import Caller
from tuneserve_server.routes import dashboard_events as live_routes
from tuneserve_server.routes.dashboard_events import _Viewer

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def looks(api: Any, key: str = "tml-a", since: float = 0.0) -> list[tuple[float, Any]]:
    """Ids and contents of the events of one stream, which ends soon under these settings."""
    answer = await api.call("GET", f"/live?since={since}", key=key)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.split("\n\n")[:-1]:
        name, id_, data = event.split("\n")
        assert name == "event: look"
        found.append((float(id_.removeprefix("id: ")), json.loads(data.removeprefix("data: "))))
    return found


async def first(api: Any, **options: Any) -> Any:
    return (await looks(api, **options))[0][1]


@pytest.fixture
async def watched(service: Any) -> Any:
    """The service before its first viewer, with all caches disabled."""
    services = service.services
    now_s = iter(range(10**9))
    live = Dashboard(services.store, services.served, clock=lambda: float(next(now_s) * 10))
    service.app.state.services = replace(services, live=live)
    return service


# --- contents -------------------------------------------------------------------------------------


async def test_without_keys_every_viewer_sees_everything(watched: Any) -> None:
    models = {key: (await trained(watched, key))[0] for key in ("tml-a", "tml-b")}
    seen = await first(watched, key="tml-c")
    assert seen["tenant"] == open_tenant("tml-c")
    assert {each["model_id"]: each["tenant"] for each in seen["runs"]} == {
        model: open_tenant(key) for key, model in models.items()
    }
    tenants = {each["name"]: each for each in seen["tenants"]}
    assert tenants.keys() == {open_tenant("tml-a"), open_tenant("tml-b")}
    for each in tenants.values():
        assert (each["trained_tokens"], each["sampled_tokens"], each["unfinished"]) == (6, 6, 0)
        assert each["device_s"] > 0
    assert seen["store"] == {
        "kind": "sqlite",
        "durability": "always",
        "disk": "ok",
        "unfinished": 0,
        "logged": 8,
        "recovery_points": 0,
    }
    (worker,) = seen["workers"]
    assert (worker["base_model"], worker["name"]) == ("tuneserve/fake", "worker")


async def test_a_curve_has_the_mean_loss_and_the_learning_rate_of_each_step(watched: Any) -> None:
    model, _ = await trained(watched)
    ((x, _, loss, learning_rate, grad_norm),) = (await first(watched))["curves"][model]
    # Two gradients of three tokens each, with fake losses of 4, 6 and 8 eighths.
    assert (x, loss, learning_rate) == (1, 6 / 8, 0.5)
    assert grad_norm > 0


async def test_rows_that_a_viewer_has_are_not_sent_again(watched: Any) -> None:
    model, _ = await trained(watched)
    events = await looks(watched)
    assert len(events) >= 2
    assert [model in told["curves"] for _, told in events] == [True] + [False] * (len(events) - 1)
    newest_s = events[-1][0]
    assert newest_s == pytest.approx(events[0][1]["curves"][model][0][1], abs=0.001)
    later = await first(watched, since=newest_s + 60)
    assert later["curves"] == {}
    # steps of two runs may have been read in another order
    near = await first(watched, since=newest_s + 1)
    assert model in near["curves"]
    step = {"model_id": model, "seq_id": 4, "adam_params": {}}
    await watched.poll((await watched.post("/optim_step", step))["request_id"])
    again = await first(watched, since=newest_s + 60)
    assert again["curves"] == {}  # the run ended before that
    assert [row[0] for row in (await first(watched))["curves"][model]] == [1, 2]


async def test_a_run_that_enters_the_shown_ones_is_sent_from_its_start(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dashboard forgets a run that is no longer shown."""

    async def stepped(model: str, seq: int) -> None:
        step = {"model_id": model, "seq_id": seq, "adam_params": {}}
        await watched.poll((await watched.post("/optim_step", step))["request_id"])

    def places(told: Any) -> dict[str, list[int]]:
        return {model: [row[0] for row in rows] for model, rows in told["curves"].items()}

    monkeypatch.setattr(living, "MOST_RUNS", 1)
    session = await watched.session()
    models = [await watched.model(session, number) for number in range(2)]
    caller = Caller(
        **vars(watched.app.state.services), tenant=open_tenant("tml-a"), scopes=frozenset(Scope)
    )
    viewer = _Viewer(caller, 0.0)
    told = []
    for model, seq in [(models[0], 1), (models[0], 2), (models[1], 1), (models[0], 3)]:
        await stepped(model, seq)
        event = await viewer.event()
        told.append(places(json.loads(event.split("data: ")[1])))
    assert told == [
        {models[0]: [1]},
        {models[0]: [2]},
        {models[1]: [1]},
        {models[0]: [1, 2, 3]},
    ]


async def test_a_run_shown_between_two_streams_is_sent_from_its_start(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "MOST_RUNS", 1)
    old, _ = await trained(watched)
    monkeypatch.setattr(live_routes, "_OVERLAP_S", 0.0)
    shown, _ = await trained(watched)
    newest_s, told = (await looks(watched))[-1]
    assert [each["model_id"] for each in told["runs"]] == [shown]
    step = {"model_id": old, "seq_id": 4, "adam_params": {}}
    await watched.poll((await watched.post("/optim_step", step))["request_id"])
    later = await first(watched, since=newest_s)
    assert [row[0] for row in later["curves"][old]] == [1, 2]


async def test_runs_have_the_names_that_their_clients_gave_them(watched: Any) -> None:
    named = {"tags": [], "user_metadata": {}, "sdk_version": "1", "display_name": "<b>mine</b>"}
    session = (await watched.post("/create_session", named))["session_id"]
    await watched.model(session)
    other = await watched.session()
    body = {"session_id": other, "model_seq_id": 0, "base_model": "tuneserve/fake"}
    body |= {"user_metadata": {"name": "run 7"}}
    await watched.result(await watched.post("/create_model", body))
    assert [each["name"] for each in (await first(watched))["runs"]] == ["run 7", "<b>mine</b>"]


async def test_long_names_are_shortened_in_events(watched: Any) -> None:
    named = {"tags": [], "user_metadata": {}, "sdk_version": "1", "display_name": "s" * 1024}
    session = (await watched.post("/create_session", named))["session_id"]
    await watched.model(session)
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tuneserve/fake"}
    body |= {"user_metadata": {"name": "n" * 60_000}}
    await watched.result(await watched.post("/create_model", body))
    names = [each["name"] for each in (await first(watched))["runs"]]
    assert names == ["n" * 79 + "…", "s" * 79 + "…"]


async def test_errors_are_shown_with_their_text_and_counted(watched: Any) -> None:
    session = await watched.session()
    model = await watched.model(session)
    text = await watched.error(await watched.forward_backward(model, 1, (1, 999)))
    for _ in range(2):
        refused = await watched.call("POST", "/get_info", json={"model_id": "nothing"})
    errors = (await first(watched))["errors"]
    assert [(each["code"], each["count"], each["where"]) for each in errors] == [
        ("not_found", 2, "/get_info"),
        ("user", 1, "result"),
    ]
    assert [each["text"] for each in errors] == [refused.json()["detail"], text]
    await watched.http.get("/api/v1/sessions")  # a request without a key belongs to no tenant
    await watched.call("GET", "/training_runs/nothing")  # an ordinary answer is not an error
    assert len((await first(watched))["errors"]) == 2


# --- visibility -----------------------------------------------------------------------------------


async def test_a_key_sees_its_tenant_and_an_admin_key_sees_all(
    watched: Any, operator: Operator, at_once: None
) -> None:
    alice, bob = await operator.key("alice"), await operator.key("bob")
    looking = await operator.key("carol", scopes=["admin"])
    models = {key: (await trained(watched, key))[0] for key in (alice, bob)}
    await watched.call("POST", "/get_info", json={"model_id": "x"}, key=bob)
    own = await first(watched, key=alice)
    assert (own["tenant"], own["scopes"]) == ("alice", ["sample", "train"])
    assert [each["model_id"] for each in own["runs"]] == list(own["curves"]) == [models[alice]]
    assert [each["name"] for each in own["tenants"]] == ["alice"]
    assert own["errors"] == []
    assert not own.keys() & {"workers", "store"}
    for text in (models[bob], "bob"):
        assert text not in json.dumps(own)
    everything = await first(watched, key=looking)
    assert {each["model_id"] for each in everything["runs"]} == set(models.values())
    assert [each["tenant"] for each in everything["errors"]] == ["bob"]
    assert everything["workers"] and everything["store"]


async def test_an_admin_key_can_only_look(watched: Any, operator: Operator, at_once: None) -> None:
    looking = await operator.key(scopes=["admin"])
    for path in ("/training_runs", "/checkpoints", "/sessions"):  # its tenant has nothing
        assert next(iter((await watched.get(path, key=looking)).values())) == []
    calls = [("GET", path) for path in ("/usage", "/training_runs/x/curve")]
    calls += [("PATCH", "/training_runs/x"), ("POST", "/training_runs/x/events")]
    calls += [("PUT", "/sessions/x/project"), ("GET", "/sessions/x/trace_export")]
    for method, path in calls:
        answer = await watched.call(method, path, key=looking)
        assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing"), path
    assert (await watched.call("GET", "/live", key=None)).status_code == 401


# --- the store is read once -----------------------------------------------------------------------


class Counted:
    """A store that counts its queries."""

    def __init__(self, store: Any) -> None:
        self.asked: Counter[str] = Counter()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)


async def test_ten_viewers_cost_one_read(service: Any) -> None:
    await trained(service)
    store, services = Counted(service.services.store), service.services
    now_s = 0.0
    live = Dashboard(store, services.served, clock=lambda: now_s)
    found = await asyncio.gather(*(live.look(None) for _ in range(10)))
    assert all(each is found[0] for each in found)
    once = {"stats": 1, "usage": 1, "page_of_records": 1, "get_record": 1, "curve": 1}
    assert store.asked == once
    now_s = living.TICK_S
    await asyncio.gather(*(live.look(None) for _ in range(10)))
    # Costly values may be older, and names are known. The run's curve may have grown since it was
    # read.
    assert store.asked == once | {"page_of_records": 2, "curve": 2}


async def test_idle_runs_are_not_read_again(service: Any) -> None:
    await trained(service)
    await service.model(await service.session())  # a run without a curve
    store, now_s = Counted(service.services.store), 0.0
    live = Dashboard(store, service.services.served, clock=lambda: now_s)
    for _ in range(100):
        assert sorted(len(curve.rows) for curve in (await live.look(None)).curves.values()) == [
            0,
            1,
        ]
        now_s += 1
    # Each curve is read until the store was asked again, after 2 s, whether jobs are left.
    assert store.asked["curve"] == 2 * 3


async def test_a_curve_is_read_until_a_long_request_ends(api: Any) -> None:
    """Reads are rare until a point arrives, and end after it."""
    await api.start_worker()
    model = await api.model(await api.session())
    await api.stop_worker()
    store, now_s = Counted(api.services.store), 0.0
    live = Dashboard(store, api.services.served, clock=lambda: now_s)
    assert (await live.look(None)).curves[model].rows == []
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    answer = await api.post("/optim_step", step)
    for _ in range(400):
        now_s += 1
        assert (await live.look(None)).curves[model].rows == []
    assert 10 <= store.asked["curve"] <= 60
    await api.start_worker("other")
    await api.poll(answer["request_id"])
    asked = store.asked["curve"]
    for _ in range(400):
        now_s += 1
        rows = (await live.look(None)).curves[model].rows
    assert len(rows) == 1
    assert store.asked["curve"] - asked <= 4


async def test_a_tenants_idle_runs_are_rarely_read_while_it_is_busy(api: Any) -> None:
    await api.start_worker()
    session = await api.session()
    models = [await api.model(session, number) for number in range(4)]
    await api.stop_worker()
    await api.post("/optim_step", {"model_id": models[0], "seq_id": 1, "adam_params": {}})
    store, now_s = Counted(api.services.store), 0.0
    live = Dashboard(store, api.services.served, clock=lambda: now_s)
    for _ in range(600):
        await live.look(None)
        now_s += 1
    assert store.asked["curve"] < 4 * 60  # 4 * 600 without this rule


async def test_points_that_arrive_between_viewers_are_seen(api: Any) -> None:
    await api.start_worker()
    model = await api.model(await api.session())
    await api.stop_worker()
    now_s = 0.0
    live = Dashboard(api.services.store, api.services.served, clock=lambda: now_s)
    await live.stats.get()  # cache that no jobs are left, which is no longer true
    answer = await api.post("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    now_s = 1.0
    assert (await live.look(None)).curves[model].rows == []
    await api.start_worker("other")
    await api.poll(answer["request_id"])
    now_s = 1000.0
    assert len((await live.look(None)).curves[model].rows) == 1
