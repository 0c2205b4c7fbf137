"""A cache for an answer of the store that many callers need and that may be a little old."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CachedQuery(Generic[T]):
    """The answer to a query, asked again when it is older than ``fresh_s``.

    Concurrent callers share one query and its failure, so that they do not each ask a store that
    is unreachable.
    """

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
        """Return the time at which the answer was asked for, and the answer."""
        if self._asking is not None and not self._is_over(self._asking):
            return await asyncio.shield(self._asking)
        return await self._ask_now()

    async def again(self) -> T:
        """Return the answer of the running query, or of a new one if none runs."""
        return (await self._ask_now())[1]

    async def _ask_now(self) -> tuple[float, T]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._answer(self._clock()))
            self._asking.add_done_callback(_noted)
        return await asyncio.shield(self._asking)  # continues for others if this caller leaves

    async def _answer(self, now_s: float) -> tuple[float, T]:
        return now_s, await self._ask()

    def _is_over(self, asked: "asyncio.Task[tuple[float, T]]") -> bool:
        """Return whether the query failed, or its answer is too old."""
        if not asked.done():
            return False
        if asked.cancelled() or asked.exception() is not None:
            return True
        return self._clock() - asked.result()[0] >= self._fresh_s


def _noted(task: "asyncio.Task[Any]") -> None:
    """Retrieve the task's exception, so that asyncio does not complain if every caller left."""
    if not task.cancelled():
        task.exception()
