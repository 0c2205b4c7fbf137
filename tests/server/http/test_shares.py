"""Shares of memory: the share that waits, the share that is next, and the release of all."""

import asyncio
import random

import pytest

from tuneserve_server.errors import BodyTooLarge, TooManyRequests
from tuneserve_server.http.shares import Limit, Share, Shares

pytestmark = pytest.mark.anyio


def shares(total: int, of_tenant: int, wait_s: float = 5.0) -> Shares:
    return Shares(
        "bodies",
        total=Limit(total, "total_setting"),
        of_tenant=Limit(of_tenant, "tenant_setting"),
        wait_s=wait_s,
    )


class Holder:
    """Holds a share in its own task until ``end``."""

    def __init__(self, of: Shares, tenant: str, size: int) -> None:
        self.has = False
        self.share: Share | None = None
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._hold(of, tenant, size))

    async def _hold(self, of: Shares, tenant: str, size: int) -> None:
        async with of.taken(tenant, size) as self.share:
            self.has = True
            await self.let_go.wait()

    async def end(self) -> None:
        self.let_go.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_every_tenant_has_its_own_limit() -> None:
    memory = shares(100, 60)
    first, second, other = (Holder(memory, tenant, 40) for tenant in "aab")
    await settle()
    assert (first.has, second.has, other.has) == (True, False, True)
    assert (memory.held_by("a"), memory.held) == (40, 80)
    await first.end()
    await settle()
    assert second.has
    await second.end()
    await other.end()
    assert memory.held == 0


async def test_the_tenant_that_holds_least_is_first() -> None:
    memory = shares(100, 80)
    holders = [Holder(memory, "a", 40), Holder(memory, "b", 60)]
    await settle()
    greedy = [Holder(memory, "b", 20) for _ in range(3)]
    await settle()
    newcomer = Holder(memory, "c", 40)
    await settle()
    await holders[0].end()
    await settle()
    assert newcomer.has and not any(each.has for each in greedy)
    await newcomer.end()
    await settle()
    assert [each.has for each in greedy] == [True, False, False]  # 80 is the limit of a tenant
    for each in (holders[1], *greedy):
        await each.end()
    assert memory.held == 0


async def test_small_shares_do_not_pass_a_large_one_forever() -> None:
    memory = shares(100, 100)
    small = Holder(memory, "a", 60)
    await settle()
    large = Holder(memory, "b", 100)
    await settle()
    late = Holder(memory, "a", 10)
    await settle()
    assert not large.has and not late.has
    await small.end()
    await settle()
    assert large.has and not late.has
    await large.end()
    await settle()
    assert late.has
    await late.end()


async def test_of_tenants_that_hold_the_same_the_request_that_came_first_is_next() -> None:
    memory = shares(100, 100)
    before = Holder(memory, "x", 100)
    await settle()
    first, second, third = (Holder(memory, tenant, 100) for tenant in "aba")
    for holder, waiting in ((before, (second, third)), (first, (third,)), (second, ())):
        await settle()
        assert holder.has and not any(each.has for each in waiting)
        await holder.end()
    await settle()
    assert third.has
    await third.end()
    assert memory.held == 0


async def test_a_share_that_waits_too_long_fails_with_the_limit_and_a_time_to_retry() -> None:
    memory = shares(100, 60, wait_s=0.05)
    async with memory.taken("a", 50):
        with pytest.raises(
            TooManyRequests, match=r"hold 50 of the 60 .*tenant_setting.* needs 20"
        ) as own:
            async with memory.taken("a", 20):
                pass
        assert own.value.headers["Retry-After"] == "2"
        async with memory.taken("b", 40):
            with pytest.raises(
                TooManyRequests, match=r"hold 90 of 100 bytes \(total_setting\).* needs 20"
            ):
                async with memory.taken("c", 20):
                    pass
    assert memory.held == 0
    with pytest.raises(BodyTooLarge, match=r"61 bytes .* may have 60 \(tenant_setting\)"):
        async with memory.taken("a", 61):
            pass


async def test_a_slow_share_of_a_tenant_that_holds_more_yields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuneserve_server.http.shares._LOOK_S", 0.01)
    memory = shares(100, 60)
    slow, fast = Holder(memory, "a", 60), Holder(memory, "b", 40)
    await settle()
    asked: list[str] = []

    def yields(name: str, holder: Holder) -> bool:
        asked.append(name)
        holder.let_go.set()
        return True

    assert slow.share and fast.share
    slow.share.yields = lambda: yields("slow", slow)
    fast.share.yields = lambda: yields("fast", fast)
    same = Holder(memory, "a", 10)
    await asyncio.sleep(0.05)
    assert not asked  # a tenant's own shares do not yield to it
    others = [Holder(memory, "c", 40) for _ in range(50)]
    await asyncio.sleep(0.015)
    assert asked == ["slow"]  # once, however many requests of the tenant wait
    for other in others:
        await other.end()
    await same.end()
    await fast.end()
    assert memory.held == 0


async def test_a_share_granted_to_a_request_that_is_just_cancelled_is_released() -> None:
    memory = shares(100, 100)
    first, second = Holder(memory, "a", 100), Holder(memory, "b", 100)
    await settle()
    await first.end()  # grants the second share; its task has yet to learn of it
    assert (memory.held_by("b"), second.has) == (100, False)
    second.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert not second.has
    assert memory.held == 0


async def test_all_memory_is_released_however_a_share_ends() -> None:
    """Thousands of shares, most of which are cancelled, time out or fail, at any moment."""
    rng = random.Random(7)
    memory = shares(100, 50, wait_s=0.005)
    most = 0

    async def use() -> None:
        nonlocal most
        tenant = rng.choice("abcd")
        async with memory.taken(tenant, rng.randint(1, 50)):
            most = max(most, memory.held, 2 * memory.held_by(tenant))
            if rng.random() < 0.2:
                raise RuntimeError
            await asyncio.sleep(rng.choice([0, 0.001]))

    tasks = [asyncio.create_task(use()) for _ in range(2000)]
    while pending := [each for each in tasks if not each.done()]:
        for task in rng.sample(pending, len(pending) // 20):
            task.cancel()
        await asyncio.sleep(0.0005)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = {type(each) for each in ended}
    assert kinds == {type(None), RuntimeError, asyncio.CancelledError, TooManyRequests}
    assert most == 100
    assert memory.held == 0
    async with memory.taken("a", 50), memory.taken("b", 50):
        pass
