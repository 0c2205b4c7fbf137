"""Calls of sampling clients: cancel, receive results, acknowledge them, join."""

import asyncio

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    keys,
    sample,
    sampler,
    scenario,
    staged,
)
from tuneserve_engine.core.jobs import Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import SamplerRecord
from tuneserve_engine.store.base import Completion, Renewal, SamplerClient
from tuneserve_engine.store.errors import LimitReached, ResultDropped

CLIENT = SamplerClient("alice", "s:sample:0", 0)


async def submit(bench: Bench, *seqs: int, **fields: str) -> list[str]:
    return [(await bench.store.submit(sample(seq, **fields))).request_id for seq in seqs]


async def cancelled(bench: Bench, request_id: str) -> bool:
    """Whether the request has ended because it was cancelled."""
    outcome = await bench.ended(request_id)
    return (
        outcome is not None
        and outcome.rejection is not None
        and outcome.rejection.category == "user"
        and "was cancelled" in outcome.rejection.message
    )


async def ended(
    bench: Bench, client: SamplerClient = CLIENT, after: int = 0, limit: int = 100
) -> list[Completion]:
    return await bench.store.completions(client, after=after, limit=limit, timeout_s=0)


async def ended_ids(bench: Bench, client: SamplerClient = CLIENT) -> list[str]:
    return [each.request_id for each in await ended(bench, client)]


