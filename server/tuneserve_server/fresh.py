"""Answers of the store that many ask for, and that may be a little old."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Fresh(Generic[T]):
    """What a question gives: asked when the last answer is too old, once for all who wait. They
    share a failure, too: a store that is away is not asked by each in turn."""

    def __init__(
        self,
        ask: Callable[[], Coroutine[Any, Any, T]],
        fresh_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._clock = clock
        self._asking: asyncio.Task[tuple[float, T]] | None = None

    async def get(self) -> T:
        return (await self.dated())[1]

    async def dated(self) -> tuple[float, T]:
        """The answer, behind the time at which it was asked for."""
        if self._asking is not None and not self._is_over(self._asking):
            return await asyncio.shield(self._asking)
        return await self._ask_now()

    async def again(self) -> T:
        """The answer to a question that is on its way, or is asked now."""
        return (await self._ask_now())[1]

    async def _ask_now(self) -> tuple[float, T]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._answer(self._clock()))
            self._asking.add_done_callback(_noted)
        return await asyncio.shield(self._asking)  # others wait for it when this one has left

    async def _answer(self, now_s: float) -> tuple[float, T]:
        return now_s, await self._ask()

    def _is_over(self, asked: "asyncio.Task[tuple[float, T]]") -> bool:
        """Whether it failed, or its answer is too old."""
        if not asked.done():
            return False
        if asked.cancelled() or asked.exception() is not None:
            return True
        return self._clock() - asked.result()[0] >= self._fresh_s


def _noted(task: "asyncio.Task[Any]") -> None:
    """Looks at how it ended, lest asyncio complain when all who waited have left."""
    if not task.cancelled():
        task.exception()
