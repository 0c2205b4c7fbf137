"""Faults: the guarantees when processes die, clients misbehave and limits are reached.

These tests are slower than the others and run separately: ``make test-faults``. Tests that take
minutes are marked ``nightly``: ``make test-nightly``.
"""

from pathlib import Path

import pytest

# A model of random weights, as in the tests of the engine, and the API in this process, as in those
# of the server.
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
    """One program cache for every JAX worker, because compiling takes longer than most tests."""
    return tmp_path_factory.mktemp("compiled")
