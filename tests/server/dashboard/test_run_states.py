"""The states of runs in the dashboard's looks and in lists of runs."""

import time
from typing import Any

import pytest

from tests.server.dashboard.test_views import first, watched
from tests.server.routes.test_usage import trained
from tuneserve_engine.core.records import ModelRecord, Update
from tuneserve_server.dashboard.run_states import RunStates

pytestmark = pytest.mark.anyio

__all__ = ["watched"]  # a fixture


@pytest.mark.parametrize("outcome", ["finished", "stopped", "diverged"])
async def test_a_look_has_the_outcome_of_each_run(watched: Any, outcome: str) -> None:
    model, _ = await trained(watched)
    (run,) = (await first(watched))["runs"]
    assert (run["state"], run["diverged"]) == ("running", False)
    await watched.services.store.update_record(
        Update("model", model, {}, {"user_metadata": {"outcome": outcome}})
    )
    (run,) = (await first(watched))["runs"]
    assert (run["state"], run["diverged"]) == (outcome, False)


class Silence:
    """A run of the dashboard whose client was last heard of some seconds ago."""

    def __init__(self, api: Any, model: str) -> None:
        self._api = api
        self._store = api.services.store
        self.model = model

    async def set(self, *, request_s: float, heartbeat_s: float) -> None:
        """Date the newest request and the newest heartbeat back by these seconds."""
        now_s = time.time()
        session = self.model.partition(":")[0]
        await self._store.update_record(
            Update("model", self.model, {"last_request_s": now_s - request_s}),
            Update("session", session, {"last_seen_s": now_s - heartbeat_s}),
        )

    async def told(self) -> str:
        """The state; the look and a list of the runs must agree on it."""
        (run,) = (await first(self._api))["runs"]
        listed = (await self._api.get("/training_runs/search"))["training_runs"][0]
        assert run["state"] == listed["state"]
        state: str = run["state"]
        found = await self._api.get(f"/training_runs/search?state={state}")
        assert [each["training_run_id"] for each in found["training_runs"]] == [self.model]
        return state


@pytest.fixture
async def silence(watched: Any, monkeypatch: pytest.MonkeyPatch) -> Silence:
    """A trained run whose session is looked up at every question."""
    monkeypatch.setattr("tuneserve_server.dashboard.run_states._FRESH_S", -1.0)
    model, _ = await trained(watched)
    return Silence(watched, model)


@pytest.mark.parametrize(
    ("request_s", "heartbeat_s", "state"),
    [
        (119, 119, "running"),
        (121, 121, "stopped"),
        (121, 1, "running"),  # it samples, or the loop computes by itself
        (1, 121, "running"),
        (86_400, 86_400, "stopped"),
    ],
)
async def test_a_run_whose_client_is_silent_for_two_minutes_is_stopped(
    silence: Silence, request_s: float, heartbeat_s: float, state: str
) -> None:
    await silence.set(request_s=request_s, heartbeat_s=heartbeat_s)
    assert await silence.told() == state


@pytest.mark.parametrize("sign", ["heartbeat", "request"])
async def test_a_stopped_run_runs_again_when_its_client_is_back(
    silence: Silence, watched: Any, sign: str
) -> None:
    await silence.set(request_s=200, heartbeat_s=200)
    assert await silence.told() == "stopped"
    if sign == "heartbeat":
        session = silence.model.partition(":")[0]
        await watched.post("/session_heartbeat", {"session_id": session})
    else:
        step = {"model_id": silence.model, "seq_id": 4, "adam_params": {}}
        await watched.post("/optim_step", step)
    assert await silence.told() == "running"


async def test_a_run_with_an_unfinished_request_goes_on_without_a_sign_of_its_client(
    silence: Silence, watched: Any
) -> None:
    await watched.kill_workers()
    step = {"model_id": silence.model, "seq_id": 4, "adam_params": {}}
    await watched.post("/optim_step", step)
    await silence.set(request_s=200, heartbeat_s=200)
    assert await silence.told() == "running"


async def test_the_duration_of_a_silent_run_ends_at_its_last_request(
    silence: Silence, watched: Any
) -> None:
    model = await watched.services.store.get_record(ModelRecord, silence.model)
    await watched.services.store.update_record(
        Update("model", silence.model, {"created_s": model.created_s - 1000})
    )
    await silence.set(request_s=400, heartbeat_s=400)
    run = await watched.get(f"/training_runs/{silence.model}")
    assert (run["state"], run["status"]) == ("stopped", "ready")
    assert run["duration_s"] == pytest.approx(600, abs=5)
    await silence.set(request_s=400, heartbeat_s=1)
    run = await watched.get(f"/training_runs/{silence.model}")
    assert run["duration_s"] == pytest.approx(1000, abs=5)


async def test_a_reported_outcome_stays_when_the_client_is_silent(silence: Silence) -> None:
    await silence.set(request_s=200, heartbeat_s=200)
    await silence._store.update_record(
        Update("model", silence.model, {}, {"user_metadata": {"outcome": "finished"}})
    )
    assert await silence.told() == "finished"


async def test_sessions_are_looked_up_only_for_silent_runs_and_rarely(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock_s = watched.services.store, 0.0
    model, _ = await trained(watched)
    quiet = Silence(watched, model)
    looked: list[str] = []
    real = store.get_record

    async def counted(kind: Any, key: str) -> Any:
        looked.append(key)
        return await real(kind, key)

    monkeypatch.setattr(store, "get_record", counted)
    states, stats = RunStates(store, lambda: clock_s), await store.stats()

    async def state() -> str:
        looked.clear()
        (found,) = await states.states_of([await real(ModelRecord, model)], stats)
        return found

    await quiet.set(request_s=1, heartbeat_s=200)
    assert (await state(), looked) == ("running", [])
    await quiet.set(request_s=200, heartbeat_s=200)
    session = model.partition(":")[0]
    assert (await state(), looked) == ("stopped", [session])
    assert (await state(), looked) == ("stopped", [])
    await quiet.set(request_s=200, heartbeat_s=1)
    clock_s = 11.0
    assert (await state(), looked) == ("running", [session])
    clock_s = 100.0
    assert (await state(), looked) == ("running", [])  # it was heard of in the last two minutes
