"""Redis fulfils the contract (``contract``). It adds several processes, servers that are
wrong, full or gone, and memory that must be released.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.store.contract import Clock, DurableStoreContract
from tests.engine.store.contract.bench import (
    INFO,
    START_S,
    checkpoint,
    create,
    job,
    model,
    point,
    sample,
    sampler,
    session,
)
from tests.engine.store.redis.bench import client, opened, prefix_of, refusal
from tests.redis_server import RedisServer
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.jobs import EncodedTokenDelta, Outcome
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import ModelRecord, ModelStatus, SessionRecord, Update
from tuneserve_engine.core.usage import CurvePoint, Usage
from tuneserve_engine.store.base import Queue, SamplerClient, Store
from tuneserve_engine.store.errors import Fenced, LimitReached, StoreFailed
from tuneserve_engine.store.redis import notifications
from tuneserve_engine.store.redis.store import RedisStore


class OnRedis(DurableStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer) -> None:
        self.server = redis_server

    async def connect(self, folder: Path, clock: Clock, policy: StorePolicy) -> RedisStore:
        return await RedisStore.open(
            self.server.url, clock=clock, policy=policy, prefix=prefix_of(folder)
        )


class TestRedisStore(OnRedis):
    @asynccontextmanager
    async def open(
        self, folder: Path, clock: Clock, policy: StorePolicy
    ) -> AsyncIterator[tuple[Store, Queue]]:
        store = await self.connect(folder, clock, policy)
        try:
            yield store, store
        finally:
            await store.close()


class TestRedisStoreOfTwoProcesses(OnRedis):
    """The worker has its own connections and learns only what Redis reports."""

    @asynccontextmanager
    async def open(
        self, folder: Path, clock: Clock, policy: StorePolicy
    ) -> AsyncIterator[tuple[Store, Queue]]:
        store = await self.connect(folder, clock, policy)
        queue = await self.connect(folder, clock, policy)
        try:
            yield store, queue
        finally:
            await queue.close()
            await store.close()


async def keys(url: str, folder: Path) -> set[str]:
    """Names of all keys of this test, without their common prefix."""
    start = f"{{{prefix_of(folder)}}}:"
    async with client(url) as redis:
        return {key.decode().removeprefix(start) async for key in redis.scan_iter(f"{start}*")}


def test_the_requests_of_a_large_scope_are_read_in_parts(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """One script must not read a million numbers while all other calls wait."""
    others = {str(seq): f"req_{seq}" for seq in range(7000)}  # their requests are forgotten

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store:
            made = [(await store.submit(sample(seq))).request_id for seq in (7000, 10**9, 10**18)]
            async with client(redis_server.url) as redis:
                key = f"{{{prefix_of(tmp_path)}}}:seqs:5:alices:sample:0"
                assert await redis.hset(key, mapping=others) == len(others)
            for limit in (3, 1000):
                kept = await store.kept_requests("alice", "s:sample:0", limit=limit)
                assert [each.request_id for each in kept] == made
            assert [each.seq for each in kept] == [7000, 10**9, 10**18]
            (newest,) = await store.kept_requests("alice", "s:sample:0", limit=1)
            assert newest.request_id == made[-1]

    asyncio.run(main())


# --- a server that was unreachable, or is full ----------------------------------------------------


def test_a_server_that_lost_its_settings_is_no_longer_trusted(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        async with opened(server.url, tmp_path) as store:
            await store.put_record(session())
            server.stop()
            server.settings["appendfsync"] = "everysec"
            server.start()
            with pytest.raises(StoreFailed, match="appendfsync is 'everysec'"):
                await store.put_record(session())
            server.stop()
            server.settings["appendfsync"] = "always"
            server.start()
            assert await store.get_record(SessionRecord, "s") == session()

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server))


def test_a_waiting_call_learns_of_results_after_lost_notifications(
    redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The subscribed connection is cut again and again, and nothing is missed."""
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store, client(redis_server.url) as redis:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            after = 0
            for seq in range(1, 11):
                taking = asyncio.create_task(store.take_jobs(epoch, after=after, max_jobs=1))
                await asyncio.sleep(0.01)
                await redis.client_kill_filter(_type="pubsub")
                request_id = (await store.submit(sample(seq))).request_id
                (taken,) = await asyncio.wait_for(taking, 5)
                after = taken.release
                waiting = asyncio.create_task(store.wait(request_id, 10))
                await asyncio.sleep(0.01)
                await redis.client_kill_filter(_type="pubsub")
                await store.finish(epoch, [Outcome(request_id, b"x")])
                assert await asyncio.wait_for(waiting, 5) == Outcome(request_id, b"x")

    asyncio.run(main())


