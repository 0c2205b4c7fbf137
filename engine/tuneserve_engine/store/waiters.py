"""Calls that wait for news of a key, and look again when there is some."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class KeyedWaiters:
    """The waiting calls, by key."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}
        self._closed = False

    async def found(
        self, key: Hashable, look: Callable[[], Awaitable[list[T]]], timeout_s: float
    ) -> list[T]:
        """Return what ``look`` finds now, or else after the first news of the key.

        Returns an empty list after the time-out, or once closed.
        """
        news = asyncio.Event()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(news)  # added before the look: news during the look counts too
        try:
            there = await look()
            if there or self._closed or timeout_s <= 0:
                return there
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await news.wait()
            return await look() if news.is_set() and not self._closed else []
        finally:
            waiting.discard(news)
            if not waiting:
                del self._waiting[key]

    def wake(self, keys: Iterable[Hashable]) -> None:
        """Wake the calls that wait for these keys."""
        for key in keys:
            for news in self._waiting.get(key, ()):
                news.set()

    def wake_all(self) -> None:
        self.wake(self._waiting)

    def close(self) -> None:
        self._closed = True
        self.wake_all()
