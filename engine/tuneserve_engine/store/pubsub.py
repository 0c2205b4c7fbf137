"""Subscriptions to running samples in one process. Parts without a listener are not kept."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from tuneserve_engine.core.jobs import EncodedTokenDelta

TokenEvents = list[tuple[str, EncodedTokenDelta]]
"""The parts of samples, each with the name of its stream."""


class Subscription:
    """The parts of some streams from now on, for as long as this object is referenced."""

    def __init__(self) -> None:
        self._parts: TokenEvents = []
        self._news = asyncio.Event()

    def add_deltas(self, stream: str, parts: Iterable[EncodedTokenDelta]) -> None:
        self._parts += [(stream, part) for part in parts]
        if self._parts:
            self._news.set()

    async def take_deltas(self) -> TokenEvents:
        """Return the parts since the last call; waits until there is one."""
        await self._news.wait()
        self._news.clear()
        taken, self._parts = self._parts, []
        return taken


class TokenBroker:
    """The subscriptions of a process, by the names of their streams."""

    def __init__(self) -> None:
        # Weak: a listener that goes away needs no call to unsubscribe.
        self._heard: WeakValueDictionary[str, Subscription] = WeakValueDictionary()

    @property
    def are_heard(self) -> bool:
        """Whether there is any subscription."""
        return bool(self._heard)

    def subscribe(self, streams: Iterable[str]) -> Subscription:
        heard = Subscription()
        for stream in streams:
            self._heard[stream] = heard
        return heard

    def publish(self, parts: Mapping[str, Sequence[EncodedTokenDelta]]) -> None:
        for stream, told in parts.items():
            heard = self._heard.get(stream)
            if heard is not None:
                heard.add_deltas(stream, told)
