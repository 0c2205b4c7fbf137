"""Every test runs JAX in its strict modes, on four CPU devices."""

import gc
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.redis_server import RedisServer
from tests.s3_server import BUCKET, S3Server

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)

# The services and backends of a test run compile each program once: they share this folder. JAX's
# own cache must stay off: what it returns cannot be stored again (ADR 12).
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="tuneserve-compiled-")
    os.environ["TUNESERVE_COMPILE_CACHE"] = _compiled.name


# Tests make hundreds of stores, whose folders pytest keeps for a while. Tests of full disks set the
# reserve themselves.
os.environ.setdefault("TUNESERVE_STORE_RESERVE_BYTES", "0")

# A client of the SDK that outlives its server would try for 30 s to send its telemetry at the end.
# tests/integration/test_sdk_wire.py has it on, as by default.
os.environ["TINKER_TELEMETRY"] = "0"


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose programs ``make test`` does not optimise: those that start no service,
    but for tests of equal bits.
    """
    root = Path(__file__).parent
    for item in items:
        is_of_bits = item.get_closest_marker("bits") or re.search(r"_bits?(_|\[|$)", item.name)
        if item.path.relative_to(root).parts[0] in ("engine", "parity") and not is_of_bits:
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish() -> None:
    """Keep the collector of garbage from scanning all modules and programs again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that do not kill it. Each test uses its own key prefix."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def sdk_clients_are_closed() -> Iterator[None]:
    yield
    if "tinker" in sys.modules:
        from tests.sdk import close_clients

        close_clients()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests that do not stop it."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of the test's own in the server's bucket, which this process can reach."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"
