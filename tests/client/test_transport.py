"""Requests that are retried and those that are not, and the errors made from answers."""

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from tuneserve_client import errors, transport
from tuneserve_client.transport import Transport
from tuneserve_client.wire.types import FutureResponse, HealthResponse, OptimStepRequest

pytestmark = pytest.mark.anyio

STEP = OptimStepRequest(model_id="s:train:0", seq_id=3)
ACCEPTED = httpx.Response(200, json={"request_id": "req_a"})
Turn = httpx.Response | Exception


class Network:
    """Returns the given answers in turn, the last one for ever. Only sleeping moves its clock."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        turn = self.turns[0] if len(self.turns) == 1 else self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return httpx.Response(turn.status_code, headers=turn.headers, content=turn.content)

    def clock(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


Connect = Callable[..., tuple[Network, Transport]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Transport] = []

    def to(*turns: Turn, deadline_s: float = 60.0) -> tuple[Network, Transport]:
        network = Network(turns)
        inner = httpx.MockTransport(network)
        transport = Transport(
            "http://server/base/",
            "tml-secret",
            deadline_s=deadline_s,
            inner=inner,
            clock=network.clock,
            sleep=network.sleep,
        )
        made.append(transport)
        return network, transport

    yield to
    for each in made:
        await each.close()


def refused(status: int, code: str = "c", **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"detail": "why", "code": code}, headers=headers)


async def step(transport: Transport) -> str:
    answer = await transport.ask(FutureResponse, "POST", "/optim_step", body=STEP)
    return answer.request_id


async def test_a_request_without_an_answer_is_sent_again_under_the_same_number(
    connect: Connect,
) -> None:
    lost = httpx.ReadError("connection reset")
    network, transport = connect(lost, refused(503), refused(408, "body_too_slow"), ACCEPTED)
    assert await step(transport) == "req_a"
    assert len(network.requests) == 4
    assert len({request.content for request in network.requests}) == 1
    assert json.loads(network.requests[3].content) == {"model_id": "s:train:0", "seq_id": 3}
    request = network.requests[0]
    assert str(request.url) == "http://server/base/api/v1/optim_step"
    assert request.headers["X-API-Key"] == "tml-secret"


async def test_waits_grow_until_the_server_names_one(connect: Connect) -> None:
    network, transport = connect(
        *[refused(503)] * 3, refused(429, **{"Retry-After": "7"}), ACCEPTED
    )
    await step(transport)
    *growing, named = network.slept
    assert [0.375, 0.75, 1.5] <= growing <= [0.5, 1.0, 2.0]
    assert named == 7.0


async def test_the_deadline_ends_the_retries_with_the_last_answer(connect: Connect) -> None:
    last = refused(503, "disk_full", **{"Retry-After": "15"})
    network, transport = connect(last, deadline_s=40.0)
    with pytest.raises(errors.ServerFault, match="why") as caught:
        await step(transport)
    assert network.slept == [15.0, 15.0]  # a third wait would end after the deadline
    error = caught.value
    assert (error.code, error.status, error.category) == ("disk_full", 503, "server")
    assert error.retry_after_s == 15.0


@pytest.mark.parametrize("key", ["tml-secret\r", " tml-secret", "tml-sécret", "tml-\nsecret"])
async def test_a_key_that_no_header_can_carry_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(ValueError, match="the API key has a space") as refused:
        Transport("http://server", key, deadline_s=1.0)
    assert "cret" not in str(refused.value)


async def test_an_error_does_not_show_the_password_in_the_address() -> None:
    inner = httpx.MockTransport(Network([httpx.ConnectError("refused")]))
    address = "http://me:hidden@server:1/base"
    transport = Transport(address, "tml-secret", deadline_s=0.0, inner=inner)
    with pytest.raises(errors.Unreachable, match="http://server:1/base/api/v1/optim_step ") as told:
        await step(transport)
    assert "hidden" not in str(told.value)
    await transport.close()


async def test_a_long_wait_logs_its_reason_at_once_and_every_minute(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    spent = refused(402, "budget_spent", **{"Retry-After": "30"})
    _, transport = connect(*[spent] * 6, ACCEPTED)
    await step(transport)
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert told == ["retrying in 30.0 s: why"] * 3  # the waits end at 30, 90 and 150 s
    caplog.clear()
    _, transport = connect(refused(503), ACCEPTED)
    await step(transport)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


async def test_a_spent_budget_is_waited_for_beyond_the_deadline(connect: Connect) -> None:
    spent = refused(402, "budget_spent", **{"Retry-After": "30"})
    network, transport = connect(*[spent] * 4, ACCEPTED, deadline_s=40.0)
    assert await step(transport) == "req_a"
    assert network.slept == [30.0] * 4


async def test_an_unreachable_server_is_named_by_its_address(connect: Connect) -> None:
    _, transport = connect(httpx.ConnectError("refused"), deadline_s=5.0)
    with pytest.raises(errors.Unreachable, match=r"http://server/base.* refused") as caught:
        await step(transport)
    assert isinstance(caught.value.__cause__, httpx.ConnectError)
    assert caught.value.category == "server"


async def test_the_answer_of_another_program_is_not_a_servers(connect: Connect) -> None:
    _, transport = connect(httpx.Response(200, text="<html>"))
    with pytest.raises(errors.Unreachable, match=r"http://server.* is not a tuneserve server"):
        await transport.ask(HealthResponse, "GET", "/healthz")


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refused_key_or_name_says_which_server_refused_it(
    connect: Connect, status: int
) -> None:
    _, transport = connect(refused(status, "code"))
    with pytest.raises(errors.Refused, match=r"why \(server: http://server/base"):
        await step(transport)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", errors.InvalidRequest),
        (401, "unauthorized", errors.Unauthorized),
        (403, "link_invalid", errors.Forbidden),
        (404, "not_found", errors.NotFound),
        (410, "session_ended", errors.SessionEnded),
        (410, "result_expired", errors.ResultExpired),
        (413, "body_too_large", errors.InvalidRequest),
        (422, "malformed", errors.InvalidRequest),
    ],
)
async def test_a_refusal_is_not_retried_and_has_its_class(
    connect: Connect, status: int, code: str, kind: type[errors.Refused]
) -> None:
    network, transport = connect(refused(status, code))
    with pytest.raises(errors.Refused, match="why") as caught:
        await step(transport)
    assert len(network.requests) == 1
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.status) == (code, status)
    assert caught.value.category == "user"


async def test_errors_of_openai_routes_and_of_proxies_are_read_too(connect: Connect) -> None:
    openai = {"error": {"message": "no such", "type": "x", "code": "model_not_found"}}
    _, transport = connect(httpx.Response(404, json=openai))
    with pytest.raises(errors.NotFound, match="no such") as caught:
        await step(transport)
    assert caught.value.code == "model_not_found"
    _, transport = connect(httpx.Response(403, text="<html>"))
    with pytest.raises(errors.Forbidden, match="HTTP 403") as proxied:
        await step(transport)
    assert proxied.value.code == "http_error"


NOT_YET: dict[str, Any] = {"queue_state": "paused_capacity", "queue_state_reason": "no worker"}


async def test_a_poll_continues_for_as_long_as_the_request_takes(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The poll outlasts the deadline, which counts only time without an answer, and logs its
    reason.
    """
    caplog.set_level(logging.WARNING, "tuneserve_client")
    waiting = [httpx.Response(408, json=NOT_YET)] * 300
    network, transport = connect(*waiting, refused(503), httpx.Response(200, json={"path": "p"}))
    assert (await transport.result("req_a")).json() == {"path": "p"}
    assert len(network.requests) == 302
    assert sum(network.slept) > 149  # the client pauses even if the server answers at once
    assert [record.getMessage() for record in caplog.records] == [
        "request req_a still waits: no worker"
    ] * 2


