"""The default store: SQLite in the API process, no server to start.

One connection in one thread owns the file (``group_commit``); this class puts the event loop's
side around it: who waits for what, and who is woken by which commit.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from tuneserve_engine.adapters import BaseModelInfo
from tuneserve_engine.jobs import Job, Outcome
from tuneserve_engine.queue import sqlite_jobs as jobs
from tuneserve_engine.queue import sqlite_lifecycle as lifecycle
from tuneserve_engine.queue import sqlite_records as records
from tuneserve_engine.queue.base import Lease, Page, R, Submitted, SweepPolicy
from tuneserve_engine.queue.group_commit import GroupCommit, News, Transaction
from tuneserve_engine.queue.schema import open_database
from tuneserve_engine.records import Record, Update

P = ParamSpec("P")
T = TypeVar("T")


class SqliteStore:
    """A ``Store`` in one file. ``open`` it and call its methods in one event loop; ``close`` it.

    A method that raises ``sqlite3.Error`` (a full disk, an I/O error) has changed nothing.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._commit = GroupCommit(clock, self._announce)
        self._waiting: dict[str, set[asyncio.Future[Outcome | None]]] = {}
        self._news = asyncio.Event()  # replaced after each use: holders of the old one wake
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        trace: Callable[[str], None] | None = None,
    ) -> Self:
        """The store at ``path``, created if missing; ``trace`` sees every SQL statement.
        Raises ``schema.StoreUnusable``."""
        store = cls(clock)
        await store._commit.start(partial(open_database, Path(path), trace))
        return store

    async def close(self) -> None:
        """Finishes what was called. Parked waits return None; parked takes raise."""
        self._closed = True
        await self._commit.stop()
        for waiting in list(self._waiting.values()):
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        self._wake_takes()

    def _call(
        self,
        operation: Callable[Concatenate[Transaction, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Future[T]:
        return self._commit.call(lambda tx: operation(tx, *args, **kwargs))

    def _announce(self, news: News) -> None:
        for outcome in news.ended:
            for future in self._waiting.get(outcome.request_id, ()):
                if not future.done():
                    future.set_result(outcome)
        if news.take:
            self._wake_takes()

    def _wake_takes(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # --- jobs -----------------------------------------------------------------------------------

    async def submit(self, job: Job, *new_records: Record) -> Submitted:
        return await self._call(jobs.submit, job, new_records)

    async def lease(self, owner: str, info: BaseModelInfo) -> Lease:
        return await self._call(lifecycle.lease, owner, info)

    async def take(self, epoch: int, *, after: int, max_jobs: int) -> list[Job]:
        while True:
            news = self._news  # before the read: what is released during it wakes us too
            found = await self._call(jobs.take, epoch, after, max_jobs)
            if found:
                return found
            await news.wait()

    async def finish(self, epoch: int, outcomes: Sequence[Outcome]) -> None:
        await self._call(jobs.finish, epoch, outcomes)

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None:
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(request_id, set())
        waiting.add(future)
        try:
            known = await self._call(jobs.outcome, request_id)
            if known is not None:
                return known
            if not self._closed:
                await asyncio.wait([future], timeout=timeout_s)
            return future.result() if future.done() else None
        finally:
            waiting.discard(future)
            if not waiting:
                del self._waiting[request_id]

    async def job_tenant(self, request_id: str) -> str | None:
        return await self._call(jobs.tenant, request_id)

    # --- records --------------------------------------------------------------------------------

    async def put(self, record: Record) -> None:
        await self._call(records.put, record)

    async def put_new(self, record: R) -> R:
        return await self._call(lambda tx: records.put_new(tx, record))

    async def update(self, *updates: Update) -> None:
        await self._call(lambda tx: [records.update(tx, each) for each in updates])

    async def get(self, record_type: type[R], key: str) -> R | None:
        return await self._call(lambda tx: records.get(tx, record_type, key))

    async def page(
        self,
        record_type: type[R],
        *,
        tenant: str | None = None,
        parent: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Page[R]:
        return await self._call(
            lambda tx: records.page(tx, record_type, tenant, parent, (limit, offset))
        )

    async def delete(self, record_type: type[R], key: str) -> None:
        await self._call(lambda tx: records.delete(tx, record_type, key))

    # --- the rest -------------------------------------------------------------------------------

    async def end_session(self, key: str, reason: str) -> None:
        await self._call(lifecycle.end_session, key, reason)

    async def sweep(self, now_s: float, policy: SweepPolicy) -> None:
        await self._call(lifecycle.sweep, now_s, policy)

    async def base_model(self) -> BaseModelInfo | None:
        return await self._call(lifecycle.base_model)

    async def files_in_use(self) -> set[str]:
        return await self._call(lifecycle.files_in_use)

    async def secret(self) -> bytes:
        return await self._call(lambda tx: bytes(jobs.meta(tx, "secret")))
