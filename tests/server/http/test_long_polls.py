"""Polls end with their result, at their limit, or all at once when the process stops."""

import asyncio

import pytest

from tuneserve_server.http.long_polls import LongPolls

pytestmark = pytest.mark.anyio

LONG_S = 60.0


async def slow() -> str:
    await asyncio.sleep(LONG_S)
    return "late"


async def quick() -> str:
    await asyncio.sleep(0)
    return "here"


async def test_a_poll_ends_with_its_result_or_with_none_at_its_limit() -> None:
    polls = LongPolls()
    assert await polls.hold(quick(), LONG_S) == "here"
    assert await polls.hold(slow(), 0.01) is None


async def test_an_error_of_the_awaited_call_is_raised() -> None:
    async def failing() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        await LongPolls().hold(failing(), LONG_S)


async def test_a_release_ends_all_polls_and_every_later_one() -> None:
    polls = LongPolls()
    held = [asyncio.create_task(polls.hold(slow(), LONG_S)) for _ in range(3)]
    await asyncio.sleep(0)
    polls.release()
    async with asyncio.timeout(5.0):
        assert await asyncio.gather(*held) == [None] * 3
        assert await polls.hold(slow(), LONG_S) is None
        await polls.pause(LONG_S)


async def test_polls_are_counted_by_tenant_while_they_last() -> None:
    polls = LongPolls()
    with polls.counted("a") as first, polls.counted("a") as second, polls.counted("b") as other:
        assert (first, second, other) == (1, 2, 1)
    with pytest.raises(ValueError), polls.counted("a"):
        raise ValueError
    with polls.counted("a") as again:
        assert again == 1
