"""A leader and its followers on backends without a model, as threads of one process."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.support.fake_backend import FakeBackend
from tuneserve_engine.backend.base import DeviceFailed, OutOfMemory
from tuneserve_engine.backend.hosts.follower import Follower
from tuneserve_engine.backend.hosts.leader import Answers, LeaderBackend
from tuneserve_engine.backend.hosts.link import Channel, Link

WAIT_S = 20.0


class HostGroup(LeaderBackend):
    """The leader of ``backends[0]``; the others are those of followers."""

    def __init__(self, backends: Sequence[Any] = (), silence_s: float = WAIT_S) -> None:
        self.backends = backends or (FakeBackend(), FakeBackend())
        self.losses: list[str] = []
        self.lost = threading.Event()
        """Set after a loss is noted: the caller of a lost process may hear of it first."""
        self.stops: list[str] = []
        self.ends: list[BaseException | str] = []
        """How the calls of followers ended, if they did."""
        self.links: list[Link] = []
        """The followers' links."""
        self.threads: list[threading.Thread] = []
        links: dict[Link, Answers] = {}
        for number, backend in enumerate(self.backends[1:], 1):
            mine, other = socket.socketpair()
            answers = Answers(lambda: self.stops.append("asked"))
            lost = self._noting(answers)
            link = Link(Channel(mine, silence_s), f"gpu-{number}", answers.on_message, lost)
            links[link] = answers
            link.start()
            self._follow(backend, other, silence_s)
        super().__init__(self.backends[0], links)

    def _noting(self, answers: Answers) -> Callable[[str], None]:
        def lost(reason: str) -> None:
            answers.lose(reason)
            self.losses.append(reason)
            self.lost.set()

        return lost

    def _follow(self, backend: Any, connected: socket.socket, silence_s: float) -> None:
        def end() -> None:
            self.ends.append("told to")
            link.lose("its process has ended")

        follower = Follower(end)
        link = Link(Channel(connected, silence_s), "gpu-0", follower.on_message, lambda _: None)
        self.links.append(link)

        def follow() -> None:
            try:
                follower.follow()
            except (DeviceFailed, OutOfMemory) as error:
                self.ends.append(error)
                link.lose("its process has ended")

        follower.take(backend, link)
        self.threads.append(threading.Thread(target=follow, daemon=True))
        self.threads[-1].start()
        link.start()

    def close(self) -> None:
        """End all threads."""
        for link in [*self.links, *self._followers]:
            with suppress(Exception):
                link.lose("the test has ended")
        for thread in self.threads:
            thread.join(WAIT_S)
