"""Who listens to samples on their way, in one process. What nobody listens to is not kept."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from tuneserve_engine.jobs import Part

Told = list[tuple[str, Part]]
"""Parts, each with the name of its stream."""


class Heard:
    """What is told of some streams from now on, for as long as somebody holds this."""

    def __init__(self) -> None:
        self._parts: Told = []
        self._news = asyncio.Event()

    def add(self, stream: str, parts: Iterable[Part]) -> None:
        self._parts += [(stream, part) for part in parts]
        if self._parts:
            self._news.set()

    async def take(self) -> Told:
        """What was told since the last call; waits until there is something."""
        await self._news.wait()
        self._news.clear()
        taken, self._parts = self._parts, []
        return taken


class Streams:
    """Listeners by the names of their streams."""

    def __init__(self) -> None:
        # Weak: nobody has to say that he has stopped listening, not even one who was never heard.
        self._heard: WeakValueDictionary[str, Heard] = WeakValueDictionary()

    @property
    def are_heard(self) -> bool:
        """Whether anybody listens to anything."""
        return bool(self._heard)

    def listen(self, streams: Iterable[str]) -> Heard:
        heard = Heard()
        for stream in streams:
            self._heard[stream] = heard
        return heard

    def tell(self, parts: Mapping[str, Sequence[Part]]) -> None:
        for stream, told in parts.items():
            heard = self._heard.get(stream)
            if heard is not None:
                heard.add(stream, told)
