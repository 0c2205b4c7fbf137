"""The publisher of tokens that running samples have drawn, for clients that stream them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from tuneserve_engine.core.jobs import EncodedTokenDelta
from tuneserve_engine.store.base import Queue
from tuneserve_engine.worker.lease import StoreSession

_PUBLISH_S = 0.05
"""Seconds between two messages: people read no faster, and each message costs the store time."""


class TokenPublisher:
    """A publisher that sends one message at a time, with all tokens that came meanwhile.

    Tokens that do not reach the store are lost to the stream; the result contains them.
    """

    def __init__(
        self, session: StoreSession, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._session = session
        self._spawn = spawn
        self._new_tokens: dict[str, list[EncodedTokenDelta]] = {}
        self._is_publishing = False

    def publish(self, new_tokens: Mapping[str, Sequence[EncodedTokenDelta]]) -> None:
        """Queue tokens for publication and return at once."""
        for stream, more in new_tokens.items():
            self._new_tokens.setdefault(stream, []).extend(more)
        if self._new_tokens and not self._is_publishing:
            self._is_publishing = True
            self._spawn(self._publish())

    async def _publish(self) -> None:
        while self._new_tokens:
            new_tokens, self._new_tokens = self._new_tokens, {}
            await self._session.notify(partial(_send, new_tokens))
            await asyncio.sleep(_PUBLISH_S)
        self._is_publishing = False


async def _send(new_tokens: dict[str, list[EncodedTokenDelta]], queue: Queue, _: int) -> None:
    await queue.publish_tokens(new_tokens)