def test_a_client_waiting_for_samples_learns_of_results_after_lost_notifications(
    redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store, client(redis_server.url) as redis:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            mine = SamplerClient("alice", "s:sample:0", 0)
            after = 0
            for seq in range(1, 11):
                request_id = (await store.submit(sample(seq))).request_id
                waiting = asyncio.create_task(
                    store.completions(mine, after=after, limit=9, timeout_s=10)
                )
                await asyncio.sleep(0.01)
                await redis.client_kill_filter(_type="pubsub")
                await store.finish(epoch, [Outcome(request_id, b"x")])
                (told,) = await asyncio.wait_for(waiting, 5)
                assert told.request_id == request_id
                after = told.number

    asyncio.run(main())


def test_a_long_silence_does_not_count_as_no_news(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every waiting call queries regularly, in case a notification was lost."""
    monkeypatch.setattr("tuneserve_engine.store.redis.connection.SILENCE_S", 0.1)
    heard = notifications.RedisNotifications._hear
    monkeypatch.setattr(
        notifications.RedisNotifications,
        "_hear",
        lambda self, message: heard(self, None) if not message else None,
    )

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            taking = asyncio.create_task(store.take_jobs(epoch, after=0, max_jobs=1))
            request_id = (await store.submit(sample(1))).request_id
            assert len(await asyncio.wait_for(taking, 5)) == 1
            waiting = asyncio.create_task(store.wait(request_id, 10))
            await asyncio.sleep(0.01)
            await store.finish(epoch, [Outcome(request_id, b"x")])
            assert await asyncio.wait_for(waiting, 5) is not None

    asyncio.run(main())


def test_published_tokens_are_not_stored(redis_server: RedisServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store, client(redis_server.url) as redis:
            before = await keys(redis_server.url, tmp_path)
            written = (await redis.info("persistence"))["aof_current_size"]
            heard = store.subscribe(["a"])
            for place in range(100):
                await store.publish_tokens({"a": [EncodedTokenDelta(0, place, bytes(1000))]})
            found = 0
            while found < 100:
                found += len(await heard.take_deltas())
            assert await keys(redis_server.url, tmp_path) == before
            assert (await redis.info("persistence"))["aof_current_size"] == written

    asyncio.run(main())


def test_a_full_server_accepts_nothing_new_and_lets_work_end(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        async with opened(server.url, tmp_path) as store, client(server.url) as redis:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            accepted = (await store.submit(sample(1))).request_id
            await store.put_record(session())
            await redis.config_set("maxmemory", "1mb")
            with pytest.raises(StoreFailed, match=r"Redis is full: .*maxmemory"):
                await store.submit(sample(2))
            (taken,) = await store.take_jobs(epoch, after=0, max_jobs=10)
            await store.note_running(epoch, [taken.request_id])
            await store.publish_tokens({"a": [EncodedTokenDelta(0, 0, b"x")]})
            await store.renew(epoch)
            await store.finish(epoch, [Outcome(accepted, b"x")])
            assert await store.wait(accepted, 0) == Outcome(accepted, b"x")
            await store.update_record(Update("session", "s", {"last_seen_s": START_S + 1}))
            await store.end_session("s", "success")
            await store.sweep(START_S, SweepPolicy())
            async with opened(server.url, tmp_path) as again:
                assert await again.get_record(SessionRecord, "s") is not None
            await redis.config_set("maxmemory", "0")
            assert not (await store.submit(sample(2))).duplicate

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server))


def test_a_cancelled_call_does_not_affect_others(redis_server: RedisServer, tmp_path: Path) -> None:
    """The answer to a cancelled call must not be taken for the answer to the next."""

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store:
            await asyncio.gather(*(store.put_record(session(f"s{n}")) for n in range(50)))
            for turn in range(20):
                calls = [
                    asyncio.create_task(store.get_record(SessionRecord, f"s{n}")) for n in range(50)
                ]
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                for call in calls[turn % 3 :: 3]:
                    call.cancel()
                found = await asyncio.gather(*calls, return_exceptions=True)
                for n, each in enumerate(found):
                    assert isinstance(each, asyncio.CancelledError) or each == session(f"s{n}")

    asyncio.run(main())


def test_a_closed_store_refuses_calls(redis_server: RedisServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store:
            epoch = (await store.lease("worker", "process", INFO)).epoch
            request_id = (await store.submit(job(2))).request_id
            taking = asyncio.create_task(store.take_jobs(epoch, after=0, max_jobs=1))
            waiting = asyncio.create_task(store.wait(request_id, 10))
            await asyncio.sleep(0.05)
            await store.close()
            assert await waiting is None
            with pytest.raises(ConnectionError, match="closed"):
                await taking
            with pytest.raises(ConnectionError, match="closed"):
                await store.get_record(SessionRecord, "s")

    asyncio.run(main())


def test_a_store_of_another_format_is_refused(redis_server: RedisServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(redis_server.url, tmp_path), client(redis_server.url) as redis:
            await redis.hset(f"{{{prefix_of(tmp_path)}}}:meta", "format", 7)

    asyncio.run(main())
    said = asyncio.run(refusal(redis_server.url, prefix=prefix_of(tmp_path)))
    assert "has format 7, this release reads format 1" in said
    assert "start the release that wrote it" in said


def test_two_deployments_share_a_server_and_nothing_else(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            opened(redis_server.url, tmp_path / "a") as one,
            opened(redis_server.url, tmp_path / "b") as other,
        ):
            await one.put_record(session())
            assert await other.get_record(SessionRecord, "s") is None
            assert await one.secret() != await other.secret()

    asyncio.run(main())


ROLE = "+@read +@write +@scripting +@connection +subscribe +publish +time +info +config|get"


def test_a_user_restricted_to_its_keys_is_enough(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        names = f"{{{prefix_of(tmp_path)}}}:*"
        rules = f"on >secret ~{names} &{names} {ROLE} -@dangerous +info +config|get"
        async with client(server.url) as redis:
            await redis.execute_command("ACL", "SETUSER", "tuneserve", *rules.split())
        url = server.url.replace("//", "//tuneserve:secret@")
        async with opened(url, tmp_path) as store:
            assert store.durability == "always"
            await _live(store)
            await store.sweep(START_S + 100_000, SweepPolicy())
            await store.files_in_use()
        assert "no permissions" in await refusal(url, prefix="another")

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server))


# --- stored values --------------------------------------------------------------------------------


def test_large_numbers_and_empty_lists_are_stored_exactly(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Lua's numbers have 53 bits, and its JSON writes an empty list as an object."""

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store:
            seeded = replace(model(), config=AdapterConfig(rank=4, alpha=0.1, seed=2**63 - 1))
            await store.put_record(seeded)
            await store.put_record(session(tags=[], created_s=1763663470.123457))
            await store.submit(replace(job(1), seq=2**63 - 1))  # rewrites the model
            epoch = (await store.lease("worker", "process", INFO)).epoch
            (taken,) = await store.take_jobs(epoch, after=0, max_jobs=1)
            assert taken.seq == 2**63 - 1
            stored = await store.get_record(ModelRecord, seeded.key)
            assert stored is not None and stored.config == seeded.config
            assert stored.last_request_s > seeded.last_request_s
            await store.end_session("s", "success")
            ended = await store.get_record(SessionRecord, "s")
            assert ended == session(tags=[], created_s=1763663470.123457, ended="success")

    asyncio.run(main())


def test_no_two_names_make_one_key(redis_server: RedisServer, tmp_path: Path) -> None:
    evil = ["a", "a:b", "b", ":", "", '"', '","', "1:a", "*", "a*", "{x}", "\n", "ä", "a b"]

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store:
            ids = set()
            for tenant in evil:
                for scope in evil:
                    made = await store.submit(sample(1, tenant=tenant, scope=scope))
                    assert not made.duplicate
                    assert await store.job_key(made.request_id) == (tenant, scope)
                    ids.add(made.request_id)
            assert len(ids) == len(evil) ** 2
            for n, tenant in enumerate(evil):
                for parent in evil[: n + 1]:
                    record = replace(model(f"{n}:{parent}", tenant=tenant), parent=parent)
                    await store.put_record(record)
            for n, tenant in enumerate(evil):
                assert (await store.page_of_records(ModelRecord, tenant=tenant)).total == n + 1
                assert (await store.page_of_records(ModelRecord, parent=tenant)).total == len(
                    evil
                ) - n
                both = await store.page_of_records(ModelRecord, tenant=tenant, parent=evil[0])
                assert [each.key for each in both.items] == [f"{n}:{evil[0]}"]

    asyncio.run(main())


def test_all_keys_share_one_hash_tag(redis_server: RedisServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with client(redis_server.url) as redis:
            before = {key async for key in redis.scan_iter()}
            async with opened(redis_server.url, tmp_path) as store:
                await _live(store)
            made = {key async for key in redis.scan_iter()} - before
        assert len(made) > 5
        tag = f"{{{prefix_of(tmp_path)}}}:".encode()
        assert all(key.startswith(tag) for key in made)

    asyncio.run(main())


async def _live(store: RedisStore) -> None:
    """The life of a session: a model that trains, is saved and unloaded, a sample, a cancelled
    sample, a gap, and two workers.
    """
    epoch = (await store.lease("worker", "process", INFO)).epoch
    await store.put_record(session())
    await store.put_record(sampler(file_id="f"))
    created = await store.submit(create(), model(status=ModelStatus.CREATING))
    ready = Update("model", "s:train:0", {"status": "ready"})
    await store.finish(epoch, [Outcome(created.request_id, b"{}", updates=(ready,))])
    steps = [(await store.submit(job(seq))).request_id for seq in (1, 2, 3, 5)]
    sampled = (await store.submit(sample(1, "f"))).request_id
    await store.cancel((await store.submit(sample(2, "f"))).request_id)
    await store.join_sampler("s:sample:0")
    await store.note_running(epoch, steps)
    usage, drawn = Usage(0.5, 9), CurvePoint("optim_step", 1, step=1)
    results = [
        Outcome(each, b"r" * 100, changed=True, usage=usage, point=drawn) for each in steps[:3]
    ]
    await store.finish(epoch, [*results, Outcome(sampled, b"s" * 100, usage=usage)])
    for position in (1, 2, 3):
        await store.save_point(epoch, point(position))
    other = (await store.lease("other", "process", INFO)).epoch
    await store.unassign(epoch, "s:train:0")
    await store.submit(job(4))
    await store.resign(other)
    await store.put_record(checkpoint(expires_s=START_S))
    await store.end_session("s", "success")
    last = await store.take_jobs(epoch, after=0, max_jobs=10)
    await store.finish(epoch, [Outcome(each.request_id) for each in last])
    await store.resign(epoch)


def test_only_tombstones_and_records_remain(redis_server: RedisServer, tmp_path: Path) -> None:
    async def main() -> None:
        clock = Clock()
        async with opened(redis_server.url, tmp_path, clock=clock) as store:
            await _live(store)
            await store.sweep(START_S + 100_000, SweepPolicy())
            with pytest.raises(Fenced):
                await store.renew(1)
        left = {key for key in await keys(redis_server.url, tmp_path)}
        kinds = {key.split(":")[0] for key in left}
        assert kinds == {
            *("meta", "tenant", "tenants", "served", "served-seen"),
            *("usage", "usage-days"),
            *("job", "seqs", "expired", "completions", "lane", "record", "list", "released"),
            *("curve", "curve-seen", "ended-sessions"),
        }
        async with client(redis_server.url) as redis:
            start = f"{{{prefix_of(tmp_path)}}}:"
            for counted in ("meta", "tenant:alice", "lane:s:train:0"):
                assert await redis.hmget(start + counted, "jobs", "bytes") == [b"0", b"0"]
            for key in (each for each in left if each.startswith("job:")):
                assert await redis.memory_usage(start + key) < 300
                assert await redis.object("encoding", start + key) == b"listpack"
        async with opened(redis_server.url, tmp_path, clock=clock) as store:
            await store.sweep(START_S + 200_000, SweepPolicy())
        gone = left - await keys(redis_server.url, tmp_path)
        forgotten = ("job:", "seqs:", "expired", "completions:")
        assert gone == {key for key in left if key.startswith(forgotten)}
        async with opened(redis_server.url, tmp_path, clock=clock) as store:
            await store.sweep(START_S + 3_000_000, SweepPolicy())
        kinds = {key.split(":")[0] for key in await keys(redis_server.url, tmp_path)}
        assert kinds == {
            "meta",
            "tenant",
            "tenants",
            "served",
            "served-seen",
            "usage",
            "usage-days",
        }


def test_sessions_of_an_earlier_release_are_counted_and_forgotten(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Earlier releases stored the open sessions alone, and not by tenant."""

    async def main() -> None:
        start = f"{{{prefix_of(tmp_path)}}}:"
        policy = StorePolicy(tenant_sessions=2)
        async with opened(redis_server.url, tmp_path) as store:
            for key in "abc":
                await store.put_record(session(key))
            await store.end_session("c", "success")
        async with client(redis_server.url) as redis:
            assert await redis.delete(f"{start}ended-sessions", f"{start}open-sessions:alice") == 2
            await redis.hdel(f"{start}meta", "watched")
        async with opened(redis_server.url, tmp_path, policy=policy) as store:
            with pytest.raises(LimitReached, match="your key has 2 sessions"):
                await store.put_new_record(session("d"))
            await store.sweep(START_S + 3_000_000, SweepPolicy(session_ttl_s=1e9))
            assert {each.key for each in (await store.page_of_records(SessionRecord)).items} == {
                "a",
                "b",
            }
            await store.end_session("b", "success")
        async with client(redis_server.url) as redis:  # an earlier release ran for a while
            assert await redis.delete(f"{start}ended-sessions") == 1
        async with opened(redis_server.url, tmp_path, policy=policy) as store:
            await store.sweep(START_S + 3_000_000, SweepPolicy(session_ttl_s=1e9))
            assert {each.key for each in (await store.page_of_records(SessionRecord)).items} == {
                "a"
            }

    asyncio.run(main())

    asyncio.run(main())


def test_without_a_clock_the_time_is_the_servers(redis_server: RedisServer, tmp_path: Path) -> None:
    """Hosts whose clocks differ must agree on the silence of workers."""

    async def main() -> None:
        async with opened(redis_server.url, tmp_path) as store, client(redis_server.url) as redis:
            seconds, micros = await redis.time()
            await store.lease("worker", "process", INFO)
            (served,) = await store.base_models()
            assert 0 <= served.seen_s - (seconds + micros / 1e6) < 5

    asyncio.run(main())
