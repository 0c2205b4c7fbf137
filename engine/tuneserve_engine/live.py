"""Tells who listens what samples on their way have drawn."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from tuneserve_engine.jobs import Part
from tuneserve_engine.link import Link
from tuneserve_engine.queue.base import Queue

_TELL_S = 0.05
"""From one message to the next: nobody reads faster, and each costs the store a little."""


class Live:
    """One message at a time, with all that has come meanwhile. What the store does not hear is
    lost: it comes with the result."""

    def __init__(self, link: Link, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._link = link
        self._spawn = spawn
        self._parts: dict[str, list[Part]] = {}
        self._is_telling = False

    def tell(self, parts: Mapping[str, Sequence[Part]]) -> None:
        """Returns at once."""
        for stream, more in parts.items():
            self._parts.setdefault(stream, []).extend(more)
        if self._parts and not self._is_telling:
            self._is_telling = True
            self._spawn(self._tell())

    async def _tell(self) -> None:
        while self._parts:
            parts, self._parts = self._parts, {}
            await self._link.tell(partial(_progress, parts))
            await asyncio.sleep(_TELL_S)
        self._is_telling = False


async def _progress(parts: dict[str, list[Part]], queue: Queue, _: int) -> None:
    await queue.progress(parts)
