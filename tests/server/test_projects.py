"""Projects: sessions are filed under them, and lists are filtered by them."""

from typing import Any

import pytest
from tinker import types

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tests.server.routes.test_listings import save
from tuneserve_engine.core.records import ModelRecord, SessionRecord

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


async def create(api: Api, key: str = "tml-a", **fields: Any) -> str:
    session_id: str = (await api.post("/create_session", fields, key=key))["session_id"]
    return session_id


async def runs(api: Api, query: str, **options: Any) -> types.TrainingRunsResponse:
    answer = await api.get(f"/training_runs?{query}", **options)
    return types.TrainingRunsResponse.model_validate(answer)


async def test_lists_are_filtered_by_project_with_pages_and_a_total(service: Any) -> None:
    sessions = [await create(service, project_id=project) for project in ("p", "q", "p", None)]
    models = [await service.model(session) for session in sessions]
    paths = [await save(service, model, 1, "a") for model in models]
    for project, wanted in (("p", [2, 0]), ("q", [1]), ("r", [])):
        query = f"project_id={project}"
        found = (await runs(service, query)).training_runs
        assert [run.training_run_id for run in found] == [models[i] for i in wanted]
        listed = (await service.get(f"/sessions?{query}"))["sessions"]
        assert listed == [sessions[i] for i in wanted]
        page = await service.get(f"/checkpoints?{query}")
        assert [each["tinker_path"] for each in page["checkpoints"]] == [paths[i] for i in wanted]
        assert page["cursor"]["total_count"] == len(wanted)
    page = await runs(service, "project_id=p&limit=1&offset=1")
    assert [run.training_run_id for run in page.training_runs] == models[:1]
    assert page.cursor.total_count == 2
    assert len((await runs(service, "")).training_runs) == 4


async def test_a_session_is_moved_with_its_models(service: Any) -> None:
    session = await create(service, project_id="p")
    model = await service.model(session)
    await service.ok("PUT", f"/sessions/{session}/project", {"project_id": "q"})
    later = await service.model(session, 1)
    found = (await runs(service, "project_id=q")).training_runs
    assert [run.training_run_id for run in found] == [later, model]
    assert (await runs(service, "project_id=p")).training_runs == []
    stored = await service.services.store.get_record(SessionRecord, session)
    assert stored.project_id == "q"
    (event,) = (await service.get("/audit?event_type=projects"))["entries"]
    assert event["event"] == "project_session_set"
    assert (event["event_details"]["session_id"], event["event_details"]["project_id"]) == (
        *(session, "q"),
    )


async def test_a_model_keeps_its_project_when_its_session_is_forgotten(service: Any) -> None:
    session = await create(service, project_id="p")
    model = await service.model(session)
    await service.services.store.delete_record(SessionRecord, session)
    found = (await runs(service, "project_id=p")).training_runs
    assert [run.training_run_id for run in found] == [model]


async def test_a_wrong_move_is_refused_and_changes_nothing(service: Any) -> None:
    session = await create(service, project_id="p")
    path = f"/sessions/{session}/project"
    for body in ({}, {"project_id": ""}, {"project_id": None}, {"project_id": "x" * 257}):
        answer = await service.call("PUT", path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "malformed")
    foreign = await service.call("PUT", path, json={"project_id": "q"}, key="tml-b")
    assert (foreign.status_code, foreign.json()["code"]) == (404, "not_found")
    assert (await service.get("/sessions?project_id=p"))["sessions"] == [session]
    too_long = await service.call("GET", f"/sessions?project_id={'x' * 257}")
    assert too_long.status_code == 422


async def test_accessible_lists_are_an_admins_view_of_all_tenants(
    service: Api, operator: Operator, at_once: None
) -> None:
    key, other = await operator.key("alice"), await operator.key("bob")
    admin = await operator.key("operator", scopes=["admin"])
    session = await create(service, key, project_id="p")
    model = await service.model(session, key=key)
    request = {"model_id": model, "seq_id": 1, "path": "a"}
    await service.result(await service.post("/save_weights", request, key=key), key=key)
    lists = ("/training_runs", "/sessions", "/checkpoints")
    for query in ("", "?access_scope=owned", "?access_scope=accessible&project_id=p"):
        for path in lists:
            seen = {who: str(await service.get(path + query, key=who)) for who in (key, other)}
            assert session in seen[key] and session not in seen[other]
            told = str(await service.get(path + query, key=admin))
            assert (session in told) == ("accessible" in query)
    for path in (f"/training_runs/{model}", f"/sessions/{session}"):
        for query, who, status in (
            *(("", admin, 404), ("?access_scope=accessible", admin, 200)),
            *(("?access_scope=accessible", other, 404), ("?access_scope=accessible", key, 200)),
        ):
            answer = await service.call("GET", path + query, key=who)
            assert answer.status_code == status, (path, query)
    found = await service.get(f"/sessions/{session}?access_scope=accessible", key=admin)
    assert found["training_run_ids"] == [model]
    answer = await service.call("GET", "/sessions?access_scope=all", key=key)
    assert answer.status_code == 422


async def test_a_model_of_an_earlier_release_has_no_project(service: Any) -> None:
    model = await service.model(await service.session())
    stored = await service.services.store.get_record(ModelRecord, model)
    assert stored.project_id is None
