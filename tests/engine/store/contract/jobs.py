"""Jobs from their submission to the result: order, keys, rejections, takes, waits."""

import asyncio
import time
from dataclasses import replace

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    checkpoint,
    create,
    job,
    model,
    sample,
    sampler,
    scenario,
    session,
)
from tuneserve_engine.core.jobs import JobKind, Outcome, Rejection
from tuneserve_engine.core.records import (
    CheckpointRecord,
    ModelRecord,
    ModelStatus,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.store.base import Submitted
from tuneserve_engine.store.errors import Fenced, KeyReused


class JobsContract(Contract):
    # --- order ------------------------------------------------------------------------------

    @scenario
    async def test_the_first_job_may_arrive_last(self, bench: Bench) -> None:
        await bench.submit(2, 3)
        assert await bench.released() == []
        await bench.submit(1)
        assert await bench.released() == [1, 2, 3]

    @scenario
    async def test_jobs_behind_a_gap_are_held_and_those_before_it_run(self, bench: Bench) -> None:
        await bench.submit(1, 2, 5, 4)
        assert await bench.released() == [1, 2]
        await bench.submit(3)
        assert await bench.released() == [1, 2, 3, 4, 5]

    @scenario
    async def test_a_gap_holds_up_no_other_model(self, bench: Bench) -> None:
        await bench.submit(2, model_id="s:train:0")
        await bench.submit(1, model_id="s:train:1")
        assert await bench.released() == [1]

    @scenario
    async def test_a_job_without_a_position_waits_for_no_other(self, bench: Bench) -> None:
        await bench.submit(2)
        await bench.store.submit(sample(7))
        assert await bench.released() == [7]

    @scenario
    async def test_a_job_keeps_the_span_that_submitted_it(self, bench: Bench) -> None:
        traced = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await bench.store.submit(replace(sample(7), trace=traced))
        await bench.store.submit(sample(8))
        await bench.store.submit(replace(sample(7), trace=traced[:-2] + "00"))  # a resend
        taken = await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=10)
        assert [(each.seq, each.trace) for each in taken] == [(7, traced), (8, "")]

    @scenario
    async def test_release_numbers_rise_in_the_order_of_execution(self, bench: Bench) -> None:
        await bench.submit(3, 1, 2)
        await bench.store.submit(sample(9))
        taken = await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=10)
        assert [each.seq for each in taken] == [1, 2, 3, 9]
        releases = [each.release for each in taken]
        assert releases == sorted(set(releases)) and releases[0] > 0

    @scenario
    async def test_a_job_is_taken_as_it_was_submitted(self, bench: Bench) -> None:
        sent = sample(10**18, payload=bytes(range(256)) * 1000, tenant="bob")
        request_id = (await bench.store.submit(sent)).request_id
        (taken,) = await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=10)
        assert replace(taken, release=0) == replace(sent, request_id=request_id)
        assert await bench.store.job_key(request_id) == ("bob", "s:sample:0")
        assert await bench.store.job_key("req_unknown") is None

    # --- duplicates ---------------------------------------------------------------------------

    @scenario
    async def test_a_resend_is_the_same_request_and_has_no_second_effect(
        self, bench: Bench
    ) -> None:
        first = await bench.store.submit(create(), model())
        await bench.store.update_record(Update("model", "s:train:0", {"last_request_s": 1.0}))
        again = await bench.store.submit(replace(create(), payload=b"other"), model())
        assert again == Submitted(first.request_id, duplicate=True)
        assert not first.duplicate
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.last_request_s == 1.0
        assert len(await bench.released()) == 1

    @scenario
    async def test_a_resend_of_an_ended_job_finds_its_result(self, bench: Bench) -> None:
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1], b"result"))
        again = await bench.store.submit(job(1))
        assert again == Submitted(bench.ids[1], duplicate=True)
        assert await bench.released() == []
        outcome = await bench.ended(bench.ids[1])
        assert outcome is not None and outcome.body == b"result"

    @scenario
    async def test_a_key_used_again_for_another_kind_is_refused(self, bench: Bench) -> None:
        await bench.submit(1)
        with pytest.raises(
            KeyReused, match=r"seq_id 1 of s:train:0 was already used for optim_step"
        ):
            await bench.submit(1, kind=JobKind.FORWARD_BACKWARD)
        assert await bench.released() == [1]

    @scenario
    async def test_tenants_do_not_share_keys(self, bench: Bench) -> None:
        first = await bench.store.submit(sample(1))
        second = await bench.store.submit(sample(1, tenant="bob"))
        assert not second.duplicate
        assert second.request_id != first.request_id

    @scenario
    async def test_request_ids_look_random(self, bench: Bench) -> None:
        await bench.submit(*range(1, 51))
        assert len(set(bench.ids.values())) == 50
        for request_id in bench.ids.values():
            assert request_id.startswith("req_") and len(request_id) == 30
            assert set(request_id[4:]) <= set("abcdefghijklmnopqrstuvwxyz234567")

    # --- rejections ---------------------------------------------------------------------------

    @scenario
    async def test_a_rejection_ends_at_once_and_uses_its_position(self, bench: Bench) -> None:
        await bench.submit(2)
        await bench.submit(1, rejection=Rejection("datum 3 has 9 tokens"))
        assert await bench.rejection(bench.ids[1]) == Rejection("datum 3 has 9 tokens", "user")
        assert await bench.released() == [2]

    @scenario
    async def test_an_early_rejection_leaves_no_gap(self, bench: Bench) -> None:
        await bench.submit(2, rejection=Rejection("bad"))
        await bench.submit(3)
        await bench.submit(1)
        assert await bench.released() == [1, 3]

    @scenario
    async def test_jobs_of_a_dead_model_end_at_once(self, bench: Bench) -> None:
        for status, category, words in (
            (ModelStatus.FAILED, "user", "its creation failed"),
            (ModelStatus.ENDED, "user", "create a new session"),
            (ModelStatus.LOST, "server", "create a new model from your last checkpoint"),
        ):
            await bench.store.put_record(model(status=status))
            bench.ids.clear()
            await bench.submit(len(words))
            (request_id,) = bench.ids.values()
            rejection = await bench.rejection(request_id)
            assert (rejection.category, words in rejection.message) == (category, True)
        assert await bench.released() == []

    @scenario
    async def test_a_failed_creation_ends_the_models_waiting_requests(self, bench: Bench) -> None:
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.submit(1, 3)
        await bench.finish(
            Outcome(
                created.request_id,
                rejection=Rejection("no room", "server"),
                updates=(Update("model", "s:train:0", {"status": ModelStatus.FAILED}),),
            )
        )
        await bench.submit(2)
        assert (await bench.rejection(created.request_id)).message == "no room"
        for seq in (1, 2, 3):
            assert "its creation failed" in (await bench.rejection(bench.ids[seq])).message

    @scenario
    async def test_a_model_that_cannot_be_restored_ends_its_waiting_requests(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(model())
        await bench.submit(1, 2, 4)
        lost = Update("model", "s:train:0", {"status": ModelStatus.LOST})
        no = Rejection("cannot be read", "server")
        await bench.finish(Outcome(bench.ids[1], rejection=no, updates=(lost,)))
        await bench.submit(3)
        assert await bench.rejection(bench.ids[1]) == no
        for seq in (2, 3, 4):
            rejection = await bench.rejection(bench.ids[seq])
            assert rejection.category == "server"
            assert "recovery points and log could not be read" in rejection.message
            assert "create a new model from your last checkpoint" in rejection.message
        assert await bench.status() is ModelStatus.LOST
        assert await bench.released() == []

    @scenario
    async def test_no_model_can_be_created_in_an_ended_session(self, bench: Bench) -> None:
        await bench.store.put_record(session(ended="success"))
        submitted = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        assert "session s has ended" in (await bench.rejection(submitted.request_id)).message
        assert await bench.store.get_record(ModelRecord, "s:train:0") is None

    @scenario
    async def test_a_request_marks_its_model_as_in_use(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        bench.clock.now_s += 50
        await bench.submit(1)
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.last_request_s == START_S + 50

    # --- take and wait ------------------------------------------------------------------------

    @scenario
    async def test_a_parked_take_returns_when_a_job_is_released(self, bench: Bench) -> None:
        taking = asyncio.create_task(bench.queue.take_jobs(bench.epoch, after=0, max_jobs=10))
        await bench.submit(2)
        done, _ = await asyncio.wait([taking], timeout=0.05)
        assert not done
        start_s = time.monotonic()
        await bench.submit(1)
        assert [each.seq for each in await taking] == [1, 2]
        assert time.monotonic() - start_s < 2.0

    @scenario
    async def test_taking_changes_nothing_but_the_cursor(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3)
        first = await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=2)
        assert first == await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=2)
        rest = await bench.queue.take_jobs(bench.epoch, after=first[-1].release, max_jobs=2)
        assert [each.seq for each in first + rest] == [1, 2, 3]

    @scenario
    async def test_ended_jobs_are_not_taken(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3)
        await bench.finish(Outcome(bench.ids[2], b"x"))
        assert await bench.released() == [1, 3]

    @scenario
    async def test_a_cancelled_take_loses_nothing(self, bench: Bench) -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    bench.queue.take_jobs(bench.epoch, after=0, max_jobs=1), 0.02
                )
        await bench.submit(1)
        assert await bench.released() == [1]

    @scenario
    async def test_a_wait_returns_as_soon_as_the_job_ends(self, bench: Bench) -> None:
        await bench.submit(1)
        waits = [asyncio.create_task(bench.store.wait(bench.ids[1], 10)) for _ in range(3)]
        await asyncio.sleep(0.02)
        want = Outcome(bench.ids[1], b"\x00\xff", "application/x-protobuf")
        await bench.finish(want)
        assert await asyncio.gather(*waits) == [want] * 3
        assert await bench.store.wait(bench.ids[1], 10) == want

    @scenario
    async def test_a_wait_ends_with_none_after_its_time(self, bench: Bench) -> None:
        await bench.submit(1)
        start_s = time.monotonic()
        assert await bench.store.wait(bench.ids[1], 0.05) is None
        assert 0.04 < time.monotonic() - start_s < 2.0
        assert await bench.store.wait(bench.ids[1], 0) is None

    @scenario
    async def test_an_unknown_request_is_a_key_error(self, bench: Bench) -> None:
        with pytest.raises(KeyError, match="req_unknown"):
            await bench.store.wait("req_unknown", 1)

    @scenario
    async def test_a_thousand_parked_waits_all_return(self, bench: Bench) -> None:
        submits = (bench.store.submit(sample(seq)) for seq in range(1000))
        ids = [each.request_id for each in await asyncio.gather(*submits)]
        waits = [asyncio.create_task(bench.store.wait(each, 15)) for each in ids]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in waits)
        await bench.finish(*(Outcome(each, each.encode()) for each in ids))
        outcomes = await asyncio.gather(*waits)
        assert [each.body.decode() for each in outcomes if each] == ids

    # --- finish -------------------------------------------------------------------------------

    @scenario
    async def test_a_result_never_changes(self, bench: Bench) -> None:
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1], b"first"))
        await bench.finish(
            Outcome(bench.ids[1], b"second", checkpoint=checkpoint()),
            Outcome("req_unknown", b"nobody's"),
        )
        outcome = await bench.ended(bench.ids[1])
        assert outcome is not None and outcome.body == b"first"
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) is None

    @scenario
    async def test_a_job_that_waits_for_an_earlier_one_cannot_be_finished(
        self, bench: Bench
    ) -> None:
        await bench.submit(1, 3)
        with pytest.raises(Fenced, match=bench.ids[3]):
            await bench.finish(Outcome(bench.ids[1], b"x"), Outcome(bench.ids[3], b"x"))
        assert await bench.ended(bench.ids[1]) is None
        assert await bench.released() == [1]

    @scenario
    async def test_a_fenced_worker_writes_nothing(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.submit(sample(1))
        (taken,) = await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=1)
        old = bench.epoch
        await bench.lease("another worker")
        update = Update("session", "s", {"sdk_version": "changed"})
        outcome = Outcome(
            taken.request_id, b"x", checkpoint=checkpoint(), sampler=sampler(), updates=(update,)
        )
        with pytest.raises(Fenced, match=f"epoch {old} is over"):
            await bench.queue.finish(old, [outcome])
        assert await bench.ended(taken.request_id) is None
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) is None
        assert await bench.store.get_record(SamplerRecord, sampler().key) is None
        assert await bench.store.get_record(SessionRecord, "s") == session()

    @scenario
    async def test_records_change_with_the_result(self, bench: Bench) -> None:
        await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.submit(1)
        await bench.finish(
            Outcome(
                bench.ids[1],
                b"saved",
                checkpoint=checkpoint(),
                sampler=sampler(file_id="f"),
                updates=(Update("model", "s:train:0", {"status": "ready"}),),
            )
        )
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) == checkpoint()
        assert await bench.store.get_record(SamplerRecord, sampler().key) == sampler(file_id="f")
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.READY

    @scenario
    async def test_an_existing_checkpoint_is_kept_unless_overwritten(self, bench: Bench) -> None:
        old, new = checkpoint(file_id="old"), checkpoint(file_id="new")
        await bench.submit(1, 2, 3)
        await bench.finish(
            Outcome(bench.ids[1], b"1", checkpoint=old),
            Outcome(bench.ids[2], b"2", checkpoint=new, sampler=sampler()),
        )
        rejection = await bench.rejection(bench.ids[2])
        assert rejection == Rejection(
            f"checkpoint {old.key} already exists; pass overwrite=true or choose another name",
            "user",
        )
        assert await bench.store.get_record(CheckpointRecord, old.key) == old
        assert await bench.store.get_record(SamplerRecord, sampler().key) is None
        await bench.finish(Outcome(bench.ids[3], b"3", checkpoint=new, overwrite=True))
        assert await bench.store.get_record(CheckpointRecord, old.key) == new

    @scenario
    async def test_a_save_under_a_taken_name_still_reports_other_changes(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(model())
        await bench.store.put_record(checkpoint(file_id="old"))
        await bench.submit(1)
        diverged = Update("model", "s:train:0", {"diverged": True})
        new = checkpoint(file_id="new")
        await bench.finish(Outcome(bench.ids[1], b"1", checkpoint=new, updates=(diverged,)))
        assert "exists" in (await bench.rejection(bench.ids[1])).message
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.diverged

    @scenario
    async def test_the_name_of_an_expired_checkpoint_is_free(self, bench: Bench) -> None:
        await bench.store.put_record(checkpoint(file_id="old", expires_s=START_S))
        await bench.submit(1)
        new = checkpoint(file_id="new")
        await bench.finish(Outcome(bench.ids[1], b"1", checkpoint=new))
        assert (await bench.ended(bench.ids[1])).rejection is None  # type: ignore[union-attr]
        assert await bench.store.get_record(CheckpointRecord, new.key) == new

    @scenario
    async def test_one_bad_call_does_not_affect_others(self, bench: Bench) -> None:
        await bench.submit(1)
        bad = job(1, kind=JobKind.FORWARD_BACKWARD)
        calls = [bench.store.submit(each) for each in (job(2), bad, job(3), bad, job(4))]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [
            Submitted,
            KeyReused,
            Submitted,
            KeyReused,
            Submitted,
        ]
        assert await bench.released() == [1, 2, 3, 4]
