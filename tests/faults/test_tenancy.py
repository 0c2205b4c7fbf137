"""Another tenant's objects look absent on every route, and no name leads to a file."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from tests.faults import asgi
from tests.server.conftest import Api, asample
from tests.server.routes.test_external_uploads import sent
from tuneserve_engine.core.records import KeyRecord, Scope
from tuneserve_server.access import auth
from tuneserve_server.routes import downloads

pytestmark = pytest.mark.anyio

PREFIX = "/api/v1"
OWNER, OTHER, NEW = (f"tml-{name}-{'5' * 64}" for name in ("owner", "other", "new"))
Call = tuple[str, Any]
"""A path and a body. ``@name`` stands for an object of the owner, ``@my_name`` for the caller's."""

CHECKPOINT = "/training_runs/@model/checkpoints/weights/a"
EXPORT = "/training_runs/@model/checkpoints/external_weights/e"
LOAD = {"optimizer": True}
SEQ, NUMBER = -71, -72
"""Placeholders for the next ``seq_id`` of the trained model, and for an unused number."""

# Every route that names an object, once for each object that it names. Routes that end something
# come last, because the owner's calls are carried out.
NAMING: dict[str, list[Call]] = {
    "POST /session_heartbeat": [("/session_heartbeat", {"session_id": "@session"})],
    "POST /create_model": [
        (
            "/create_model",
            {"session_id": "@session", "model_seq_id": NUMBER, "base_model": "@base"},
        ),
    ],
    "POST /get_info": [("/get_info", {"model_id": "@model"})],
    "POST /forward_backward": [("/forward_backward", "@gradient")],
    "POST /create_custom_loss": [
        (
            "/create_custom_loss",
            {
                "session_id": "@session",
                "custom_loss_seq_id": 1,
                "name": "a",
                "inputs": [{"name": "logprobs", "rank": 1}],
                "graph": {"nodes": []},
            },
        ),
        ("/create_custom_loss", {"session_id": "@session", "custom_loss_seq_id": 2}),
    ],
    "POST /optim_step": [
        ("/optim_step", {"model_id": "@model", "seq_id": SEQ, "adam_params": {}}),
        ("/optim_step", {"model_id": "@model", "seq_id": SEQ, "adam_params": 3}),
    ],
    "POST /save_weights": [("/save_weights", {"model_id": "@model", "seq_id": SEQ, "path": "b"})],
    "POST /save_weights_for_sampler": [
        ("/save_weights_for_sampler", {"model_id": "@model", "seq_id": SEQ, "path": "b"}),
        (
            "/save_weights_for_sampler",
            {"model_id": "@model", "seq_id": SEQ, "sampling_session_seq_id": NUMBER},
        ),
    ],
    "POST /save_weights_external": [
        ("/save_weights_external", {"model_id": "@model", "seq_id": SEQ, "path": "b"}),
    ],
    "POST /load_weights": [
        ("/load_weights", {"model_id": "@model", "seq_id": SEQ, "path": "@my_path", **LOAD}),
        ("/load_weights", {"model_id": "@my_model", "seq_id": SEQ, "path": "@path", **LOAD}),
        (
            "/load_weights",
            {"session_id": "@session", "model_seq_id": NUMBER, "path": "@my_path", **LOAD},
        ),
        (
            "/load_weights",
            {"session_id": "@my_session", "model_seq_id": NUMBER, "path": "@path", **LOAD},
        ),
    ],
    "POST /external_weights_upload_finish": [
        ("/external_weights_upload_finish", {"upload_id": "@upload"}),
    ],
    "POST /copy_weights": [("/copy_weights", {"source_path": "@path"})],
    "POST /weights_info": [("/weights_info", {"tinker_path": "@path"})],
    "POST /create_sampling_session": [
        (
            "/create_sampling_session",
            {"session_id": "@session", "sampling_session_seq_id": NUMBER, "base_model": "@base"},
        ),
        (
            "/create_sampling_session",
            {"session_id": "@my_session", "sampling_session_seq_id": NUMBER, "model_path": "@path"},
        ),
    ],
    "GET /samplers/{sampler_id}": [("/samplers/@sampler", None)],
    "POST /asample": [("/asample", "@sample")],
    "POST /v1/completions": [
        ("/v1/completions", {"model": "@path", "prompt": "a"}),
        ("/v1/completions", {"model": "@sampler", "prompt": "a"}),
    ],
    "POST /v1/chat/completions": [
        (
            "/v1/chat/completions",
            {"model": "@path", "messages": [{"role": "user", "content": "a"}]},
        ),
    ],
    "POST /v1/responses": [
        ("/v1/responses", {"model": "@path", "input": "a"}),
        ("/v1/responses", {"model": "@base;@path", "input": "a"}),
    ],
    "POST /v1/messages": [
        (
            "/v1/messages",
            {"model": "@path", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
        ),
    ],
    "POST /v1/messages/count_tokens": [
        (
            "/v1/messages/count_tokens",
            {"model": "@sampler", "messages": [{"role": "user", "content": "a"}]},
        ),
    ],
    "GET /v1/models/{model}": [("/v1/models/@path", None)],
    "POST /retrieve_future": [("/retrieve_future", {"request_id": "@request"})],
    "POST /retrieve_futures": [
        (
            "/retrieve_futures",
            {"target": {"sampling_session_id": "@sampler"}, "timeout": 0},
        ),
    ],
    "POST /join_sampling_session": [
        ("/join_sampling_session", {"sampling_session_id": "@sampler"}),
    ],
    "POST /cancel_future": [("/cancel_future", {"request_id": "@sampled"})],
    "GET /training_runs/{model_id}": [("/training_runs/@model", None)],
    "PATCH /training_runs/{model_id}": [
        ("/training_runs/@model", {"user_metadata": {"name": "taken over"}}),
    ],
    "GET /training_runs/{model_id}/events": [("/training_runs/@model/events", None)],
    "POST /training_runs/{model_id}/events": [
        ("/training_runs/@model/events", {"kind": "note", "step": 0, "data": {}}),
    ],
    "GET /training_runs/{model_id}/curve": [("/training_runs/@model/curve", None)],
    "GET /requests/{request_id}": [("/requests/@request", None)],
    "GET /training_runs/{model_id}/checkpoints": [("/training_runs/@model/checkpoints", None)],
    "GET /sessions/{session_id}": [("/sessions/@session", None)],
    "GET /sessions/{session_id}/trace_export": [("/sessions/@session/trace_export", None)],
    "PUT /sessions/{session_id}/project": [
        ("/sessions/@session/project", {"project_id": "p"}),
        ("/sessions/@session/project", {"project_id": 3}),
        ("/sessions/@session/project", []),
    ],
    "GET /training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls": [
        (f"{EXPORT}/external_weights_urls", None),
        (f"{CHECKPOINT}/external_weights_urls", None),
    ],
    "GET /training_runs/{model_id}/checkpoints/{kind}/{name}/archive": [
        (f"{EXPORT}/archive", None),
        (f"{CHECKPOINT}/archive", None),
    ],
    "PUT /training_runs/{model_id}/checkpoints/{kind}/{name}/ttl": [
        (f"{CHECKPOINT}/ttl", {"ttl_seconds": None}),
        (f"{CHECKPOINT}/ttl", {"ttl_seconds": 1}),
        (f"{CHECKPOINT}/ttl", []),
    ],
    "POST /training_runs/{model_id}/checkpoints/{kind}/{name}/publish": [
        (f"{CHECKPOINT}/publish", None),
    ],
    "DELETE /training_runs/{model_id}/checkpoints/{kind}/{name}/publish": [
        (f"{CHECKPOINT}/publish", None),
    ],
    "DELETE /training_runs/{model_id}/checkpoints/{kind}/{name}": [(CHECKPOINT, None)],
    "POST /sessions/{session_id}/finish": [
        ("/sessions/@session/finish", {"reason": {"type": "success"}}),
    ],
}
LISTING = {"GET /training_runs", "GET /training_runs/search", "GET /checkpoints", "GET /sessions"}
SUMMING = {"GET /usage"}
LISTING_WITH_BASES = {"GET /v1/models"}
NAMING_NOTHING = {
    *("POST /client/config", "POST /client/dynamic_config", "POST /create_session"),
    *("POST /telemetry", "GET /get_server_capabilities", "GET /healthz", "GET /metrics"),
    *("GET /tokenizer", "POST /checkpoints/import", "GET /", "GET /page", "GET /page/{name}"),
    *("GET /docs", "GET /docs/{name}", "POST /external_weights_upload_start"),
    *("POST /auth/token", "GET /auth/apikey/me", "DELETE /auth/apikey/me"),
}
WATCHING = {"GET /live", "GET /live/runs", "GET /live/runs/{model_id}"}
BILLING = {"GET /billing/usage/events", "GET /billing/usage/checkpoints/current"}
SEARCHING = {"POST /sessions/search", "POST /checkpoints/search"}
FOR_ADMINS = {"GET /audit"}
BY_LINK = {"GET /files/{file_id}/{member}", "PUT /uploads/{upload_id}/{member}"}

OPAQUE = ("request", "sampled", "upload")
"""The ids that do not contain a session's."""


@dataclass
class Objects:
    """The objects of one tenant: ``ids`` by the names that calls use."""

    key: str
    ids: dict[str, str]
    seq: int = 5  # of the model's next request

    @classmethod
    async def made(cls, api: Api, key: str) -> "Objects":
        session = await api.session(key=key)
        model = await api.model(session, key=key)
        sampler = await api.sampler(session, key=key)
        saved = []
        for seq, (route, name) in enumerate(
            [
                ("save_weights", "a"),
                ("save_weights_external", "e"),
                ("save_weights", "z"),
                ("save_weights_for_sampler", "s"),
            ],
            1,
        ):
            body = {"model_id": model, "seq_id": seq, "path": name}
            saved.append(await api.post(f"/{route}", body, key=key))
            await api.result(saved[-1], key=key)
        sampled = await api.post("/asample", asample(sampler, 0), key=key)
        ids = {
            "session": session,
            "model": model,
            "sampler": sampler,
            "path": f"tinker://{model}/weights/a",
            "request": saved[0]["request_id"],
            "sampled": sampled["request_id"],
            "upload": await sent(api, key=key),
        }
        return cls(key, ids)

    def absent(self) -> Iterator[dict[str, str]]:
        """Ids of the same length that name nothing: in no session, and in this one."""
        fake = self.ids["session"][:-4] + "zzzz"
        yield {
            **{name: id_.replace(self.ids["session"], fake) for name, id_ in self.ids.items()},
            **{name: self.ids[name][:-4] + "zzzz" for name in OPAQUE},
        }
        yield {
            **{name: id_.replace(":0", ":9") for name, id_ in self.ids.items()},
            "session": fake,
            **{name: self.ids[name][::-1] for name in OPAQUE},
        }


@dataclass(frozen=True)
class Tenancy:
    api: Api
    owner: Objects
    other: Objects
    bodies: Any
    numbers: Iterator[int]

    async def call(
        self, operation: str, call: Call, caller: Objects, ids: dict[str, str]
    ) -> tuple[Any, ...]:
        """Status, headers and body of the answer, or the result of its future.

        Ids are replaced by their names.
        """
        path, body = call
        names = {**ids, **{f"my_{name}": id_ for name, id_ in caller.ids.items()}}
        answer = await asgi.call(
            self.api.app,
            operation.split()[0],
            _prefixed(quote(_filled(path, names))),
            self._content(body, names, caller.seq),
            {"X-API-Key": caller.key, "Content-Type": "application/json"},
        )
        text = _named(answer.body.decode(), ids)
        if answer.status != 200 or "request_id" not in answer.json:
            return answer.status, answer.headers, text
        caller.seq += body == "@gradient" or str(SEQ) in str(body)
        result = await self.api.poll(answer.json["request_id"], key=caller.key)
        return answer.status, "accepted", _named(result.text, ids)

    def _content(self, body: Any, names: dict[str, str], seq: int) -> bytes:
        if body is None:
            return b""
        if body == "@gradient":
            content: bytes = self.bodies.forward_backward(names["model"], seq)
            return content
        number = next(self.numbers)
        if body == "@sample":
            body = self.bodies.asample("@sampler", number)
        numbered = json.dumps(body).replace(str(SEQ), str(seq)).replace(str(NUMBER), str(number))
        return _filled(numbered, names).encode()  # last: an id may contain the digits of a SEQ


def _prefixed(path: str) -> str:
    return path if path.startswith("/v1/") else PREFIX + path


def _filled(text: str, names: dict[str, str]) -> str:
    for name, id_ in sorted(names.items(), reverse=True):  # my_model before model
        text = text.replace(f"@{name}", id_)
    return text.replace("@base", "tuneserve/fake")


def _named(text: str, ids: dict[str, str]) -> str:
    """The text with ids replaced by names, longest first: a model's id contains its session's."""
    for name, id_ in sorted(ids.items(), key=lambda item: -len(item[1])):
        text = text.replace(id_, f"@{name}")
    return text


@pytest.fixture(params=["open", "keyed"])
async def tenancy(
    service: Api, bodies: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> Tenancy:
    """The service without keys, where the key names the tenant, and with them."""
    if request.param == "keyed":
        monkeypatch.setattr(auth, "FRESH_S", 0.0)
        for key in (OWNER, OTHER, NEW):
            await let_in(service, key)
        answer = await service.call("GET", "/sessions", key=f"tml-nobody-{'5' * 64}")
        assert answer.status_code == 401
    owner, other = await asyncio.gather(Objects.made(service, OWNER), Objects.made(service, OTHER))
    return Tenancy(service, owner, other, bodies, count(10))


async def let_in(api: Api, key: str) -> None:
    """Make the key valid for a tenant named by its id."""
    _, name, secret = key.split("-")
    digest = auth.digest(api.services.secret, name, secret)
    scopes = [Scope.TRAIN, Scope.SAMPLE]
    await api.services.store.put_record(KeyRecord(name, name, name, digest, scopes, time.time()))


open_only = pytest.mark.parametrize("tenancy", ["open"], indirect=True)


def operations(api: Api) -> set[str]:
    paths = api.app.openapi()["paths"]
    return {
        f"{method.upper()} {path.removeprefix(PREFIX)}" for path in paths for method in paths[path]
    }


async def holdings(api: Api, owner: Objects) -> list[Any]:
    """All objects of the owner that can be listed."""
    paths = ["/training_runs", "/checkpoints", "/sessions", f"/sessions/{owner.ids['session']}"]
    found = [await api.get(path, key=owner.key) for path in paths]
    for run in found[0]["training_runs"]:
        assert run.pop("duration_s") >= 0  # it grows with time
    return found


async def test_every_route_is_known_to_name_an_object_or_none(service: Api) -> None:
    known = [*NAMING, *LISTING, *LISTING_WITH_BASES, *SUMMING, *NAMING_NOTHING, *BY_LINK]
    known += [*WATCHING, *BILLING, *SEARCHING, *FOR_ADMINS]
    assert len(known) == len(set(known))
    assert operations(service) == set(known)


async def test_another_tenants_objects_are_answered_like_missing_ones(tenancy: Tenancy) -> None:
    owner, other = tenancy.owner, tenancy.other
    before = await holdings(tenancy.api, owner)
    compared = 0
    for operation, calls in NAMING.items():
        for call in calls:
            foreign = await tenancy.call(operation, call, other, owner.ids)
            assert foreign[0] == 404 or '"category":"user"' in foreign[2].replace(" ", ""), call
            for ids in owner.absent():
                absent = await tenancy.call(operation, call, other, ids)
                assert absent == foreign, call
                compared += 1
    assert await holdings(tenancy.api, owner) == before
    assert compared == 2 * sum(map(len, NAMING.values()))


async def test_the_owner_is_answered_on_every_one_of_these_routes(tenancy: Tenancy) -> None:
    """Otherwise the refusals of the others would prove nothing."""
    owner = tenancy.owner
    wrong = ({"ttl_seconds": 1}, {"project_id": 3}, [])
    for operation, calls in NAMING.items():
        for call in calls:
            status, _, text = await tenancy.call(operation, call, owner, owner.ids)
            if call[1] in wrong or (call[0].startswith(CHECKPOINT) and "urls" in call[0]):
                assert status in (400, 422), (call, text)
            elif operation.startswith("POST /v1/"):
                assert (status, "model_unavailable" in text) == (503, True), "it has no tokenizer"
            else:
                assert status == 200, (call, text)


async def test_lists_show_only_the_callers_objects(tenancy: Tenancy) -> None:
    for operation in LISTING:
        path = operation.split()[1]
        listed = {key: await tenancy.api.get(path, key=key) for key in (OWNER, OTHER, NEW)}
        assert next(iter(listed[NEW].values())) == []
        for mine, others in ((tenancy.owner, OTHER), (tenancy.other, OWNER)):
            assert mine.ids["session"] in json.dumps(listed[mine.key])
            assert mine.ids["session"] not in json.dumps(listed[others])


async def test_searches_find_only_the_callers_objects(tenancy: Tenancy) -> None:
    for operation in SEARCHING:
        path = operation.split()[1]
        found = {key: await tenancy.api.post(path, {}, key=key) for key in (OWNER, OTHER, NEW)}
        assert next(iter(found[NEW].values())) == []
        for mine, others in ((tenancy.owner, OTHER), (tenancy.other, OWNER)):
            assert mine.ids["session"] in json.dumps(found[mine.key])
            assert mine.ids["session"] not in json.dumps(found[others])


async def test_sums_cover_only_the_callers_usage(tenancy: Tenancy) -> None:
    used = {key: await tenancy.api.get("/usage", key=key) for key in (OWNER, OTHER, NEW)}
    assert used[NEW]["by_model"] == []
    for mine, others in ((tenancy.owner, OTHER), (tenancy.other, OWNER)):
        assert mine.ids["model"] in json.dumps(used[mine.key])
        assert mine.ids["session"] not in json.dumps(used[others])


@pytest.mark.parametrize("tenancy", ["keyed"], indirect=True)
async def test_a_dashboard_shows_only_the_callers_objects(tenancy: Tenancy) -> None:
    """An open service shows everything, because its routes are open to everyone."""
    seen = {}
    for key in (OWNER, OTHER, NEW):
        lost = {"model_id": f"error-of-{key.split('-')[1]}"}
        await tenancy.api.call("POST", "/get_info", json=lost, key=key)
        seen[key] = (await tenancy.api.call("GET", "/live", key=key)).text
        assert '"workers"' not in seen[key] and '"store"' not in seen[key]
    for mine, others in ((tenancy.owner, OTHER), (tenancy.other, OWNER)):
        name = mine.key.split("-")[1]
        assert mine.ids["model"] in seen[mine.key]
        assert f"error-of-{name}" in seen[mine.key]
        for other in (others, NEW):
            assert mine.ids["session"] not in seen[other]
            assert f'"{name}"' not in seen[other] and f"error-of-{name}" not in seen[other]


@pytest.mark.parametrize("asked", [{}, {"owner": {"type": "accessible"}}])
async def test_a_search_or_a_bill_shows_only_the_callers_objects(
    tenancy: Tenancy, asked: dict[str, Any]
) -> None:
    hour_s = 3600
    end_s = int(time.time()) // hour_s * hour_s + hour_s
    window = {"starting_on": _hour(end_s - 24 * hour_s), "ending_before": _hour(end_s)}
    seen = {
        key: [
            await tenancy.api.post("/sessions/search", asked, key=key),
            await tenancy.api.get(f"/billing/usage/events?{urlencode(window)}", key=key),
            await tenancy.api.get("/billing/usage/checkpoints/current", key=key),
            await tenancy.api.get("/sessions?access_scope=accessible", key=key),
            await tenancy.api.get("/checkpoints?access_scope=accessible", key=key),
            await tenancy.api.get("/training_runs?access_scope=accessible", key=key),
        ]
        for key in (OWNER, OTHER, NEW)
    }
    for mine, others in ((tenancy.owner, OTHER), (tenancy.other, OWNER)):
        name = (await tenancy.api.get("/usage", key=mine.key))["tenant"]
        sessions, events, storage, *lists = seen[mine.key]
        assert [each["session_id"] for each in sessions["sessions"]] == [mine.ids["session"]]
        assert {each["user_id"] for each in events["data"]} <= {name}
        assert [each["org_user_urn"] for each in storage["data"]] == [name]
        assert all(mine.ids["session"] in json.dumps(each) for each in lists)
        for other in (others, NEW):
            assert mine.ids["session"] not in json.dumps(seen[other])
            assert f': "{name}"' not in json.dumps(seen[other])


async def test_the_audit_log_shows_nothing_of_others(tenancy: Tenancy, request: Any) -> None:
    paths = [
        f"/training_runs/{each.ids['model']}/checkpoints/weights/a/publish"
        for each in (tenancy.owner, tenancy.other)
    ]
    for path, each in zip(paths, (tenancy.owner, tenancy.other), strict=True):
        await tenancy.api.ok("POST", path, key=each.key)
    for mine in (tenancy.owner, tenancy.other):
        answer = await tenancy.api.call("GET", "/audit", key=mine.key)
        if "keyed" in request.node.name:
            assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")
        else:
            (event,) = answer.json()["entries"]
            assert event["model_id"] == mine.ids["model"]


def _hour(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


async def test_models_are_the_base_models_and_the_callers_saves(tenancy: Tenancy) -> None:
    headers = {key: {"X-API-Key": key} for key in (OWNER, OTHER, NEW)}
    listed = {
        key: (await tenancy.api.http.get("/v1/models", headers=headers[key])).json()["data"]
        for key in headers
    }
    assert [entry["id"] for entry in listed[NEW]] == ["tuneserve/fake"]
    for mine, others in ((tenancy.owner, OTHER), (tenancy.other, OWNER)):
        assert mine.ids["session"] in json.dumps(listed[mine.key])
        assert mine.ids["session"] not in json.dumps(listed[others])


async def test_an_idempotency_key_belongs_to_its_tenant_only(service: Api) -> None:
    headers = {"X-Idempotency-Key": "same"}
    made = [
        (await service.post("/create_session", {}, key=key, headers=headers))["session_id"]
        for key in (OWNER, OTHER, OWNER)
    ]
    assert made[0] == made[2] != made[1]


# --- links ---------------------------------------------------------------------------------------


async def test_a_link_serves_what_it_was_signed_for_and_nothing_else(tenancy: Tenancy) -> None:
    path = f"/training_runs/{tenancy.owner.ids['model']}/checkpoints/external_weights/e"
    urls = (await tenancy.api.get(f"{path}/external_weights_urls", key=OWNER))["urls"]
    (link, *_) = [urlsplit(url) for url in urls.values()]
    query = dict(part.split("=") for part in link.query.split("&"))
    real = await tenancy.api.http.get(f"{link.path}?{link.query}")
    assert real.status_code == 200
    file_id, member = link.path.split("/")[-2:]
    other_id = ("0" if file_id[0] != "0" else "1") + file_id[1:]
    tenant = "t-" + "0" * 16
    refused = set()
    for changed_path, changed in (
        (link.path, {"tenant": tenant}),
        (link.path, {"expires": str(int(query["expires"]) + 1)}),
        (link.path, {"signature": "0" * 64}),
        (link.path, {"signature": "\u00e9"}),
        (link.path.replace(file_id, other_id), {}),
        (link.path.replace(member, "other"), {}),
    ):
        answer = await tenancy.api.http.get(changed_path, params={**query, **changed})
        refused.add((answer.status_code, answer.content))
    assert len(refused) == 1
    assert refused.pop()[0] == 403


# --- names ---------------------------------------------------------------------------------------

TRAVERSALS = [
    *("..", ".", "../..", "../store.db", "../../../../etc/passwd", "/etc/passwd", "//etc/passwd"),
    *("..%2f..%2fstore.db", "%2e%2e/store.db", "%252e%252e%252f", "..\\..\\store.db", "C:\\boot"),
    *("....//store.db", "a/../../store.db", "a/..", "store.db\0", "\0", "a\0.safetensors", "~root"),
    *("file:///etc/passwd", "tinker://../weights/..", "tinker:///etc/passwd", "\u2024\u2024/a"),
    *("\uff0e\uff0e/a", "..;/a", ".hidden", "-rf", "a" * 300, "a b", "a\n", "$(id)", "*"),
    *("%", "%zz", "\ufffd", "a/b", "weights/../a", " ", "'; DROP TABLE jobs; --"),
]
NAME_FIELDS = [
    ("/save_weights", {"model_id": "@model", "seq_id": 0, "path": ""}),
    ("/save_weights_for_sampler", {"model_id": "@model", "seq_id": 0, "path": ""}),
    ("/save_weights_external", {"model_id": "@model", "seq_id": 0, "path": ""}),
    ("/load_weights", {"model_id": "@model", "seq_id": 0, "path": "", **LOAD}),
]
ID_FIELDS = [
    ("/session_heartbeat", "session_id", {}),
    ("/get_info", "model_id", {}),
    ("/weights_info", "tinker_path", {}),
    ("/retrieve_future", "request_id", {}),
    ("/optim_step", "model_id", {"seq_id": 1, "adam_params": {}}),
    ("/create_model", "session_id", {"model_seq_id": 0, "base_model": "tuneserve/fake"}),
]


def parametrized(api: Api) -> Iterator[tuple[str, str, str]]:
    """Method, path and parameter, for each parameter of each path."""
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    yield method.upper(), path, parameter["name"]


@open_only
async def test_no_path_parameter_leads_to_a_file(tenancy: Tenancy, tmp_path: Path) -> None:
    ids = tenancy.owner.ids
    valid = {
        "session_id": ids["session"],
        "model_id": ids["model"],
        "sampler_id": ids["sampler"],
        "kind": "weights",
        "name": "a",
        "file_id": "0" * 32,
        "upload_id": "upload-" + "0" * 32,
        "member": "adapter_config.json",
    }
    before = everything(tmp_path)
    tried = 0
    for method, path, parameter in parametrized(tenancy.api):
        for evil in TRAVERSALS:
            values = {name: quote(value, safe="") for name, value in valid.items()}
            for spelt in {quote(evil, safe=""), quote(evil, safe="/%")}:
                answer = await asgi.call(
                    tenancy.api.app,
                    method,
                    path.format(**{**values, parameter: spelt}),
                    b'{"ttl_seconds": null, "reason": {"type": "success"}}',
                    {"X-API-Key": OWNER},
                )
                assert answer.status in (403, 404, 405), (method, path, evil, answer)
                assert b"root:" not in answer.body
                tried += 1
    assert tried > 1000
    assert everything(tmp_path) == before


@open_only
async def test_a_signed_link_leads_to_no_other_file(tenancy: Tenancy) -> None:
    """Even with our own signature, only a file's members are served."""
    services = tenancy.api.services
    tenant, expires = "t-0", int(time.time()) + 60
    for file_id in (*sorted(services.files.ids()), "0" * 32):
        for member in ("../../store.db", "../../../etc/passwd", "/etc/passwd", "..", ".", ""):
            query = {
                "expires": expires,
                "tenant": tenant,
                "signature": downloads._signature(
                    services.secret, file_id, member, expires, tenant
                ),
            }
            target = f"{PREFIX}/files/{file_id}/{quote(member, safe='')}"
            answer = await asgi.call(
                tenancy.api.app, "GET", f"{target}?{urlencode(query)}", b"", {}
            )
            assert answer.status == 404, (file_id, member, answer)


@open_only
async def test_no_name_in_a_body_leads_to_a_file(tenancy: Tenancy, tmp_path: Path) -> None:
    ids = tenancy.owner.ids
    before = everything(tmp_path)
    seq = tenancy.owner.seq - 1
    for path, body in NAME_FIELDS:
        for evil in TRAVERSALS:
            seq += 1
            named = {**body, "model_id": ids["model"], "seq_id": seq, "path": evil}
            answer = await tenancy.api.post(path, named, key=OWNER)
            await tenancy.api.error(answer, key=OWNER)
    for path, field, rest in ID_FIELDS:
        for evil in TRAVERSALS:
            answer = await tenancy.api.call("POST", path, json={field: evil, **rest}, key=OWNER)
            assert answer.status_code in (404, 422), (path, evil, answer.text)
    assert everything(tmp_path) == before


def everything(data_dir: Path) -> set[str]:
    """Every file in and around the data directory, except the store's own."""
    return {
        str(path)
        for path in data_dir.parent.rglob("*")
        if not path.name.startswith("store.") and path.is_file()
    }
