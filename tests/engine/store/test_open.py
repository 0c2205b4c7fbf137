"""Opening the store that the settings name."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import open as opening
from tuneserve_engine.store import remote
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.open import open_queue, open_store
from tuneserve_engine.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def opened_with(monkeypatch: pytest.MonkeyPatch) -> list[StorePolicy]:
    """The policies with which SQLite stores were opened."""
    policies: list[StorePolicy] = []
    open_sqlite: Callable[..., Any] = SqliteStore.open

    async def noting(path: Path, *, policy: StorePolicy, **others: Any) -> Any:
        policies.append(policy)
        return await open_sqlite(path, policy=policy, **others)

    monkeypatch.setattr(opening.SqliteStore, "open", noting)
    return policies


async def test_without_an_address_the_store_is_a_file_in_the_data_directory(
    tmp_path: Path, opened_with: list[StorePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**40))
    settings = CommonSettings(data_dir=tmp_path / "new", lease_ttl_s=9, job_attempts=5)
    store = await open_store(settings)
    assert await store.base_models() == []
    await store.close()
    assert (tmp_path / "new" / "store.db").is_file()
    assert opened_with == [StorePolicy(lease_ttl_s=9.0, job_attempts=5)]


async def test_waiting_requests_take_at_most_a_quarter_of_the_free_disk(
    tmp_path: Path,
    opened_with: list[StorePolicy],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 4000))
    with caplog.at_level(logging.WARNING):
        await (await open_store(CommonSettings(data_dir=tmp_path))).close()
    assert [policy.server_bytes for policy in opened_with] == [1000]
    assert "1000 bytes instead of 2147483648" in caplog.text


async def test_a_start_on_a_full_disk_leaves_room_for_later_requests(
    tmp_path: Path, opened_with: list[StorePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(16_000, 16_000, 0))
    await (await open_store(CommonSettings(data_dir=tmp_path))).close()
    assert [policy.server_bytes for policy in opened_with] == [1000]


async def test_a_worker_reaches_the_sqlite_store_of_the_api_process(tmp_path: Path) -> None:
    settings = CommonSettings(data_dir=tmp_path)
    store = await open_store(settings)
    async with remote.serve(store, settings.store_socket), open_queue(settings) as connect:
        for _ in range(2):  # the second time as after a lost connection
            queue = await connect()
            lease = await queue.lease("worker", "me", FAKE_INFO)
        assert lease.resumed
        assert [each.workers for each in await store.base_models()] == [1]
    await store.close()


async def test_a_data_directory_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="choose a shorter data directory"):
        async with open_queue(CommonSettings(data_dir=tmp_path / ("x" * 100))):
            pass


async def test_a_start_waits_for_an_unreachable_redis_until_the_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_RETRY_S", 0.01)
    address = f"unix://user:hunter2@{tmp_path}/redis.sock"
    settings = CommonSettings(data_dir=tmp_path, store=address)
    stopped = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, stopped.set)
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionError):
        await open_store(settings, stopped)
    assert caplog.text.count("trying again") > 1
    assert "hunter2" not in caplog.text
    assert not (tmp_path / "store.db").exists()
