"""Limits of the disk and of a tenant's checkpoints, and the heartbeats of a session."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_heartbeats import Clock
from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord, TenantRecord
from tuneserve_server.access.limits import DiskGuard, check_room
from tuneserve_server.errors import DiskFull
from tuneserve_server.settings import ApiSettings

pytestmark = pytest.mark.anyio


class Disk:
    def __init__(self, free: int) -> None:
        self.free = free
        self.looks: list[Path] = []

    def __call__(self, folder: Path) -> int:
        self.looks.append(folder)
        return self.free


def guard(disk: Disk, clock: Clock) -> DiskGuard:
    return DiskGuard([Path("a"), Path("b")], 1000, free_bytes=disk, clock=clock)


def test_requests_are_refused_for_now_below_the_reserved_free_space() -> None:
    disk, clock = Disk(1000), Clock()
    keeper = guard(disk, clock)
    keeper.check()
    disk.free = 999
    keeper.check()  # not a second later
    clock.now_s += 1.0
    for _ in range(3):
        with pytest.raises(DiskFull, match="999 bytes left, of which 1000 are reserved") as error:
            keeper.check()
    assert "delete checkpoints" in str(error.value)
    disk.free = 1000
    clock.now_s += 1.0
    keeper.check()


def test_a_write_must_fit_beside_the_reserved_free_space() -> None:
    disk, clock = Disk(1500), Clock()
    keeper = guard(disk, clock)
    keeper.check(500)
    with pytest.raises(DiskFull, match=r"1500 bytes left, of which 1000 .* 501 more do not fit"):
        keeper.check(501)
    disk.free = 1499
    with pytest.raises(DiskFull):  # at once: the last file may have been as large
        keeper.check(500)
    assert disk.looks[2:] == [Path("a")] * 3


def test_writes_within_one_second_cannot_fill_the_disk() -> None:
    disk, clock = Disk(1500), Clock()
    keeper = guard(disk, clock)
    keeper.admit(300)
    keeper.admit(200)
    disk.free = 1000  # the files have been written
    with pytest.raises(DiskFull, match=r"1000 bytes left, .* 1 more do not fit"):
        keeper.admit(1)
    disk.free = 1001
    keeper.admit(1)
    disk.free = 5000
    clock.now_s += 1.0
    keeper.admit(4000)


def test_the_disks_are_checked_once_a_second() -> None:
    disk, clock = Disk(10**6), Clock()
    keeper = guard(disk, clock)
    for _ in range(100):
        keeper.check()
    assert disk.looks == [Path("a"), Path("b")]


def checkpoint(name: str, size: int = 0, **fields: Any) -> CheckpointRecord:
    values = {"tenant": "t", "expires_s": None, **fields}
    return CheckpointRecord(
        key=f"tinker://m/weights/{name}",
        parent="m",
        kind=CheckpointKind.TRAINING,
        name=name,
        file_id=name,
        base_model="b",
        config=AdapterConfig(4, 32.0, 1),
        created_s=0.0,
        size_bytes=size,
        **values,
    )


def settings(**limits: int) -> ApiSettings:
    return ApiSettings(**limits)  # type: ignore[arg-type]


async def room(
    saved: CheckpointRecord, *kept: CheckpointRecord, own: TenantRecord | None = None, **limits: int
) -> None:
    store = MemoryStore()
    for each in (*kept, *([own] if own else [])):
        await store.put_record(each)
    try:
        await check_room(store, settings(**limits).store_policy, saved.tenant, saved.key)
    finally:
        await store.close()


async def test_a_tenant_stores_a_limited_number_of_checkpoints() -> None:
    kept = [checkpoint("a"), checkpoint("b")]
    await room(checkpoint("c"), *kept, max_checkpoints=3)
    with pytest.raises(UserError, match=r"you have 2 checkpoints; .* up to 2") as error:
        await room(checkpoint("c"), *kept, max_checkpoints=2)
    assert "delete some" in str(error.value)


async def test_a_tenant_stores_a_limited_number_of_bytes() -> None:
    kept = [checkpoint("a", 60), checkpoint("b", 39)]
    await room(checkpoint("c"), *kept, max_checkpoint_bytes=100)
    with pytest.raises(UserError, match=r"have 99 bytes; the limit is 99 bytes"):
        await room(checkpoint("c"), *kept, max_checkpoint_bytes=99)


async def test_a_tenants_own_limits_override_the_general_ones() -> None:
    kept = [checkpoint("a", 60), checkpoint("b", 39)]
    limits = {"max_checkpoints": 2, "max_checkpoint_bytes": 99}
    own = TenantRecord("t", "t", 0.0, max_checkpoints=3, max_checkpoint_bytes=100)
    await room(checkpoint("c"), *kept, own=own, **limits)
    with pytest.raises(UserError, match=r"you have 2 checkpoints; .* up to 0 of yours"):
        await room(checkpoint("c"), *kept, own=replace(own, max_checkpoints=0))
    with pytest.raises(UserError, match=r"have 99 bytes; the limit is 0 bytes"):
        await room(checkpoint("c"), *kept, own=replace(own, max_checkpoint_bytes=0))
    for others in (TenantRecord("t", "t", 0.0, weight=2.0), replace(own, key="u")):
        with pytest.raises(UserError, match="up to 2 of yours"):
            await room(checkpoint("c"), *kept, own=others, **limits)


async def test_replaced_expired_and_other_tenants_checkpoints_do_not_count() -> None:
    kept = [
        checkpoint("a", 50),
        checkpoint("old", 50, expires_s=1.0),
        checkpoint("theirs", 50, tenant="other"),
    ]
    await room(checkpoint("a"), *kept, max_checkpoints=1, max_checkpoint_bytes=1)
