"""A session is opened once, by the first request that needs it, and ended by ``close``."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tuneserve_client.catalog import Catalog
from tuneserve_client.errors import InvalidRequest
from tuneserve_client.session import Session
from tuneserve_client.transport import Answer, Transport

pytestmark = pytest.mark.anyio


class Server:
    """Answers each path with success, or with a status that ``failing`` gives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failing: dict[str, int] = {}
        self.messages: dict[str, str] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/")
        self.calls.append((path, json.loads(request.content)))
        if status := self.failing.get(path):
            return httpx.Response(status, json={"detail": "why", "code": "c"})
        return httpx.Response(200, json={"session_id": "s-1", **self.messages})

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def catalog(server: Server, tmp_path: Path) -> AsyncIterator[Catalog]:
    transport = Transport(
        "http://server", "tml-secret", deadline_s=0.0, inner=httpx.MockTransport(server)
    )
    yield Catalog(transport, "http://server", tmp_path)
    await transport.close()


async def heartbeats(server: Server, count: int) -> None:
    async with asyncio.timeout(5.0):
        while server.paths.count("session_heartbeat") < count:
            await asyncio.sleep(0.001)


async def test_messages_of_the_server_are_logged_at_their_levels(
    server: Server, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    server.messages = {"info_message": "12 of 40", "warning_message": "the budget is spent"}
    with caplog.at_level(logging.INFO):
        session = Session(catalog)
        await session.id()
        await session.close()
    told = [(each.levelname, each.getMessage()) for each in caplog.records if "says" in each.msg]
    assert told == [
        ("INFO", "the server says: 12 of 40"),
        ("WARNING", "the server says: the budget is spent"),
    ]


async def test_concurrent_requests_open_one_session(server: Server, catalog: Catalog) -> None:
    session = Session(catalog, name="mine", user_metadata={"team": "red"})
    assert server.calls == []
    assert await asyncio.gather(session.id(), session.id(), session.id()) == ["s-1"] * 3
    ((path, body),) = server.calls
    assert path == "create_session"
    assert (body["display_name"], body["user_metadata"]) == ("mine", {"team": "red"})
    await session.close()


async def test_a_session_that_could_not_be_opened_is_opened_by_the_next_request(
    server: Server, catalog: Catalog
) -> None:
    session = Session(catalog)
    server.failing["create_session"] = 400
    with pytest.raises(InvalidRequest, match="why"):
        await session.id()
    server.failing.clear()
    assert await session.id() == "s-1"
    await session.close()


@pytest.mark.parametrize(("errored", "reason"), [(False, "success"), (True, "errored")])
async def test_the_end_of_a_session_has_a_reason(
    server: Server, catalog: Catalog, errored: bool, reason: str
) -> None:
    session = Session(catalog)
    await session.id()
    await session.close(errored=errored)
    path, body = server.calls[-1]
    assert (path, body["reason"]["type"]) == ("sessions/s-1/finish", reason)


async def test_a_session_that_was_never_opened_ends_without_a_request(
    server: Server, catalog: Catalog
) -> None:
    await Session(catalog).close()
    assert server.calls == []


async def test_heartbeats_survive_failures_and_stop_when_the_session_has_ended(
    server: Server, catalog: Catalog
) -> None:
    session = Session(catalog, heartbeat_s=0.001)
    await session.id()
    server.failing["session_heartbeat"] = 503
    await heartbeats(server, 3)
    assert all(body == {"session_id": "s-1"} for _, body in server.calls[1:])
    server.failing["session_heartbeat"] = 404
    known = server.paths.count("session_heartbeat")
    await heartbeats(server, known + 1)
    known = server.paths.count("session_heartbeat")
    await asyncio.sleep(0.02)
    assert server.paths.count("session_heartbeat") == known
    await session.close()


async def test_close_waits_until_requests_are_accepted_but_not_after_an_error(
    catalog: Catalog,
) -> None:
    async def send(accepted: list[str]) -> list[str]:
        await asyncio.sleep(0.01)
        accepted.append("req_a")
        return accepted

    def read(answers: Any) -> list[Answer]:
        return list(answers)

    session, calm, hasty = Session(catalog), list[str](), list[str]()
    session.submit(send(calm), read)
    await session.close()
    assert calm == ["req_a"]
    future = session.submit(send(hasty), read)
    await session.close(errored=True)
    assert future.sending.cancelled() and hasty == []


async def test_models_and_samplers_are_numbered_from_0(catalog: Catalog) -> None:
    session = Session(catalog)
    assert [session.next_model() for _ in range(3)] == [0, 1, 2]
    assert [session.next_sampler() for _ in range(2)] == [0, 1]
