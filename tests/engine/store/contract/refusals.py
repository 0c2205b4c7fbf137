"""Limits on requests that end at once, and on requests that arrive far ahead."""

import asyncio
import time

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    job,
    model,
    sample,
    scenario,
    staged,
)
from tuneserve_engine.core.jobs import Job, Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import ModelStatus
from tuneserve_engine.store.errors import LimitReached

BAD = Rejection("temperature is -1")


def bad(seq: int) -> Job:
    return job(seq, rejection=BAD)


async def is_put_off(bench: Bench, new: Job, *words: str, retry_after_s: int | None = None) -> bool:
    """Whether the store refuses the job for now and stores nothing of it, with these words."""
    try:
        await bench.store.submit(new)
    except LimitReached as error:
        assert retry_after_s in (None, error.retry_after_s)
        for word in words:
            assert word in str(error)
        return True
    return False


class RefusalsContract(Contract):
    @staged(StorePolicy(tenant_refusals=3))
    async def test_a_tenant_has_a_limit_of_refused_requests_per_hour(self, bench: Bench) -> None:
        for seq in range(3):
            assert not await is_put_off(bench, sample(seq, rejection=BAD))
        words = ("3 of your requests were refused", "temperature is -1", "again in 1200 s")
        for _ in range(2):
            assert await is_put_off(bench, sample(3, rejection=BAD), *words, retry_after_s=1200)
        assert not await is_put_off(bench, sample(2, rejection=BAD))  # known already
        assert not await is_put_off(bench, sample(4))  # a valid request
        assert not await is_put_off(bench, sample(4, tenant="bob", rejection=BAD))
        bench.clock.now_s = START_S + 1201
        assert not await is_put_off(bench, sample(3, rejection=BAD))
        assert await is_put_off(bench, sample(5, rejection=BAD), retry_after_s=1199)
        # set back: the client does not have to wait for that time
        bench.clock.now_s = START_S - 10_000
        assert await is_put_off(bench, sample(5, rejection=BAD), retry_after_s=1200)

    @staged(StorePolicy(tenant_refusals=2))
    async def test_refusals_by_the_store_itself_count_too(self, bench: Bench) -> None:
        await bench.store.put_record(model(status=ModelStatus.ENDED))
        await bench.submit(1, 2)
        assert "has ended" in (await bench.rejection(bench.ids[1])).message
        assert await is_put_off(bench, job(3), "2 of your requests were refused", "has ended")

    @staged(StorePolicy(tenant_refusals=1))
    async def test_a_refused_request_that_others_wait_for_is_accepted(self, bench: Bench) -> None:
        """Without it, the requests behind its seq_id would wait until the gap is abandoned."""
        await bench.store.submit(sample(1, rejection=BAD))
        await bench.submit(2)
        assert await is_put_off(bench, bad(3), "1 of your requests")
        assert not await is_put_off(bench, bad(1))
        assert await bench.released() == [2]
        assert await is_put_off(bench, bad(3), "1 of your requests")

    @staged(StorePolicy(model_jobs=2))
    async def test_a_request_may_be_a_limited_number_ahead(self, bench: Bench) -> None:
        words = ("seq_id 9 of s:train:0 is 8 ahead of 1, which has not arrived", "limit is 7")
        assert await is_put_off(bench, bad(9), *words, retry_after_s=5)
        assert await is_put_off(bench, job(9), *words)
        assert not await is_put_off(bench, bad(8))
        assert not await is_put_off(bench, job(1))
        assert not await is_put_off(bench, bad(9))  # 2 is the first missing one
        assert await is_put_off(bench, bad(10), "8 ahead of 2")
        for seq in range(2, 8):
            await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
            assert not await is_put_off(bench, job(seq))
        assert not await is_put_off(bench, job(10))
        assert await bench.released() == [7, 10]

    @staged(StorePolicy(model_jobs=2))
    async def test_requests_of_a_dead_model_are_never_too_far_ahead(self, bench: Bench) -> None:
        await bench.store.put_record(model(status=ModelStatus.ENDED))
        assert not await is_put_off(bench, job(1000))
        assert not await is_put_off(bench, bad(1001))

    @staged(StorePolicy(model_jobs=64))
    async def test_a_gap_closes_at_once_however_many_were_sent_behind_it(
        self, bench: Bench
    ) -> None:
        """48,360 refused requests behind a missing one once froze the store for 1.9 s."""
        put_off = await asyncio.gather(*(is_put_off(bench, bad(seq)) for seq in range(2, 1000)))
        assert put_off == [seq > 256 for seq in range(2, 1000)]
        began_s = time.perf_counter()
        await bench.submit(1)
        assert time.perf_counter() - began_s < 0.5
        await bench.submit(257)
        assert await bench.released() == [1, 257]

    @scenario
    async def test_a_gap_before_refused_requests_is_abandoned(self, bench: Bench) -> None:
        for seq in range(3, 500, 2):
            await bench.store.submit(bad(seq))
        await bench.submit(500)
        await bench.store.sweep(START_S + 601, SweepPolicy(gap_ttl_s=600))
        message = (await bench.rejection(bench.ids[500])).message
        assert message.startswith("seq_id 1-2, 4, 6, 8, 10 and 244 more ranges did not arrive")
        await bench.submit(501)
        assert await bench.released() == [501]
