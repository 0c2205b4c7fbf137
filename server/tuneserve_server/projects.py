"""Projects: names under which clients file their sessions, with the models made in these.

A project exists by being named, and belongs to a tenant as its sessions do.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query

from tuneserve_engine.core.records import CheckpointRecord, ModelRecord, SessionRecord
from tuneserve_engine.store.base import Page, R, Store
from tuneserve_server.dependencies import Access, Caller

_READ_AT_ONCE = 200

Listed = SessionRecord | ModelRecord | CheckpointRecord


@dataclass(frozen=True)
class ListFilter:
    """The wanted part of a list; it is a dependency of routes."""

    access_scope: Access = "owned"
    project_id: Annotated[str | None, Query(max_length=256)] = None


FilterDep = Annotated[ListFilter, Depends()]


class ProjectNames:
    """The projects of records. A model's is that of its session; a checkpoint's, of its model."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._models: dict[str, ModelRecord | None] = {}

    async def model(self, key: str) -> ModelRecord | None:
        """Return the model, as it was when it was asked for first; None if it is forgotten."""
        if key not in self._models:
            self._models[key] = await self._store.get_record(ModelRecord, key)
        return self._models[key]

    async def project_of(self, record: Listed) -> str | None:
        """Return the record's project, if it has one. Imported checkpoints have none."""
        if isinstance(record, CheckpointRecord):
            model = await self.model(record.parent)
            return None if model is None else model.project_id
        return record.project_id


async def page_of(
    caller: Caller, record_type: type[R], wanted: ListFilter, *, limit: int, offset: int
) -> Page[R]:
    """Return a page of the records that the caller may see, newest first.

    With a project, all of these records are read: the store lists by tenant.
    """
    tenant = caller.seen(wanted.access_scope)
    if wanted.project_id is None:
        return await caller.store.page_of_records(
            record_type, tenant=tenant, limit=limit, offset=offset
        )
    names = ProjectNames(caller.store)
    items: list[R] = []
    total = 0
    async for record in all_records(caller.store, record_type, tenant):
        assert isinstance(record, Listed)
        if await names.project_of(record) == wanted.project_id:
            if offset <= total < offset + limit:
                items.append(record)
            total += 1
    return Page(items, total)


async def all_records(store: Store, record_type: type[R], tenant: str | None) -> AsyncIterator[R]:
    """Yield the records of a tenant, or of all, newest first, a few hundred at once."""
    read = 0
    while True:
        page = await store.page_of_records(
            record_type, tenant=tenant, limit=_READ_AT_ONCE, offset=read
        )
        for record in page.items:
            yield record
        read += len(page.items)
        if len(page.items) < _READ_AT_ONCE:
            return
