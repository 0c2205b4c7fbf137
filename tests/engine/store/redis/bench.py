"""Helpers for tests of the Redis store: a separate store on a shared server."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.redis.store import RedisStore


def prefix_of(folder: Path) -> str:
    """A key prefix unique to the test."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:12]


@asynccontextmanager
async def opened(url: str, folder: Path, **options: Any) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(url, prefix=prefix_of(folder), **options)
    try:
        async with asyncio.timeout(20):
            yield store
    finally:
        await store.close()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(url, protocol=2) as redis:
        yield redis


async def refusal(url: str, **options: Any) -> str:
    """The reason why the store cannot be opened."""
    with pytest.raises(StoreUnusable) as refused:
        await RedisStore.open(url, **options)
    return str(refused.value)