async def test_a_failed_request_has_its_category(connect: Connect) -> None:
    for category in ("user", "server"):
        failed = {"error": "targets are too long", "category": category}
        _, transport = connect(httpx.Response(200, json=failed))
        with pytest.raises(errors.RequestFailed, match="too long") as caught:
            await transport.result("req_a")
        assert caught.value.category == category
        assert caught.value.code == "request_failed"
        assert caught.value.request_id == "req_a"


async def test_a_download_does_not_send_the_key(connect: Connect) -> None:
    network, transport = connect(httpx.Response(200, content=b"bytes"))
    async with transport.download("http://elsewhere/file?signature=s") as pieces:
        assert b"".join([piece async for piece in pieces]) == b"bytes"
    (request,) = network.requests
    assert "X-API-Key" not in request.headers
    assert "tml-secret" not in str(request.headers.raw)


def test_every_error_is_in_the_diagram_and_described() -> None:
    drawn = errors.__doc__ or ""
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert len(kinds) > 10
    assert all(f"{each.__name__}\n" in drawn or f"{each.__name__} " in drawn for each in kinds)


@pytest.mark.parametrize(("soft", "most"), [(256, 128), (1024, 512), (10**6, 1024), (-1, 1024)])
def test_polls_use_up_to_half_of_the_open_files_limit(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, soft))
    assert transport._most_polls() == most


async def test_requests_carry_the_callers_span_but_polls_and_heartbeats_do_not(
    connect: Connect,
) -> None:
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    network, transport = connect(ACCEPTED)
    with use_span(span):
        await transport.ask(FutureResponse, "POST", "/optim_step", body=STEP)
        await transport.call("POST", "/session_heartbeat", once=True)
        await transport.result("req_a")
    await transport.ask(FutureResponse, "POST", "/optim_step", body=STEP)
    named = [request.headers.get("traceparent") for request in network.requests]
    assert named == [f"00-{0xABC:032x}-{0xDEF:016x}-01", None, None, None]
