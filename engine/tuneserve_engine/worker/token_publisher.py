"""The publisher of tokens that running samples have drawn, for clients that stream them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from tuneserve_engine.core.jobs import EncodedTokenDelta
from tuneserve_engine.store.base import Queue
from tuneserve_engine.worker.lease import StoreSession

_TELL_S = 0.05
"""Seconds between two messages: people read no faster, and each message costs the store time."""


class TokenPublisher:
    """A publisher that sends one message at a time, with all tokens that came meanwhile.

    Tokens that do not reach the store are lost to the stream; the result contains them.
    """

    def __init__(
        self, link: StoreSession, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._link = link
        self._spawn = spawn
        self._parts: dict[str, list[EncodedTokenDelta]] = {}
        self._is_telling = False

    def tell(self, parts: Mapping[str, Sequence[EncodedTokenDelta]]) -> None:
        """Queue tokens for publication and return at once."""
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


async def _progress(parts: dict[str, list[EncodedTokenDelta]], queue: Queue, _: int) -> None:
    await queue.progress(parts)
