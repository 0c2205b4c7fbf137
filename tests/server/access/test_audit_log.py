"""The audit log: its days, its kinds, its limits, and a store that takes no more."""

import logging
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime

import pytest

from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.records import AuditRecord
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.access.audit_log import AuditLog

pytestmark = pytest.mark.anyio

MIDNIGHT_S = datetime(2026, 11, 29, tzinfo=UTC).timestamp()


@pytest.fixture
async def store(anyio_backend: str) -> AsyncIterator[MemoryStore]:
    opened = MemoryStore()
    yield opened
    await opened.close()


async def test_events_are_listed_by_day_in_utc_newest_first(store: MemoryStore) -> None:
    now_s = MIDNIGHT_S - 1
    log = AuditLog(store, clock=lambda: now_s)
    await log.record_event("alice", "key_create", made="0a")
    now_s = MIDNIGHT_S
    await log.record_event("alice", "checkpoint_delete", key_id="0a", tinker_path="p", purpose="")
    now_s += 86_399
    await log.record_event("bob", "project_session_set", session_id="s")
    found = await log.events_of_day(None, date(2026, 11, 29), "all", 10)
    assert [each.event for each in found] == ["project_session_set", "checkpoint_delete"]
    assert found[1].details == {"tenant": "alice", "key_id": "0a", "tinker_path": "p"}
    assert found[1].created_s == MIDNIGHT_S
    (before,) = await log.events_of_day(None, date(2026, 11, 28), "all", 10)
    assert before.details == {"tenant": "alice", "made": "0a"}
    assert await log.events_of_day("bob", date(2026, 11, 29), "all", 10) == found[:1]
    assert log.today == date(2026, 11, 29)
    assert await log.events_of_day(None, date(2026, 11, 30), "all", 10) == []
    assert await log.events_of_day(None, date(2026, 11, 29), "all", 1) == found[:1]


async def test_each_event_is_of_one_kind(store: MemoryStore) -> None:
    log = AuditLog(store, clock=lambda: MIDNIGHT_S)
    for event in ("key_revoke", "tenant_set", "checkpoint_read", "project_session_set"):
        await log.record_event("alice", event)
    kinds = {
        kind: [each.event for each in await log.events_of_day(None, log.today, kind, 10)]
        for kind in ("checkpoints", "projects", "teams", "organizations")
    }
    assert kinds == {
        "checkpoints": ["checkpoint_read"],
        "projects": ["project_session_set"],
        "teams": [],
        "organizations": ["tenant_set", "key_revoke"],
    }


async def test_the_oldest_events_of_a_tenant_go_first(store: MemoryStore) -> None:
    log = AuditLog(store, most_of_tenant=100, most=250)
    for n in range(5 * 64 + 1):
        await log.record_event("alice", "key_create", n=str(n))
        if n < 3:
            await log.record_event("bob", "key_create", n=str(n))
    alice = await store.page_of_records(AuditRecord, tenant="alice")
    assert [each.details["n"] for each in alice.items] == [str(n) for n in range(320, 220, -1)]
    assert (await store.page_of_records(AuditRecord, tenant="bob")).total == 3


async def test_all_tenants_together_have_a_limit_too(store: MemoryStore) -> None:
    log = AuditLog(store, most=10)
    for n in range(30):
        await log.record_event(f"tenant-{n}", "key_create")
    kept = await store.page_of_records(AuditRecord)
    assert [each.tenant for each in kept.items] == [f"tenant-{n}" for n in range(29, 19, -1)]


async def test_an_event_that_does_not_fit_on_the_disk_is_logged(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: object) -> None:
        raise StoreFailed("database or disk is full")

    monkeypatch.setattr(store, "put_record", full)
    with caplog.at_level(logging.WARNING):
        await AuditLog(store).record_event("alice", "checkpoint_delete", tinker_path="tinker://a")
    (told,) = caplog.messages
    assert "checkpoint_delete" in told and "tinker://a" in told and "disk is full" in told
