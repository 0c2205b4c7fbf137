"""The real service on the embedded model, one for all guides and examples."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quick_service import QUICK
from tuneserve_server.cli.local_server import LocalServer

KEY = "tml-guides"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **QUICK) as running:
        yield running


@pytest.fixture(scope="session")
def environment(server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user of that service, in an activated virtual environment."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TUNESERVE_URL": server.url,
        "TUNESERVE_API_KEY": KEY,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": KEY,
        "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache"),
    }
