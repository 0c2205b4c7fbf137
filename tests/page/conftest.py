"""One service for all tests of the dashboard, on which two tenants train all the time."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser

from tests.page.stage import PAGE, Trainer, chromium, make_key, training
from tuneserve_server.cli.local_server import LocalServer

HOSTILE = "<img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class Service:
    """The address, the keys of two tenants, and a key that sees everything and can sample."""

    server: LocalServer
    alice: Trainer
    bob: Trainer
    alice_key: str
    looking: str

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with LocalServer(tmp_path_factory.mktemp("service"), **PAGE) as server:
        alice_key, bob_key = (
            make_key(server, name, "train", "sample") for name in ("alice", "bob")
        )
        looking = make_key(server, "alice", "sample", "admin")
        alice = Trainer(server.url, alice_key, "pirate", 0, 6e-3)
        bob = Trainer(server.url, bob_key, HOSTILE, 1, 2e-3)
        with training(alice, bob):
            yield Service(server, alice, bob, alice_key, looking)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started
