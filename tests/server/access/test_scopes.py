"""Every route that requires a key has a scope, and a key is refused outside its scopes."""

import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from tests.server.access.test_keys import Operator, at_once, operator
from tests.server.conftest import Api
from tuneserve_engine.core.records import Scope
from tuneserve_server.access.scopes import SCOPES, need
from tuneserve_server.app import PREFIX
from tuneserve_server.errors import ScopeMissing

pytestmark = pytest.mark.anyio

__all__ = ["at_once", "operator"]  # fixtures


def operations(app: FastAPI) -> Iterator[tuple[str, str, bool]]:
    """For every route: its method, its path, and whether it requires a key."""
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, "security" in operation


async def test_every_route_that_requires_a_key_has_a_scope_and_no_other(api: Api) -> None:
    wanting = [
        f"{m} {path.removeprefix(PREFIX)}" for m, path, wants in operations(api.app) if wants
    ]
    assert sorted(SCOPES) == sorted(wanting)
    assert all(SCOPES.values())


TRAINS = {
    *("POST /create_model", "POST /load_weights", "POST /forward_backward", "POST /optim_step"),
    *("POST /save_weights", "POST /save_weights_for_sampler", "POST /save_weights_external"),
    *("POST /checkpoints/import", "POST /external_weights_upload_start"),
    *("POST /external_weights_upload_finish", "POST /copy_weights", "POST /create_custom_loss"),
    *("PATCH /training_runs/{model_id}", "POST /training_runs/{model_id}/events"),
    "DELETE /training_runs/{model_id}/checkpoints/{kind}/{name}",
    "PUT /training_runs/{model_id}/checkpoints/{kind}/{name}/ttl",
    "POST /training_runs/{model_id}/checkpoints/{kind}/{name}/publish",
    "DELETE /training_runs/{model_id}/checkpoints/{kind}/{name}/publish",
}
SAMPLES = {
    *("POST /create_sampling_session", "POST /join_sampling_session", "POST /asample"),
    *("POST /retrieve_futures", "POST /cancel_future"),
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens"),
}


ADMINISTERS = {"GET /audit"}
REVOKING = ("DELETE", f"{PREFIX}/auth/apikey/me")  # so it is the last call of a key


async def test_a_key_is_refused_outside_its_scopes(
    api: Api, operator: Operator, at_once: None
) -> None:
    allowed: dict[str, set[str]] = {}
    for scope in ("train", "sample"):
        key = await operator.key(scopes=[scope])
        last = sorted(operations(api.app), key=lambda each: each[:2] == REVOKING)
        for method, path, wants in last:
            if not wants:
                continue
            url = re.sub(r"{.*?}", "x", path)
            answer = await api.http.request(method, url, content=b"{", headers={"X-API-Key": key})
            route = f"{method} {path.removeprefix(PREFIX)}"
            if answer.status_code != 403:
                assert answer.status_code in (200, 400, 404, 422), (route, answer.text)
                allowed.setdefault(scope, set()).add(route)
                continue
            body = answer.json()
            body = body["error"] if path.startswith("/v1/") else body
            assert body["code"] == "scope_missing"
            other = "sample" if scope == "train" else "train"
            other = "admin" if route in ADMINISTERS else other
            said = body.get("detail") or body["message"]
            assert f"with the scope {other}; yours has {scope};" in said
            assert body.get("type", "permission_error") == "permission_error"
    assert set(SCOPES) - allowed["train"] == SAMPLES | ADMINISTERS
    assert set(SCOPES) - allowed["sample"] == TRAINS | ADMINISTERS


async def test_a_sampling_key_cannot_end_a_session_with_models(
    service: Api, operator: Operator, at_once: None
) -> None:
    sampling = await operator.key(scopes=["sample"])
    training = await operator.key(scopes=["train"])
    ending = {"reason": {"type": "success"}}
    mine = await service.session(key=sampling)
    await service.post(f"/sessions/{mine}/finish", ending, key=sampling)
    theirs = await service.session(key=training)
    model = await service.model(theirs, key=training)
    answer = await service.call("POST", f"/sessions/{theirs}/finish", json=ending, key=sampling)
    assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")
    await service.forward_backward(model, 1, key=training)  # the model still exists
    await service.post(f"/sessions/{theirs}/finish", ending, key=training)


@pytest.mark.parametrize(
    ("wanted", "scopes", "message"),
    [
        ({Scope.TRAIN}, {Scope.SAMPLE}, "with the scope train; yours has sample"),
        ({Scope.TRAIN, Scope.SAMPLE}, {Scope.ADMIN}, "the scope sample or train; yours has admin"),
        ({Scope.SAMPLE}, set(), "with the scope sample; yours has no scope"),
    ],
)
def test_a_missing_scope_is_named_beside_those_of_the_key(
    wanted: set[Scope], scopes: set[Scope], message: str
) -> None:
    with pytest.raises(ScopeMissing, match=message):
        need(frozenset(wanted), frozenset(scopes))
    need(frozenset(wanted), frozenset(wanted))
