"""A Redis server that may lose accepted requests, or that needs no password, is refused."""

import asyncio
from pathlib import Path

import pytest

from tests.engine.store.contract.bench import session
from tests.engine.store.redis.bench import client, opened, refusal
from tests.redis_server import RedisServer
from tuneserve_engine.core.records import SessionRecord
from tuneserve_engine.store.errors import StoreUnusable
from tuneserve_engine.store.redis import durability
from tuneserve_engine.store.redis.store import RedisStore


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("appendonly", "no"),
        ("appendfsync", "everysec"),
        ("appendfsync", "no"),
        ("no-appendfsync-on-rewrite", "yes"),
        ("maxmemory-policy", "allkeys-lru"),
    ],
)
def test_a_server_that_may_lose_requests_is_refused(
    tmp_path: Path, setting: str, value: str
) -> None:
    with RedisServer(tmp_path / "redis", **{setting: value}) as server:
        said = asyncio.run(refusal(server.url))
        asserted = asyncio.run(refusal(server.url, durability_asserted=True))
    assert f"{setting} is {value!r}" in said
    assert said.endswith(f"set in its configuration: {setting} {durability.SETTINGS[setting]}")
    assert asserted == said  # a setting known to be wrong cannot be asserted


def test_a_server_that_hides_its_settings_needs_the_operators_assertion(tmp_path: Path) -> None:

    async def main(url: str) -> str:
        async with client(url) as redis:
            await redis.acl_setuser("default", enabled=True, commands=["-config"])
        assert "store_durability_asserted" in await refusal(url)
        async with opened(url, tmp_path, durability_asserted=True) as store:
            return store.durability

    with RedisServer(tmp_path / "redis") as server:
        assert asyncio.run(main(server.url)) == "asserted"


def test_readable_settings_need_no_assertion(redis_server: RedisServer, tmp_path: Path) -> None:
    async def main() -> str:
        async with opened(redis_server.url, tmp_path) as store:
            return store.durability

    assert asyncio.run(main()) == "always"


def test_a_remote_server_needs_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "is_local", lambda connection: False)
    with RedisServer(tmp_path / "open") as server:
        assert "lets anybody in" in asyncio.run(refusal(server.url))
    with RedisServer(tmp_path / "closed", requirepass="secret") as server:
        url = server.url.replace("//", "//:secret@")

        async def main() -> None:
            async with opened(url, tmp_path) as store:
                await store.put_record(session())

        asyncio.run(main())
        wrong = asyncio.run(refusal(url.replace("secret", "guess")))
        assert "WRONGPASS" in wrong or "invalid" in wrong
        assert "guess" not in wrong
        assert "uthentication" in asyncio.run(refusal(server.url))


def test_a_unix_socket_needs_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with RedisServer(tmp_path / "redis", unixsocket="s") as server:

        async def main() -> None:
            async with opened(f"unix://{server.folder / 's'}", tmp_path) as store:
                await store.put_record(session())
                assert await store.get_record(SessionRecord, "s") == session()

        asyncio.run(main())


def test_a_user_without_permission_to_subscribe_is_refused_at_once(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        async with client(server.url) as redis:
            await redis.execute_command("ACL", "SETUSER", "default", "-subscribe")
        assert "'subscribe'" in await refusal(server.url)

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server))


@pytest.mark.parametrize(
    ("host", "local"),
    [(None, True), ("127.0.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False)],
)
def test_only_this_machine_is_local(host: str | None, local: bool) -> None:
    class Connection:
        pass

    connection = Connection()
    if host is not None:
        connection.host = host  # type: ignore[attr-defined]
    assert durability.is_local(connection) is local


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"redis_version": "6.2.20"}, "redis 6.2.20, and the oldest that will do is 7.0"),
        ({"redis_version": "8.2.2", "redis_mode": "cluster"}, "a node of a cluster"),
        ({"redis_version": "8.2.2", "role": "slave"}, "a replica"),
        ({}, "the oldest that will do is 7.0"),
    ],
)
def test_a_server_of_another_kind_is_refused(facts: dict[str, str], words: str) -> None:
    with pytest.raises(durability.Unsafe, match=words):
        durability._check_server(facts)


@pytest.mark.parametrize(
    ("product", "unpatched", "patched"),
    [
        ("redis", [(7, 0, 15), (7, 2, 10), (7, 4, 5), (8, 0, 3), (8, 2, 1)], (7, 2, 11)),
        ("redis", [(7, 2, 0)], (7, 4, 6)),
        ("redis", [(8, 1, 0)], (8, 2, 2)),
        ("redis", [], (8, 4, 0)),
        ("valkey", [(7, 2, 10), (8, 0, 5), (8, 1, 3)], (8, 1, 4)),
        ("valkey", [], (9, 0, 0)),
    ],
)
def test_releases_with_the_known_vulnerability_are_recognised(
    product: str, unpatched: list[tuple[int, ...]], patched: tuple[int, ...]
) -> None:
    assert all(durability.is_known_unpatched(product, each) for each in unpatched)
    assert not durability.is_known_unpatched(product, patched)


def test_an_unreadable_address_is_refused() -> None:
    assert "redis://" in asyncio.run(refusal("http://host"))
    assert "without braces" in asyncio.run(refusal("redis://host", prefix="a{b}"))


def test_an_unreachable_server_is_a_connection_error(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        url = server.url

    async def main() -> None:
        with pytest.raises(ConnectionError, match="Redis does not answer"):
            await RedisStore.open(url)

    asyncio.run(main())


def test_a_check_of_a_store_does_not_create_it(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with client(url) as redis:
            assert await RedisStore.check(url) == "always"
            assert await redis.dbsize() == 0
            await (await RedisStore.open(url)).close()
            assert await RedisStore.check(url) == "always"
            await redis.hset("{tuneserve}:meta", "format", "7")
            with pytest.raises(StoreUnusable, match="has format 7, this release reads format 1"):
                await RedisStore.check(url)

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(main(server.url))
