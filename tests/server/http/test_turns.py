"""One at a time, and tenants by turns."""

import asyncio

import pytest

from tuneserve_server.http.turns import Turns

pytestmark = pytest.mark.anyio


class Line:
    """Those that had their turn, in order; each ends its turn when it is told to."""

    def __init__(self) -> None:
        self.turns, self.had = Turns(), list[str]()
        self._over = asyncio.Semaphore(0)
        self._now = 0

    async def take(self, tenant: str) -> None:
        async with self.turns.wait_for_turn(tenant):
            self._now += 1
            assert self._now == 1
            self.had.append(tenant)
            await self._over.acquire()
            self._now -= 1

    async def join(self, tenants: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.take(tenant)) for tenant in tenants]
        await settle()
        return tasks

    async def end(self, times: int = 1) -> None:
        for _ in range(times):
            self._over.release()
            await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_flood_of_one_lets_the_first_of_each_other_pass() -> None:
    line = Line()
    tasks = [*await line.join("aaaa"), *await line.join("bbc")]
    await line.end(7)
    assert "".join(line.had) == "aabcaba"
    await asyncio.gather(*tasks)


async def test_one_that_is_given_up_is_passed_by() -> None:
    line = Line()
    first, gone, *rest = await line.join("abcb")
    gone.cancel()
    await settle()
    await line.end(3)
    assert "".join(line.had) == "acb"
    await asyncio.gather(first, *rest)
    await asyncio.wait_for(line.turns.wait_for_turn("d").__aenter__(), 1)


async def test_a_turn_that_comes_as_it_is_given_up_goes_to_the_next() -> None:
    line = Line()
    _, gone, last = await line.join("abc")
    line._over.release()
    await asyncio.sleep(0)  # the first has ended, and has given its turn to the second
    gone.cancel()
    await settle()
    assert "".join(line.had) == "ac"
    await line.end()
    await last


async def test_a_turn_ends_with_an_error_too() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        async with turns.wait_for_turn("a"):
            raise ZeroDivisionError
    await asyncio.wait_for(turns.wait_for_turn("b").__aenter__(), 1)
