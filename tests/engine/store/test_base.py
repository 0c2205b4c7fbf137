"""The stores that need no server fulfil the contract (``store_contract``)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.store.contract import Clock, DurableStoreContract, StoreContract
from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.store.base import Queue, Store
from tuneserve_engine.store.errors import Fenced
from tuneserve_engine.store.remote import RemoteQueue, serve
from tuneserve_engine.store.sqlite.store import SqliteStore


class TestMemoryStore(StoreContract):
    @asynccontextmanager
    async def open(
        self, folder: Path, clock: Clock, policy: StorePolicy
    ) -> AsyncIterator[tuple[Store, Queue]]:
        store = MemoryStore(clock=clock, policy=policy)
        try:
            yield store, store
        finally:
            await store.close()


class TestSqliteStore(DurableStoreContract):
    @asynccontextmanager
    async def open(
        self, folder: Path, clock: Clock, policy: StorePolicy
    ) -> AsyncIterator[tuple[Store, Queue]]:
        store = await SqliteStore.open(folder / "store.db", clock=clock, policy=policy)
        try:
            yield store, store
        finally:
            await store.close()


class TestSqliteStoreOverASocket(DurableStoreContract):
    """The worker's calls go through ``RemoteQueue``."""

    @asynccontextmanager
    async def open(
        self, folder: Path, clock: Clock, policy: StorePolicy
    ) -> AsyncIterator[tuple[Store, Queue]]:
        store = await SqliteStore.open(folder / "store.db", clock=clock, policy=policy)
        queue = RemoteQueue(folder / "q.sock")
        try:
            async with serve(store, folder / "q.sock"):
                await queue.connect(5)
                # a round trip, because asyncio leaks a connection that it is still accepting
                with pytest.raises(Fenced):
                    await queue.renew(0)
                yield store, queue
        finally:
            await queue.close()
            await store.close()
