"""One SQLite connection in one thread; waiting operations share one transaction and one fsync.

Each operation runs in a savepoint of its own: an operation that raises takes back only its own
changes. No caller gets a result before it is durable. Operations run in the order of the calls,
except that those that add much to the store let all others go first.
"""

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.process.failpoints import failpoint
from tuneserve_engine.store.base import SamplerClient
from tuneserve_engine.store.sqlite.database import is_held, write_into_file
from tuneserve_engine.store.sqlite.reserve import NO_RESERVE, Reserve, is_full, no_room

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Row = tuple[Any, ...]
MAX_GROUP = 256
"""The most operations in a transaction, large ones aside; it bounds the wait of the first."""
LARGE_BYTES = 2**16
"""An operation that adds this much to the store, or more, is a large one."""
GROUP_BYTES = 2**20
"""Once large operations have added this much, no further one joins the transaction."""


@dataclass
class CommitEvents:
    """The changes of a commit that a call may be waiting for."""

    take: bool = False  # jobs were placed with a worker, or a lease is over
    ended: list[Outcome] = field(default_factory=list)
    completed: set[SamplerClient] = field(default_factory=set)  # clients of the ended samples
    cancelled: list[tuple[int, str]] = field(default_factory=list)  # epoch to inform, request id
    over: list[int] = field(default_factory=list)  # epochs that have ended
    shrunk: bool = False  # pages were freed: shorten the files at once


@dataclass
class Transaction:
    """An operation's view: the connection, the time, and the events that the operation adds."""

    connection: sqlite3.Connection
    now_s: float
    news: CommitEvents = field(default_factory=CommitEvents)

    def execute(self, sql: str, *values: Any, **named: Any) -> sqlite3.Cursor:
        """Execute a statement with values for ``?``, or with values for names such as ``:key``."""
        assert not (named and values), sql
        return self.connection.execute(sql, named or values)

    def holds_file(self) -> bool:
        """Return whether the file is held; see ``database.is_held``."""
        return is_held(self.connection)

    def write_into_file(self) -> bool:
        """End the hold of the file; see ``database.write_into_file``."""
        return write_into_file(self.connection)


class Call(NamedTuple):
    """An operation with its arguments and a waiting caller.

    ``grows_by`` is roughly the number of bytes that it adds to the store. While the disk is full,
    an operation that adds any is refused, so that all others have room.
    """

    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: "asyncio.Future[Any]"
    grows_by: int = 0


