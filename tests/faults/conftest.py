"""Faults: what must stay true when processes die, clients misbehave and limits are reached.

Slower than the other tests and run apart from them: ``make test-faults``. What takes minutes is
marked ``nightly``: ``make test-nightly``.
"""

from pathlib import Path

import pytest

# The API in this process, as the tests of the server have it.
from tests.server.conftest import anyio_backend, api, bodies, service, settings

__all__ = ["anyio_backend", "api", "bodies", "service", "settings"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of programs for every JAX worker: compiling them takes longer than most tests."""
    return tmp_path_factory.mktemp("compiled")