class SamplesContract(Contract):
    # --- cancelling -----------------------------------------------------------------------------

    @staged(StorePolicy(tenant_jobs=1))
    async def test_a_cancelled_sample_makes_room_for_another(self, bench: Bench) -> None:
        (first,) = await submit(bench, 1)
        with pytest.raises(LimitReached):
            await submit(bench, 2)
        assert await bench.store.cancel(first)
        assert await cancelled(bench, first)
        (second,) = await submit(bench, 2)
        assert keys(await bench.take()) == [("s:sample:0", 2)]
        assert await bench.store.cancel(first)  # again: the room is not released twice
        with pytest.raises(LimitReached):
            await submit(bench, 3)
        assert await bench.ended(second) is None

    @scenario
    async def test_a_waiting_call_returns_when_its_sample_is_cancelled(self, bench: Bench) -> None:
        (request_id,) = await submit(bench, 1)
        waiting = asyncio.create_task(bench.store.wait(request_id, 10))
        await asyncio.sleep(0.02)
        await bench.store.cancel(request_id)
        outcome = await asyncio.wait_for(waiting, 5)
        assert outcome is not None and outcome.rejection is not None
        assert (await bench.store.submit(sample(1))).duplicate

    @scenario
    async def test_a_worker_learns_of_a_cancellation_once_and_its_result_is_ignored(
        self, bench: Bench
    ) -> None:
        second = await bench.join("second")
        request_id, other = await submit(bench, 1, 2)
        assert keys(await bench.take()) == [("s:sample:0", 1)]
        await bench.queue.note_running(bench.epoch, [request_id])
        await bench.store.cancel(request_id)
        assert await bench.queue.renew(second) == Renewal()
        assert await bench.queue.renew(bench.epoch) == Renewal([], [request_id])
        assert await bench.queue.renew(bench.epoch) == Renewal()
        await bench.finish(Outcome(request_id, b"in vain"))
        assert await cancelled(bench, request_id)
        await bench.finish(Outcome(other, b"wanted"), epoch=second)
        assert await bench.ended(other) == Outcome(other, b"wanted")
        assert [each.failed for each in await ended(bench)] == [True, False]

    @scenario
    async def test_a_worker_takes_another_sample_in_place_of_a_cancelled_one(
        self, bench: Bench
    ) -> None:
        second = await bench.join("second")
        first, _ = await submit(bench, 1, 2)  # one for each worker
        await bench.store.cancel(first)
        await submit(bench, 3)
        assert keys(await bench.take()) == [("s:sample:0", 3)]
        assert keys(await bench.take(second)) == [("s:sample:0", 2)]

    @staged(leased=False)
    async def test_a_sample_that_waits_for_a_worker_can_be_cancelled(self, bench: Bench) -> None:
        first, _ = await submit(bench, 1, 2)
        await bench.store.cancel(first)
        assert await cancelled(bench, first)
        await bench.lease()
        assert keys(await bench.take()) == [("s:sample:0", 2)]
        assert await bench.queue.renew(bench.epoch) == Renewal()

    @scenario
    async def test_workers_that_die_with_a_cancelled_sample_change_nothing(
        self, bench: Bench
    ) -> None:
        (request_id,) = await submit(bench, 1)
        await bench.queue.note_running(bench.epoch, [request_id])
        await bench.store.cancel(request_id)
        for number in range(4):
            await bench.lease(f"process {number}")
            assert await bench.queue.renew(bench.epoch) == Renewal()
            await bench.queue.note_running(bench.epoch, [request_id])
        await bench.finish(Outcome(request_id, b"in vain"))
        assert await cancelled(bench, request_id)
        assert len(await ended(bench)) == 1

    @scenario
    async def test_an_ended_sample_cannot_be_cancelled(self, bench: Bench) -> None:
        request_id, bad = await submit(bench, 1, 2)
        await bench.finish(Outcome(request_id, b"result"), Outcome(bad, rejection=Rejection("no")))
        before = await ended(bench)
        assert await bench.store.cancel(request_id) and await bench.store.cancel(bad)
        assert await bench.ended(request_id) == Outcome(request_id, b"result")
        assert (await bench.rejection(bad)).message == "no"
        assert await ended(bench) == before
        assert await bench.queue.renew(bench.epoch) == Renewal()
        await bench.store.sweep(START_S + 1001, SweepPolicy(result_ttl_s=1000))
        assert await bench.store.cancel(request_id)
        with pytest.raises(ResultDropped):
            await bench.ended(request_id)

    @scenario
    async def test_only_samples_can_be_cancelled(self, bench: Bench) -> None:
        await bench.submit(1, 3)
        for seq in (1, 3):
            assert not await bench.store.cancel(bench.ids[seq])
            assert await bench.ended(bench.ids[seq]) is None
        with pytest.raises(KeyError, match="req_unknown"):
            await bench.store.cancel("req_unknown")

    # --- results --------------------------------------------------------------------------------

    @scenario
    async def test_samples_are_reported_in_the_order_in_which_they_end(self, bench: Bench) -> None:
        a, b, c = await submit(bench, 1, 2, 3)
        assert await ended(bench) == []
        await bench.finish(Outcome(b, b"four"))
        await bench.finish(Outcome(c, rejection=Rejection("no", "server")))
        await bench.finish(Outcome(a, b""))
        told = await ended(bench)
        numbers = [each.number for each in told]
        assert 0 < numbers[0] < numbers[1] < numbers[2]
        assert told == [
            Completion(b, numbers[0], size=4),
            Completion(c, numbers[1], failed=True),
            Completion(a, numbers[2], size=0),
        ]
        assert await ended(bench, after=numbers[0]) == told[1:]
        assert await ended(bench, limit=2) == told[:2]
        assert await ended(bench, after=numbers[2]) == []
        assert await ended(bench) == told  # an answer may be lost

    @scenario
    async def test_refused_and_dropped_samples_are_reported_too(self, bench: Bench) -> None:
        refused = await bench.store.submit(sample(1, rejection=Rejection("bad")))
        assert [each.failed for each in await ended(bench)] == [True]
        assert await ended_ids(bench) == [refused.request_id]
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1]))  # not a sample
        assert await ended_ids(bench) == [refused.request_id]

    @scenario
    async def test_a_waiting_client_is_notified_at_once_and_of_its_own_samples_only(
        self, bench: Bench
    ) -> None:
        mine, others = await submit(bench, 1, 10**9)

        async def wait(timeout_s: float) -> list[Completion]:
            return await bench.store.completions(CLIENT, after=0, limit=9, timeout_s=timeout_s)

        waiting = [asyncio.create_task(wait(10)), asyncio.create_task(wait(0.1))]
        await asyncio.sleep(0.02)
        await bench.finish(Outcome(others, b"x"))
        assert await asyncio.wait_for(waiting[1], 5) == []
        assert not waiting[0].done()
        await bench.finish(Outcome(mine, b"x"))
        (told,) = await asyncio.wait_for(waiting[0], 5)
        assert told.request_id == mine

    @scenario
    async def test_every_client_of_a_session_receives_its_own_results(self, bench: Bench) -> None:
        numbers = (0, 1, 7, 10**9)
        ids = {n: await submit(bench, n * 10**9, n * 10**9 + 999_999_999) for n in numbers}
        bobs = await submit(bench, 5, tenant="bob")
        another = await submit(bench, 5, scope="s:sample:1")
        done = [request_id for pair in ids.values() for request_id in pair]
        await bench.finish(*(Outcome(each, b"x") for each in (*done, *bobs, *another)))
        for n in numbers:
            assert await ended_ids(bench, SamplerClient("alice", "s:sample:0", n)) == ids[n]
        assert await ended_ids(bench, SamplerClient("bob", "s:sample:0", 0)) == bobs
        assert await ended_ids(bench, SamplerClient("alice", "s:sample:1", 0)) == another
        assert await ended_ids(bench, SamplerClient("bob", "s:sample:1", 0)) == []

    # --- acknowledgements -----------------------------------------------------------------------

    @scenario
    async def test_acknowledged_results_are_dropped_and_not_reported_again(
        self, bench: Bench
    ) -> None:
        a, b, running, others = await submit(bench, 1, 2, 3, 10**9)
        await bench.finish(*(Outcome(each, b"x") for each in (a, b, others)))
        _, told = await ended(bench)
        for _ in range(2):
            await bench.store.acknowledge(CLIENT, [a, running, others, "req_unknown"])
            assert await ended(bench) == [told]
            with pytest.raises(ResultDropped, match=a):
                await bench.ended(a)
        assert (await bench.store.submit(sample(1))).duplicate
        assert await bench.ended(b) == Outcome(b, b"x")
        assert await bench.ended(others) == Outcome(others, b"x")
        await bench.finish(Outcome(running, b"x"))
        assert await ended_ids(bench) == [b, running]
        await bench.store.acknowledge(CLIENT, [])
        await bench.store.acknowledge(SamplerClient("bob", "s:sample:0", 0), [b])
        assert await bench.ended(b) == Outcome(b, b"x")

    @scenario
    async def test_a_dropped_result_is_reported_until_it_is_forgotten(self, bench: Bench) -> None:
        policy = SweepPolicy(result_ttl_s=1000.0, sample_ttl_s=1e9)
        old, failed, had = await submit(bench, 1, 2, 3)
        no = Rejection("no")
        await bench.finish(Outcome(old, b"x"), Outcome(failed, rejection=no), Outcome(had, b"x"))
        first, second, _ = await ended(bench)
        await bench.store.acknowledge(CLIENT, [had])
        await bench.store.sweep(START_S + 1001, policy)
        assert await ended(bench) == [
            Completion(old, first.number),
            Completion(failed, second.number),
        ]
        await bench.store.acknowledge(CLIENT, [failed])
        assert await ended_ids(bench) == [old]
        await bench.store.sweep(START_S + 2001, policy)
        assert await ended(bench) == []
        for request_id in (old, failed, had):
            assert await bench.store.job_key(request_id) is None

    @staged(StorePolicy(tenant_refusals=3000))
    async def test_thousands_of_results_are_reported_in_parts_and_acknowledged_at_once(
        self, bench: Bench
    ) -> None:
        bad = Rejection("bad")
        submits = [bench.store.submit(sample(seq, rejection=bad)) for seq in range(1, 2303)]
        ids = {each.request_id for each in await asyncio.gather(*submits)}
        told: list[Completion] = []
        while part := await ended(bench, after=told[-1].number if told else 0, limit=1000):
            told += part
        assert {each.request_id for each in told} == ids and len(told) == len(ids)
        await bench.store.acknowledge(CLIENT, [each.request_id for each in told])
        assert await ended(bench) == []

    # --- joining --------------------------------------------------------------------------------

    @scenario
    async def test_every_client_that_joins_gets_a_unique_number(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        await bench.store.put_record(sampler("s:sample:1"))
        assert await bench.store.join_sampler("s:sample:0") == 1
        joining = (bench.store.join_sampler("s:sample:0") for _ in range(20))
        assert sorted(await asyncio.gather(*joining)) == list(range(2, 22))
        assert await bench.store.join_sampler("s:sample:1") == 1
        assert await bench.store.put_new_record(sampler()) == sampler(clients=21)  # created again
        assert await bench.store.join_sampler("s:sample:0") == 22
        assert await bench.store.join_sampler("s:sample:2") is None
        assert await bench.store.get_record(SamplerRecord, "s:sample:2") is None
