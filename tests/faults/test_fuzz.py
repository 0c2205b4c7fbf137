"""No input causes a 5xx, kills the worker or is lost: mutated JSON, mutated protobuf, and cases
generated from the API's own description.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from tests.faults import asgi
from tests.faults.fuzzing import OPENAI, PREFIX, Checked, FuzzClient, whole
from tests.server.conftest import FAKE_INFO, Api
from tests.server.routes.test_external_uploads import uploaded
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio

JSON_BODIES, MESSAGES, CASES = 10_000, 2_000, 500
CLIENTS = 24
FOREVER_S = 1e12


@pytest.fixture
def settings(settings: ApiSettings) -> ApiSettings:
    """Limits that a flood of accepted requests does not reach. Other tests cover the limits."""
    return settings.model_copy(
        update={"max_tenant_models": 10**6, "max_tenant_jobs": 10**6, "max_server_jobs": 10**6}
    )


@pytest.fixture
async def service(api: Api, tokenizer: Path) -> Api:
    """The service with a tokenizer for its worker's base model, so that OpenAI's routes answer."""
    await api.start_worker(info=replace(FAKE_INFO, tokenizer_id=str(tokenizer)))
    return api


async def shared_out(
    clients: list[FuzzClient], total: int, send: Callable[[FuzzClient], Awaitable[None]]
) -> None:
    """Send each client's requests one after the other, and the clients concurrently."""

    async def run(client: FuzzClient) -> None:
        for _ in range(total // len(clients)):
            await send(client)

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(run(client))


@pytest.fixture
async def clients(service: Api) -> list[FuzzClient]:
    opened = list(await asyncio.gather(*(FuzzClient.open(service, n) for n in range(CLIENTS))))
    finished: dict[str, str] = {}  # one upload of each tenant, one after the other
    for client in opened:
        if client.key not in finished:
            finished[client.key] = (await uploaded(service, key=client.key)).split("/")[2]
        client.upload = finished[client.key]
    return opened


async def all_end(checked: Checked) -> Counter[str]:
    """The endings of all accepted requests, once gaps are no longer waited for."""
    services = checked.api.services
    policy = replace(
        services.settings.sweep_policy,
        session_ttl_s=FOREVER_S,
        sample_ttl_s=FOREVER_S,
        park_s=FOREVER_S,
    )
    await services.store.sweep(time.time() + policy.gap_ttl_s + 60, policy)
    return await checked.all_end()


async def assert_alive(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """The worker of the start can train a new model, and no error was logged."""
    model = await api.model(await api.session())
    output = await api.output(await api.forward_backward(model, 1))
    assert output.metrics["loss:sum"] == pytest.approx((1 + 3) / 8 + (1 + 5) / 8)
    assert (await api.get("/healthz"))["worker"] == "ready"
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()


async def test_mutated_json_is_answered_and_accepted_requests_end(
    service: Api, clients: list[FuzzClient], bodies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checked, rng = Checked.of(service), random.Random(11)
    described = {whole(path) for _, path, _ in clients[0].templates(bodies)}
    assert described == set(_json_paths(service))  # no route is forgotten
    await shared_out(clients, JSON_BODIES, lambda client: client.send_json(checked, bodies, rng))
    endings = await all_end(checked)
    print(f"\n{JSON_BODIES} mutated JSON: {dict(checked.statuses)}, ended: {dict(endings)}")
    assert sum(checked.statuses.values()) >= JSON_BODIES // CLIENTS * CLIENTS
    assert min(checked.statuses[200], checked.statuses[422], checked.statuses[404]) > 100
    assert min(endings.values()) > 100
    print(f"of them OpenAI's: {dict(checked.openai)}")
    assert checked.openai.total() > 300
    for kind in ("application/json", "text/event-stream"):
        assert checked.openai[200, kind] > 10
    await assert_alive(service, caplog)


def _json_paths(api: Api) -> Iterator[str]:
    for path, operations in api.app.openapi()["paths"].items():
        for operation in operations.values():
            if "application/json" in operation.get("requestBody", {}).get("content", ()):
                yield path


async def test_mutated_protobuf_is_answered_and_accepted_requests_end(
    service: Api, clients: list[FuzzClient], caplog: pytest.LogCaptureFixture
) -> None:
    checked, rng = Checked.of(service), random.Random(12)
    await shared_out(clients, MESSAGES, lambda client: client.send_message(checked, rng))
    endings = await all_end(checked)
    print(f"\n{MESSAGES} mutated protobuf: {dict(checked.statuses)}, ended: {dict(endings)}")
    assert min(endings.values()) > 100
    await assert_alive(service, caplog)


# --- cases from the description ------------------------------------------------------------------

schemathesis.openapi.media_type("application/x-protobuf", st.binary(max_size=300))


schemathesis.openapi.media_type("application/x-tar", st.binary(max_size=3000))


@schemathesis.serializer("application/x-protobuf", "application/x-tar")
def _message(_: Any, value: Any) -> Any:
    return value


def described_cases(api: Api, per_operation: int) -> list[schemathesis.Case]:
    """Cases that follow the description, and as many that violate it, where that is possible."""
    schema = schemathesis.openapi.from_dict(api.app.openapi())
    cases: list[schemathesis.Case] = []
    for found in schema.include(path_regex=f"^({PREFIX}/|{OPENAI}/|/metrics)").get_all_operations():
        for mode in GenerationMode:
            strategy = found.ok().as_strategy(generation_mode=mode)

            @hypothesis_settings(
                max_examples=per_operation,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def collect(case: schemathesis.Case) -> None:
                cases.append(case)

            try:
                collect()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # this operation has no invalid input
    return cases


def prepared(
    case: schemathesis.Case, client: FuzzClient, rng: random.Random
) -> requests.PreparedRequest:
    """The request of the case. Every other case is about the client's objects."""
    ids = {
        "session_id": client.ended,
        "model_id": client.model,
        "sampler_id": client.sampler,
        "sampling_session_id": client.sampler,
        "request_id": client.done,
        "path": client.checkpoint,
        "model_path": client.checkpoint,
        "model": client.checkpoint,
        "kind": "weights",
        "name": "a",
    }
    if rng.random() < 0.5:
        for part in (case.path_parameters, case.body):
            if isinstance(part, dict):
                part.update({name: value for name, value in ids.items() if name in part})
    case.headers = {**(case.headers or {}), "X-API-Key": client.key}
    return requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()


CONFORMANCE = (
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
)


def as_response(request: requests.PreparedRequest, answer: asgi.Answer) -> schemathesis.Response:
    """The answer in the form that schemathesis checks."""
    response = httpx.Response(
        answer.status,
        headers=answer.headers,
        content=answer.body,
        request=httpx.Request(str(request.method), str(request.url)),
    )
    response.elapsed = timedelta(0)
    return schemathesis.Response.from_httpx(response, verify=False)


async def test_cases_from_the_description_get_the_described_answers(
    service: Api, clients: list[FuzzClient], caplog: pytest.LogCaptureFixture
) -> None:
    checked, rng = Checked.of(service), random.Random(13)
    cases = described_cases(service, per_operation=9)
    for case in cases:
        request = prepared(case, rng.choice(clients), rng)
        assert request.method is not None
        body = request.body or b""
        answer = await checked.send(
            request.method,
            case.operation.path,
            request.path_url,
            body.encode() if isinstance(body, str) else body,
            {name: str(value) for name, value in request.headers.items()},
        )
        case.validate_response(as_response(request, answer), checks=[*CONFORMANCE])
    endings = await all_end(checked)
    print(f"\n{len(cases)} described cases: {dict(checked.statuses)}, ended: {dict(endings)}")
    assert len(cases) >= CASES
    await assert_alive(service, caplog)
