"""A cached query is shared by all callers."""

import asyncio

import pytest

from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.ttl_cache import CachedQuery

pytestmark = pytest.mark.anyio


async def test_an_unreachable_store_is_queried_once_for_all_waiting_viewers() -> None:
    async def ask() -> None:
        asked.append(1)
        await asyncio.sleep(0.01)
        raise StoreFailed("away")

    asked: list[int] = []
    fresh = CachedQuery(ask, 1.0, clock=lambda: 0.0)
    for times in (1, 2):  # a later viewer asks again
        answers = await asyncio.gather(*(fresh.get() for _ in range(10)), return_exceptions=True)
        assert [type(each) for each in answers] == [StoreFailed] * 10
        assert len(asked) == times


async def test_a_viewer_that_leaves_does_not_cancel_the_query_of_others() -> None:
    async def ask() -> int:
        await may_tell.wait()
        return 7

    may_tell = asyncio.Event()
    fresh = CachedQuery(ask, 1.0, clock=lambda: 0.0)
    first_one, other = (asyncio.create_task(fresh.get()) for _ in range(2))
    await asyncio.sleep(0)
    first_one.cancel()
    may_tell.set()
    assert await other == 7
    assert first_one.cancelled()