class GroupCommit:
    """A thread that owns the connection and runs the operations of one event loop.

    ``announce`` is called on the loop after each commit, once for each operation that succeeded,
    before the callers resume.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        announce: Callable[[CommitEvents], None],
        reserve: Reserve = NO_RESERVE,
    ) -> None:
        self._reserve = reserve
        self._clock = clock
        self._announce = announce
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._large: deque[Call] = deque()  # taken from the queue, not run yet
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._thread: threading.Thread | None = None

    async def start(self, connect: Callable[[], sqlite3.Connection]) -> None:
        """Run ``connect`` in the thread and wait for it; raises what it raises."""
        opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(connect, opened), name="store", daemon=True
        )
        self._thread.start()
        await opened

    def run_operation(
        self, operation: Callable[[Transaction, *Ts], T], *arguments: *Ts, grows_by: int = 0
    ) -> "asyncio.Future[T]":
        """Return a future of the operation's result, or of its exception, once it is durable.

        An operation whose ``grows_by`` is above 0 raises ``StoreFailed`` while the disk is full.
        """
        if self._closing:
            raise ConnectionError("the store is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put(Call(operation, arguments, future, grows_by))
        return future

    async def stop(self) -> None:
        """Finish the calls made so far, close the connection and end the thread."""
        if not self._closing:
            self._closing = True
            self._calls.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _main(
        self, connect: Callable[[], sqlite3.Connection], opened: "asyncio.Future[None]"
    ) -> None:
        try:
            connection = connect()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._deliver, [opened], [error], [])
            return
        self._loop.call_soon_threadsafe(self._deliver, [opened], [None], [])
        try:
            while calls := self._next_group():
                accepts = self._reserve.is_held or self._reserve.hold()
                allowed = calls if accepts else _without_growth(calls)
                results, news = commit(connection, allowed, self._clock())
                failed = [n for n, result in enumerate(results) if isinstance(result, Exception)]
                if again := [n for n in failed if is_full(results[n])]:
                    news += self._commit_again(connection, allowed, results, again)

                futures = [each.future for each in calls]
                self._loop.call_soon_threadsafe(self._deliver, futures, results, news)
        finally:
            connection.close()

    def _next_group(self) -> list[Call]:
        """Wait for calls, and return those to commit together; none once the store is closed."""
        group: list[Call] = []
        while len(group) < MAX_GROUP and not (self._calls.empty() and (group or self._large)):
            if (call := self._calls.get()) is None:
                self._calls.put(None)  # the next turns see it too, after what is left
                break
            (self._large if call.grows_by >= LARGE_BYTES else group).append(call)
        size = 0
        while self._large and size < GROUP_BYTES:
            group.append(self._large.popleft())
            size += group[-1].grows_by
        return group

    def _commit_again(
        self,
        connection: sqlite3.Connection,
        calls: list[Call],
        results: list[Any],
        again: list[int],
    ) -> list[CommitEvents]:
        """Run the calls numbered in ``again``, which found the disk full, once more.

        This run has the space of the reserve, and writes from the beginning of the write-ahead log,
        whose file has room of its own. Replaces the results and returns the new events.
        """
        left = [calls[n] for n in again]
        left = _without_growth(left) if self._reserve.give() else left
        write_into_file(connection)  # room is needed: this ends a check of the file
        _write_back(connection)
        others, news = commit(connection, left, self._clock())
        for n, result in zip(again, others, strict=True):
            results[n] = result
        return news

    def _deliver(
        self, futures: list["asyncio.Future[Any]"], results: list[Any], news: list[CommitEvents]
    ) -> None:
        for each in news:
            self._announce(each)
        for future, result in zip(futures, results, strict=True):
            if future.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def commit(
    connection: sqlite3.Connection, calls: list[Call], now_s: float
) -> tuple[list[Any], list[CommitEvents]]:
    """Run the calls in one transaction and return their results and their events, all durable.

    Results (or exceptions) are in the order of ``calls``. If the commit fails, every call gets its
    exception and nothing has changed.
    """
    news: list[CommitEvents] = []
    results: list[Any] = []
    try:
        if connection.in_transaction:  # an earlier rollback failed
            connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        before = connection.total_changes
        for each in calls:
            transaction = Transaction(connection, now_s)
            connection.execute("SAVEPOINT operation")
            try:
                results.append(each.operation(transaction, *each.arguments))
                news.append(transaction.news)
            except Exception as error:
                if not connection.in_transaction:
                    raise  # SQLite rolled back the whole transaction: a full disk, an I/O error
                connection.execute("ROLLBACK TO operation")
                results.append(error)
            connection.execute("RELEASE operation")

        if connection.total_changes == before:
            connection.execute("COMMIT")
        else:
            failpoint("store-before-commit")
            connection.execute("COMMIT")
            failpoint("store-after-commit")
        if any(each.shrunk for each in news):
            _write_back(connection)
    except Exception as error:
        with suppress(sqlite3.Error):  # if the rollback fails, the next group tries it again
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return [error] * len(calls), []
    return results, news


def _write_back(connection: sqlite3.Connection) -> None:
    """Write the write-ahead log into the file, so that the log starts again from its beginning.

    The log keeps its length, which is room to write in on a full disk. Does nothing while the file
    is held for a check.
    """
    if is_held(connection):
        return
    with suppress(sqlite3.Error):  # SQLite does it again by itself, later
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _without_growth(calls: list[Call]) -> list[Call]:
    return [each._replace(operation=_refuse) if each.grows_by else each for each in calls]


def _refuse(*_: object) -> None:
    raise no_room()
