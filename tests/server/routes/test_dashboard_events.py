"""The dashboard's stream of events: its limit of viewers, and when it ends."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.dashboard.test_views import looks, watched
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.dashboard import views as living

pytestmark = pytest.mark.anyio

__all__ = ["watched"]  # a fixture


async def test_too_many_dashboards_are_refused_for_now(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "MOST_VIEWERS_OF_TENANT", 2)
    live = watched.app.state.services.live
    with live.viewed(open_tenant("tml-a")), live.viewed(open_tenant("tml-a")):
        refused = await watched.call("GET", "/live")
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        assert refused.headers["Retry-After"] == "15"
        assert "2 dashboards open" in refused.json()["detail"]
        assert (await watched.call("GET", "/live", key="tml-b")).status_code == 200
    await looks(watched)
    assert not live._viewers


async def test_viewers_waiting_for_their_first_state_count_towards_the_limit(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "MOST_VIEWERS_OF_TENANT", 3)
    monkeypatch.setattr(living, "MOST_VIEWERS", 4)
    found, may_tell = watched.services.store.page_of_records, asyncio.Event()

    async def slow(*asked: Any, **how: Any) -> Any:
        await may_tell.wait()
        return await found(*asked, **how)

    monkeypatch.setattr(watched.services.store, "page_of_records", slow)
    keys = ["tml-a"] * 10 + ["tml-b"] * 10
    asking = [asyncio.create_task(watched.call("GET", "/live", key=key)) for key in keys]
    async with asyncio.timeout(5):
        while sum(each.done() for each in asking) < 16:
            await asyncio.sleep(0.01)
    may_tell.set()
    codes = [answer.status_code for answer in await asyncio.gather(*asking)]
    assert Counter(codes[:10]) == {200: 3, 429: 7}
    assert Counter(codes[10:]) == {200: 1, 429: 9}
    assert not watched.app.state.services.live._viewers


@pytest.mark.parametrize("goes", ["disconnect", "cancelled", "broken"])
async def test_a_viewer_that_leaves_before_the_first_byte_no_longer_counts(
    watched: Any, goes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, may_tell = watched.app.state.services.live, asyncio.Event()
    found = watched.services.store.page_of_records

    async def slow(*asked: Any, **how: Any) -> Any:
        await may_tell.wait()
        if goes == "broken":
            raise RuntimeError("a fault of ours")
        return await found(*asked, **how)

    async def send(_: Any) -> None:
        raise OSError("the connection is closed")

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    monkeypatch.setattr(watched.services.store, "page_of_records", slow)
    asked: dict[str, Any] = {"type": "http", "method": "GET", "http_version": "1.1"}
    asked |= {"path": "/api/v1/live", "raw_path": b"/api/v1/live", "root_path": ""}
    asked |= {
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"x-api-key", b"tml-a")],
        "client": ("::1", 1),
        "server": ("::1", 2),
    }
    asked |= {"scheme": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    viewer = asyncio.create_task(watched.app(asked, receive, send))
    async with asyncio.timeout(5):
        while not live._viewers:
            await asyncio.sleep(0.01)
    if goes == "cancelled":
        viewer.cancel()
    may_tell.set()
    await asyncio.wait([viewer])
    assert viewer.cancelled() or viewer.exception() or goes == "disconnect"
    assert not live._viewers


async def test_a_stream_ends_when_the_store_is_away_and_the_next_is_refused(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        if next(calls):
            raise StoreFailed("away")
        return await found(*_, **__)

    calls: Iterator[int] = iter([0, 1, 1])
    store = watched.services.store
    found = store.page_of_records
    monkeypatch.setattr(store, "page_of_records", away)
    assert len(await looks(watched)) == 1
    refused = await watched.call("GET", "/live")
    assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
    assert not watched.app.state.services.live._viewers


async def test_a_stream_ends_when_the_process_stops(watched: Any) -> None:
    watched.services.polls.release()
    assert len(await looks(watched)) == 1
