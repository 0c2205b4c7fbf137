"""A Redis that was wiped or replaced is noticed at every step, and left as it is."""

import asyncio
from pathlib import Path

import pytest

from tests.engine.store.contract.bench import INFO, create, job, session
from tests.engine.store.redis.bench import client, opened, prefix_of, refusal
from tests.redis_server import RedisServer
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.records import SessionRecord
from tuneserve_engine.store.errors import StoreReplaced, StoreUnusable
from tuneserve_engine.store.redis.store import RedisStore


def test_nothing_is_accepted_or_written_after_redis_was_wiped(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        async with opened(server.url, tmp_path) as store, client(server.url) as redis:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            accepted = await store.submit(create())
            await redis.flushall()
            calls = [
                lambda: store.submit(job(1)),
                lambda: store.put_record(session()),
                lambda: store.get_record(SessionRecord, "s"),
                # not a KeyError: the request is not unknown
                lambda: store.wait(accepted.request_id, 5),
                lambda: store.renew(epoch),  # not Fenced: the worker has made no mistake
                lambda: store.finish(epoch, [Outcome(accepted.request_id)]),
                lambda: store.files_in_use(),
                lambda: store.base_models(),
            ]
            for call in calls:
                with pytest.raises(StoreReplaced, match=r"wiped.*start Redis again with the"):
                    await call()
            assert await redis.keys("*") == []

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server))


def test_with_its_data_back_everything_continues(tmp_path: Path) -> None:
    """Redis is started in an empty directory by mistake, and then in its own."""

    async def main(server: RedisServer) -> None:
        async with opened(server.url, tmp_path) as store:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            accepted = await store.submit(create())
            server.kill()
            server.folder, own = tmp_path / "empty", server.folder
            server.folder.mkdir()
            server.start()
            with pytest.raises(StoreReplaced):
                await store.submit(job(1))
            server.kill()
            server.folder = own
            server.start()
            assert (await store.submit(create())).request_id == accepted.request_id
            await store.finish(epoch, [Outcome(accepted.request_id)])
            assert await store.wait(accepted.request_id, 5) is not None

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server))


def test_the_remains_of_a_wiped_store_are_refused_with_a_way_out(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Some releases left them by writing on into the empty Redis."""

    async def main() -> str:
        async with client(redis_server.url) as redis:
            await redis.hset(f"{{{prefix_of(tmp_path)}}}:meta", "records", 3)
        with pytest.raises(StoreUnusable, match="wiped"):
            await RedisStore.check(redis_server.url, prefix=prefix_of(tmp_path))
        return await refusal(redis_server.url, prefix=prefix_of(tmp_path))

    said = asyncio.run(main())
    assert "wiped" in said and "appendonlydir" in said and "FLUSHDB" in said


def test_a_new_store_is_created_only_where_it_is_allowed(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    prefix = prefix_of(tmp_path)

    def refuse() -> None:
        raise StoreUnusable("not here")

    async def main() -> None:
        with pytest.raises(StoreUnusable, match="not here"):
            await RedisStore.open(redis_server.url, prefix=prefix, before_new=refuse)
        async with client(redis_server.url) as redis:
            assert await redis.keys(f"*{prefix}*") == []
        async with opened(redis_server.url, tmp_path):
            pass
        store = await RedisStore.open(redis_server.url, prefix=prefix, before_new=refuse)
        await store.close()

    asyncio.run(main())
