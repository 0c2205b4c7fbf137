"""Faults: what must stay true when processes die, clients misbehave and limits are reached.

Slower than the other tests and run apart from them: ``make test-faults``. What takes minutes is
marked ``nightly``: ``make test-nightly``.
"""

from pathlib import Path

import pytest

# A model of random weights, as the tests of the engine have it, and the API in this process, as
# those of the server do.
from tests.engine.conftest import base_model, new_backend
from tests.server.conftest import anyio_backend, api, bodies, service, settings, tokenizer

__all__ = [
    "anyio_backend",
    "api",
    "base_model",
    "bodies",
    "new_backend",
    "service",
    "settings",
    "tokenizer",
]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of programs for every JAX worker: compiling them takes longer than most tests."""
    return tmp_path_factory.mktemp("compiled")
