"""Waiting calls look again after news, and end at the time-out or the close."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tuneserve_engine.store.waiters import KeyedWaiters


class Shelf:
    """Things by key, and the number of looks at them."""

    def __init__(self) -> None:
        self.things: list[int] = []
        self.looks = 0

    async def look(self) -> list[int]:
        self.looks += 1
        return list(self.things)


def run(test: Callable[[KeyedWaiters, Shelf], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        waiters = KeyedWaiters()
        await test(waiters, Shelf())
        assert waiters._waiting == {}

    asyncio.run(asyncio.wait_for(within(), 10))


def test_what_is_there_is_returned_at_once() -> None:
    async def test(waiters: KeyedWaiters, shelf: Shelf) -> None:
        shelf.things = [1]
        assert await waiters.found("a", shelf.look, 10) == [1]
        assert shelf.looks == 1

    run(test)


def test_nothing_is_returned_at_once_without_a_time_or_after_it() -> None:
    async def test(waiters: KeyedWaiters, shelf: Shelf) -> None:
        for timeout_s in (0, 0.01):
            assert await waiters.found("a", shelf.look, timeout_s) == []
        assert shelf.looks == 2

    run(test)


def test_news_of_the_key_wakes_every_call_that_waits_for_it_and_no_other() -> None:
    async def test(waiters: KeyedWaiters, shelf: Shelf) -> None:
        calls = [asyncio.create_task(waiters.found(key, shelf.look, 5)) for key in ("a", "a", "b")]
        await asyncio.sleep(0)
        shelf.things = [1]
        waiters.wake(["a", "c"])
        assert await asyncio.gather(*calls[:2]) == [[1], [1]]
        await asyncio.sleep(0)
        assert not calls[2].done()
        waiters.wake_all()
        assert await calls[2] == [1]

    run(test)


def test_news_during_the_look_counts() -> None:
    async def test(waiters: KeyedWaiters, shelf: Shelf) -> None:
        async def look() -> list[int]:
            found = await shelf.look()
            if shelf.looks == 1:
                shelf.things = [1]
                waiters.wake(["a"])
            return found

        assert await waiters.found("a", look, 5) == [1]

    run(test)


def test_closing_ends_all_calls_without_another_look() -> None:
    async def test(waiters: KeyedWaiters, shelf: Shelf) -> None:
        call = asyncio.create_task(waiters.found("a", shelf.look, 5))
        await asyncio.sleep(0)
        shelf.things = [1]
        waiters.close()
        assert await call == []
        assert shelf.looks == 1
        assert await waiters.found("a", shelf.look, 5) == [1]

    run(test)
