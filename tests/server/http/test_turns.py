"""One task at a time, in rounds over the tenants."""

import asyncio

import pytest

from tuneserve_server.http.turns import Turns

pytestmark = pytest.mark.anyio


class Line:
    """The tasks that had their turn, in order. Each ends its turn when the test releases it."""

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


async def test_a_flood_of_one_tenant_lets_the_first_task_of_each_other_pass() -> None:
    line = Line()
    tasks = [*await line.join("aaaa"), *await line.join("bbc")]
    await line.end(7)
    assert "".join(line.had) == "aabcaba"
    await asyncio.gather(*tasks)


async def test_a_cancelled_task_is_skipped() -> None:
    line = Line()
    first, gone, *rest = await line.join("abcb")
    gone.cancel()
    await settle()
    await line.end(3)
    assert "".join(line.had) == "acb"
    await asyncio.gather(first, *rest)
    await asyncio.wait_for(line.turns.wait_for_turn("d").__aenter__(), 1)


async def test_a_turn_granted_to_a_cancelled_task_passes_to_the_next() -> None:
    line = Line()
    _, gone, last = await line.join("abc")
    line._over.release()
    await asyncio.sleep(0)  # the first task has ended and has passed its turn to the second
    gone.cancel()
    await settle()
    assert "".join(line.had) == "ac"
    await line.end()
    await last


async def test_a_turn_also_ends_with_an_error() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        async with turns.wait_for_turn("a"):
            raise ZeroDivisionError
    await asyncio.wait_for(turns.wait_for_turn("b").__aenter__(), 1)
