"""A store in memory, for tests and simulations: same rules, no file, no thread, no durability."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.store.sqlite.group_commit import Call, CommitEvents, Transaction, commit
from tuneserve_engine.store.sqlite.schema import create_tables
from tuneserve_engine.store.sqlite.store import DEFAULT_POLICY, SqlStore

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_SECRET = bytes(32)  # a public constant, so that the same requests get the same ids in every run


class InlineCommit:
    """Runs each operation when it is called, on the event loop, in its own transaction."""

    def __init__(
        self, clock: Callable[[], float], announce: Callable[[CommitEvents], None]
    ) -> None:
        self._clock = clock
        self._announce = announce
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        create_tables(self._connection, _SECRET)
        self._closed = False

    def run_operation(
        self, operation: Callable[[Transaction, *Ts], T], *arguments: *Ts, grows_by: int = 0
    ) -> "asyncio.Future[T]":
        """The result of ``operation``, or its exception, available at once."""
        if self._closed:
            raise ConnectionError("the store is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = Call(operation, arguments, future)
        (result,), news = commit(self._connection, [call], self._clock())
        for each in news:
            self._announce(each)
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future

    async def stop(self) -> None:
        self._closed = True
        self._connection.close()


class MemoryStore(SqlStore):
    """The store of a process that stores nothing on disk.

    Its behaviour depends only on the calls and the clock.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        policy: StorePolicy = DEFAULT_POLICY,
    ) -> None:
        super().__init__(policy)
        self._commit = InlineCommit(clock, self._announce)

    async def seat(self) -> str:
        return "memory"
