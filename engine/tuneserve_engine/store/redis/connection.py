"""The connection to a Redis server: verified connections, scripts, and its messages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tuneserve_engine.store.errors import StoreFailed, StoreReplaced, StoreUnusable
from tuneserve_engine.store.redis.durability import Checker, Unsafe
from tuneserve_engine.store.redis.scripts import script

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 16  # Redis makes one fsync for all commands that arrive together
ANSWER_S = 10.0
CONNECT_S = 3.0
_CERTIFICATE = ("ssl_certfile", "ssl_keyfile", "ssl_password")
SILENCE_S = 15.0  # after this time without a message, all waiting calls look again


class Server:
    """A Redis server, and the keys of one deployment in it.

    Every call raises ``ConnectionError`` if the server cannot be reached or does not answer, and
    ``StoreFailed`` if it refuses. A call that raised may still have been carried out.
    """

    def __init__(self, url: str, prefix: str, durability_asserted: bool) -> None:
        if not prefix or not set(prefix).isdisjoint("{}"):
            raise StoreUnusable(
                f"the key prefix {prefix!r} of the Redis store must be a text without braces"
            )
        self._prefix = f"{{{prefix}}}:"  # braces choose the cluster node: all keys share one
        self._meta = f"{self._prefix}meta"
        self.checker = Checker(durability_asserted)
        self.identity = ""  # hash of the store's secret, once known: scripts refuse another store
        try:
            self._pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MOST_CONNECTIONS,
                timeout=ANSWER_S,
                protocol=2,
                socket_connect_timeout=CONNECT_S,
                retry=Retry(NoBackoff(), 1),
                redis_connect_func=self._greet,
            )
        except ValueError as error:
            raise StoreUnusable(
                f"the address of the Redis store cannot be read: {error}; it should look like "
                "redis://:password@host:6379/0, rediss://… or unix:///path?password=…"
            ) from error
        # These override the address. With a time-out of its own, redis-py writes under
        # asyncio.wait_for, which in Python 3.11 can swallow a cancellation.
        self._pool.connection_kwargs |= {"decode_responses": False, "socket_timeout": None}
        self._client: Any = Redis(connection_pool=self._pool)

    async def _greet(self, connection: Any) -> None:
        """Log in, then check that the server keeps accepted data.

        Every connection does this: a server that was started again may have lost its settings.
        """
        await connection.on_connect()
        await self.checker.verify(connection, self._stranger)

    def _stranger(self) -> Any:
        """Make a connection to the same server that does not log in."""
        kwargs = dict(self._pool.connection_kwargs)
        for name in ("username", "password", "credential_provider", *_CERTIFICATE):
            kwargs.pop(name, None)
        kwargs |= {"redis_connect_func": _stay_silent, "retry": Retry(NoBackoff(), 0)}
        return self._pool.connection_class(**kwargs)

    async def check(self) -> None:
        """Connect. Raises ``StoreUnusable`` for a server that cannot be the store."""
        with _translated():
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._client.ping()
            except (AuthenticationError, AuthorizationError) as error:
                raise StoreUnusable(
                    f"Redis cannot be the store: {error} Give the right user and password in the "
                    "store's address"
                ) from error
            except (RedisConnectionError, RedisTimeoutError):
                raise  # it may be starting
            except RedisError as error:
                way_out = "" if isinstance(error, Unsafe) else "; see the store's address"
                raise StoreUnusable(f"Redis cannot be the store: {error}{way_out}") from error

    async def run_script(self, step: str, *args: Any, now: str = "") -> Any:
        """Run the script of ``step`` and return its answer."""
        code = script(step)
        call = self._client.execute_command
        now = f"{now} {self.identity}"
        with _translated():
            async with asyncio.timeout(ANSWER_S):
                try:
                    return await call("EVALSHA", code.sha, 1, self._meta, now, *args)
                except NoScriptError:  # the server is new, or was started again
                    return await call("EVAL", code.text, 1, self._meta, now, *args)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[AsyncIterator[bytes | None]]:
        """Subscribe to the messages for waiting calls from now on.

        Yields an iterator over them, with None after each ``SILENCE_S`` without a message. Raises
        ``ConnectionError`` when the connection is lost.
        """
        connection: Any = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            with _translated():
                async with asyncio.timeout(ANSWER_S):
                    await connection.connect()
                    await connection.send_command("SUBSCRIBE", f"{self._prefix}news")
                    await connection.read_response()
                yield _messages(connection)
        finally:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        await self._pool.disconnect()


async def _stay_silent(connection: Any) -> None:
    connection._parser.on_connect(connection)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn Redis errors and time-outs into the store's errors."""
    try:
        yield
    except RedisError as error:
        raise _as_told(error) from error
    except TimeoutError as error:
        raise ConnectionError(
            f"Redis did not answer within {ANSWER_S:g} s; see whether its disk is slow, or full"
        ) from error


def _as_told(error: RedisError) -> Exception:
    if isinstance(error, Unsafe | AuthenticationError | AuthorizationError):
        return StoreFailed(f"Redis cannot be the store as it is now: {error}")
    if str(error).startswith("OTHERSTORE"):
        return StoreReplaced(
            "what answers at the address of the Redis store is not the store that this process "
            "opened: it is empty, or another (wiped, or started in another directory); nothing "
            "was accepted or changed; start Redis again with the store's data (appendonlydir, from "
            "a backup if it is lost), and everything goes on"
        )
    if isinstance(error, RedisConnectionError | RedisTimeoutError):
        return ConnectionError(f"Redis does not answer: {error}; see that it runs")
    if isinstance(error, OutOfMemoryError):
        return StoreFailed(
            f"Redis is full: {error}; wait until work has ended, or give it more memory (maxmemory)"
        )
    if isinstance(error, ReadOnlyError):
        return StoreFailed(f"Redis takes no writes: {error}; give the address of the primary")
    return StoreFailed(f"Redis refused: {error}; its log says more")


async def _messages(connection: Any) -> AsyncIterator[bytes | None]:
    while True:
        answer: Any = await connection.read_response(timeout=SILENCE_S)
        if answer is None:
            yield None
            await connection.send_command("PING")
            answer = await connection.read_response(timeout=ANSWER_S)
            if answer is None:
                raise RedisConnectionError(f"nothing was heard for {ANSWER_S:g} s")
        if answer[0] == b"message":
            yield answer[2]
