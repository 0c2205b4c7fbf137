"""The audit log: what was done to keys, tenants, checkpoints and projects, and by which key.

An event is stored before the change that it names. So a crash in between leaves an event without a
change, never a change without its event.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Literal

from tuneserve_engine.core.records import AuditRecord
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.errors import StoreFailed

logger = logging.getLogger(__name__)

MOST_OF_TENANT = 10_000
MOST_KEPT = 100_000
_TRIMMED_EVERY = 64  # events of a tenant
_TRIMMED_AT_ONCE = 256
_READ_AT_ONCE = 500

AuditKind = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_KIND_OF: dict[str, AuditKind] = {
    "checkpoint": "checkpoints",
    "project": "projects",
    "key": "organizations",
    "tenant": "organizations",
}
"""The kinds of events, by their resource. There are no teams."""


class AuditLog:
    """The events of a store: the newest 10,000 of each tenant, and 100,000 of all."""

    def __init__(
        self,
        store: Store,
        *,
        most_of_tenant: int = MOST_OF_TENANT,
        most: int = MOST_KEPT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._most_of_tenant = most_of_tenant
        self._most = most
        self._clock = clock
        self._written: Counter[str] = Counter()  # events of each tenant since its last trim

    async def record_event(
        self, tenant: str, event: str, *, key_id: str = "", **details: str
    ) -> None:
        """Store an event, and now and then drop the oldest ones beyond the limits.

        An event that the store cannot take is logged: on a full disk, checkpoints can still be
        deleted.
        """
        now_s = self._clock()
        told = {"tenant": tenant, "key_id": key_id, **details}
        new = AuditRecord(
            key=secrets.token_hex(8),
            tenant=tenant,
            parent=datetime.fromtimestamp(now_s, UTC).date().isoformat(),
            event=event,
            created_s=now_s,
            details={name: text for name, text in told.items() if text},
        )
        try:
            await self._store.put_record(new)
        except StoreFailed as error:
            logger.warning("an audit event is not stored: %s %s: %s", event, new.details, error)
            return
        self._written[tenant] += 1
        if self._written[tenant] % _TRIMMED_EVERY == 1:
            await self._trim(tenant)

    async def _trim(self, tenant: str) -> None:
        if len(self._written) > self._most:  # tenants of the open mode
            self._written.clear()
        for whose, most in ((tenant, self._most_of_tenant), (None, self._most)):
            old = await self._store.page_of_records(
                AuditRecord, tenant=whose, limit=_TRIMMED_AT_ONCE, offset=most
            )
            for each in old.items:
                await self._store.delete_record(AuditRecord, each.key)

    async def events_of_day(
        self, tenant: str | None, day: date, kind: AuditKind, most: int
    ) -> list[AuditRecord]:
        """Return the newest events of a tenant, or of all, on a day in UTC, newest first."""
        found: list[AuditRecord] = []
        read = 0
        while len(found) < most:
            page = await self._store.page_of_records(
                AuditRecord,
                tenant=tenant,
                parent=day.isoformat(),
                limit=_READ_AT_ONCE,
                offset=read,
            )
            if not page.items:
                break
            read += len(page.items)
            found += [each for each in page.items if kind in ("all", _kind_of(each.event))]
        return found[:most]

    @property
    def today(self) -> date:
        """The day in UTC."""
        return datetime.fromtimestamp(self._clock(), UTC).date()


def _kind_of(event: str) -> AuditKind | None:
    return _KIND_OF.get(event.partition("_")[0])
