"""Connections that tests leave open are closed after them."""

import socket
from collections.abc import Iterator

import pytest

from tuneserve_engine.backend.hosts.link import Channel


@pytest.fixture(autouse=True)
def _closed_channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Channel] = []
    new = Channel.__init__

    def noted(self: Channel, connected: socket.socket, silence_s: float) -> None:
        made.append(self)
        new(self, connected, silence_s)

    monkeypatch.setattr(Channel, "__init__", noted)
    yield
    for channel in made:
        channel.close()
