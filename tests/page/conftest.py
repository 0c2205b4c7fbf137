"""One service for all tests of the dashboard, on which two tenants train all the time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser

from tests.page.many_runs import COUNT, KEY, SESSION, fill
from tests.page.stage import (
    PAGE,
    Trainer,
    Visit,
    chromium,
    heartbeats,
    make_key,
    open_api,
    training,
)
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


@pytest.fixture(scope="session")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an API process without keys and workers, whose store has many runs."""
    folder = tmp_path_factory.mktemp("many")
    fill(folder, COUNT)
    with open_api(folder) as address, heartbeats(address, SESSION, KEY):
        yield address


@pytest.fixture
def visits(browser: Browser) -> Iterator[Any]:
    """Opens dashboards. At the end, none may have complained or called another server."""
    opened: list[tuple[Visit, str]] = []

    def visit(url: str, key: str | None = None, **options: Any) -> Visit:
        opened.append((Visit(browser, url, key, **options), url))
        return opened[-1][0]

    yield visit
    for each, url in opened:
        each.context.close()
        assert each.said == []
        assert {urlsplit(asked).netloc for asked in each.asked} == {urlsplit(url).netloc}
