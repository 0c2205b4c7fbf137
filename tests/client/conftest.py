"""The real service on the embedded model, one for all tests of the client."""

import os
from collections.abc import Iterator

import pytest

from tests.quick_service import QUICK
from tuneserve_client import Client, Model, next_token_datum
from tuneserve_server.cli.local_server import LocalServer

KEY = "tml-client"
LR = 1e-2
TOKENS = [list(range(5, 25)), list(range(40, 52))]
DATA = [next_token_datum(tokens) for tokens in TOKENS]


def losses(model: Model, steps: int) -> list[float]:
    """Send all steps before waiting for any result."""
    gradients = []
    for _ in range(steps):
        gradients.append(model.forward_backward(DATA))
        model.optim_step(LR)
    return [gradient.result().loss for gradient in gradients]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **QUICK) as running:
        yield running


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.url, KEY) as made:
        yield made
