"""Who waits for news of something, and looks again when there is."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Watch:
    """Waits for news by key."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}
        self._closed = False

    async def found(
        self, key: Hashable, look: Callable[[], Awaitable[list[T]]], timeout_s: float
    ) -> list[T]:
        """What there is to find now, or after the first news of the key; nothing after the
        time-out, or once closed."""
        news = asyncio.Event()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(news)  # before the look: what comes during it wakes us too
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
        """There is news of these."""
        for key in keys:
            for news in self._waiting.get(key, ()):
                news.set()

    def wake_all(self) -> None:
        self.wake(self._waiting)

    def close(self) -> None:
        self._closed = True
        self.wake_all()
