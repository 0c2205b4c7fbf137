"""Requests are forgotten when no client can want them any more."""

import asyncio
from dataclasses import replace
from unittest import mock

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    create,
    job,
    model,
    point,
    sample,
    sampler,
    scenario,
    session,
)
from tuneserve_engine.core.jobs import Outcome, Rejection
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import ModelRecord, ModelStatus, Update
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Submitted
from tuneserve_engine.store.errors import ResultDropped

POLICY = SweepPolicy(result_ttl_s=1000.0, gap_ttl_s=1e9, sample_ttl_s=1e9)


async def forget(bench: Bench) -> None:
    """Sweep at a time at which everything forgettable may be forgotten."""
    bench.clock.now_s += 2001
    await bench.store.sweep(bench.clock.now_s, POLICY)


async def is_known(bench: Bench, *seqs: int) -> list[bool]:
    return [await bench.store.job_key(bench.ids[seq]) is not None for seq in seqs]


class ForgettingContract(Contract):
    @scenario
    async def test_a_request_is_forgotten_after_twice_its_results_time(self, bench: Bench) -> None:
        await bench.submit(1)
        bench.clock.now_s += 50
        await bench.finish(Outcome(bench.ids[1], b"result"))
        for after_s, is_dropped in ((1000, False), (1001, True), (2000, True)):
            await bench.store.sweep(START_S + 50 + after_s, POLICY)
            if is_dropped:
                with pytest.raises(ResultDropped):
                    await bench.ended(bench.ids[1])
            else:
                assert await bench.ended(bench.ids[1]) == Outcome(bench.ids[1], b"result")
            assert await bench.store.submit(job(1)) == Submitted(bench.ids[1], duplicate=True)
        await bench.store.sweep(START_S + 50 + 2001, POLICY)
        with pytest.raises(KeyError, match=bench.ids[1]):
            await bench.ended(bench.ids[1])
        assert await bench.store.job_key(bench.ids[1]) is None

    @scenario
    async def test_an_unfinished_request_is_not_forgotten(self, bench: Bench) -> None:
        await bench.submit(1, 3)
        await forget(bench)
        assert await bench.ended(bench.ids[1]) is None
        assert await bench.ended(bench.ids[3]) is None
        await bench.submit(2)
        assert await bench.released() == [1, 2, 3]

    # --- sent again -------------------------------------------------------------------------------

    @scenario
    async def test_a_resend_of_a_models_forgotten_request_is_refused_as_too_late(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(model())
        await bench.submit(1, 2)
        await bench.finish(Outcome(bench.ids[1], b"x"), Outcome(bench.ids[2], b"x"))
        await forget(bench)
        before = await bench.store.get_record(ModelRecord, "s:train:0")
        for times in (1, 2):  # the rest of a resend is forgotten in its turn
            again = await bench.store.submit(job(1))
            assert again == Submitted(bench.ids[1], duplicate=False), times
            assert "the next seq_id is 3" in (await bench.rejection(again.request_id)).message
            assert (await bench.store.submit(job(1))).duplicate
            assert await bench.store.get_record(ModelRecord, "s:train:0") == before
            assert await bench.released() == []
            await forget(bench)
            assert await is_known(bench, 1) == [False]
        await bench.submit(2, rejection=Rejection("malformed, too"))
        await bench.submit(3)
        assert await bench.released() == [3]
        await forget(bench)
        assert await is_known(bench, 2, 3) == [False, True]

    @scenario
    async def test_a_forgotten_creation_does_not_create_its_model_again(self, bench: Bench) -> None:
        creation = replace(create(), position=0)
        new = model(status=ModelStatus.CREATING)
        created = await bench.store.submit(creation, new)
        ready = Update("model", "s:train:0", {"status": ModelStatus.READY})
        await bench.finish(Outcome(created.request_id, b"{}", updates=(ready,)))
        await bench.submit(2)
        await bench.finish(Outcome(bench.ids[2], b"x"))
        await forget(bench)
        before = await bench.store.get_record(ModelRecord, "s:train:0")
        assert before is not None and before.status is ModelStatus.READY
        again = await bench.store.submit(creation, new)
        assert not again.duplicate
        assert "was created long ago" in (await bench.rejection(again.request_id)).message
        assert await bench.store.get_record(ModelRecord, "s:train:0") == before
        await bench.submit(3)
        assert await bench.released() == [3]

    @scenario
    async def test_a_forgotten_creation_revives_no_dead_model(self, bench: Bench) -> None:
        creation = replace(create(), position=0)
        new = model(status=ModelStatus.CREATING)
        created = await bench.store.submit(creation, new)
        failed = Update("model", "s:train:0", {"status": ModelStatus.FAILED})
        no = Rejection("no room", "server")
        await bench.finish(Outcome(created.request_id, rejection=no, updates=(failed,)))
        for status in (ModelStatus.FAILED, ModelStatus.LOST, ModelStatus.ENDED):
            await bench.store.put_record(model(status=status))
            await forget(bench)
            again = await bench.store.submit(creation, new)
            assert not again.duplicate
            await bench.rejection(again.request_id)
            assert await bench.status() is status
        assert await bench.released() == []

    @scenario
    async def test_a_forgotten_sample_is_sampled_again(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(sampler())
        first = await bench.store.submit(sample(1))
        await bench.finish(Outcome(first.request_id, b"first"))
        await forget(bench)
        again = await bench.store.submit(sample(1))
        assert again == first
        assert await bench.released() == [1]
        await bench.finish(Outcome(again.request_id, b"second"))
        assert await bench.ended(again.request_id) == Outcome(again.request_id, b"second")

    # --- what has to be known for longer ----------------------------------------------------------

    @scenario
    async def test_requests_that_replay_may_need_are_not_forgotten(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(1, 2, 3)
        await bench.finish_changed(1, 2, 3)
        log = await bench.queue.read_log(bench.epoch, "s:train:0", start=0)
        await forget(bench)
        assert await bench.queue.read_log(bench.epoch, "s:train:0", start=0) == log
        assert (await bench.store.submit(job(1))).duplicate
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.queue.save_point(bench.epoch, point(3))
        await bench.store.sweep(bench.clock.now_s, POLICY)
        assert await is_known(bench, 1, 2, 3) == [False, True, True]
        assert await bench.queue.read_log(bench.epoch, "s:train:0", start=0) == log[1:]
        await bench.store.end_session("s", "success")
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        await bench.store.sweep(bench.clock.now_s, POLICY)
        assert await is_known(bench, 1, 2, 3) == [False, False, False]

    @scenario
    async def test_a_used_position_is_known_until_its_model_has_passed_it(
        self, bench: Bench
    ) -> None:
        await bench.submit(3, 4, rejection=Rejection("bad"))
        await forget(bench)
        assert await is_known(bench, 3, 4) == [True, True]
        await bench.submit(5, 2)
        assert await bench.released() == []
        await bench.submit(1)
        assert await bench.released() == [1, 2, 5]
        await bench.store.sweep(bench.clock.now_s, POLICY)
        assert await is_known(bench, 3, 4, 5) == [False, False, True]
        await bench.submit(3)
        assert "the next seq_id is 6" in (await bench.rejection(bench.ids[3])).message

    @scenario
    async def test_positions_of_an_abandoned_gap_are_passed(self, bench: Bench) -> None:
        await bench.submit(3, 6, rejection=Rejection("bad"))
        await bench.submit(5)
        await forget(bench)
        await bench.store.sweep(bench.clock.now_s + 1, replace(POLICY, gap_ttl_s=600))
        assert await is_known(bench, 3, 5, 6) == [False, True, False]
        await forget(bench)
        assert await is_known(bench, 5) == [False]
        await bench.submit(7)
        assert await bench.released() == [7]

    @scenario
    async def test_the_remaining_positions_of_a_dead_model_are_forgotten(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(2, 4, rejection=Rejection("bad"))
        await bench.submit(5)
        await forget(bench)
        assert await is_known(bench, 2, 4) == [True, True]
        await bench.store.end_session("s", "success")
        await bench.submit(7, 9)
        await bench.submit(8, rejection=Rejection("bad"))
        await forget(bench)
        assert await is_known(bench, 2, 4, 5, 7, 8, 9) == [False] * 6

    @scenario
    async def test_a_failed_model_leaves_no_positions_behind(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.submit(1, 4)
        await bench.submit(3, rejection=Rejection("bad"))
        failed = Update("model", "s:train:0", {"status": ModelStatus.FAILED})
        await bench.finish(Outcome(bench.ids[1], rejection=Rejection("no"), updates=(failed,)))
        await forget(bench)
        assert await is_known(bench, 1, 3, 4) == [False] * 3

    # --- how many at once -------------------------------------------------------------------------

    @scenario
    async def test_a_sweep_forgets_a_limited_number_oldest_first(self, bench: Bench) -> None:
        await bench.submit(*range(1, 8))
        for seq in (7, 6, 5, 4, 3, 2, 1):
            bench.clock.now_s += 1
            await bench.finish(Outcome(bench.ids[seq], b"x"))
        with mock.patch.object(refusals, "FORGOTTEN_AT_ONCE", 3):
            await forget(bench)
            assert await is_known(bench, *range(1, 8)) == [True] * 4 + [False] * 3
            await bench.store.sweep(bench.clock.now_s, POLICY)
            assert await is_known(bench, *range(1, 8)) == [True] + [False] * 6
            await bench.store.sweep(bench.clock.now_s, POLICY)
            assert await is_known(bench, 1) == [False]

    @scenario
    async def test_a_sweep_forgets_thousands(self, bench: Bench) -> None:
        bad = Rejection("bad")
        seqs = range(1, 1202)
        submits = [bench.store.submit(sample(seq, rejection=bad)) for seq in seqs]
        ids = [each.request_id for each in await asyncio.gather(*submits)]
        await forget(bench)
        assert [each for each in ids if await bench.store.job_key(each) is not None] == []
