"""The end of sessions, and the work of the sweep."""

from unittest.mock import patch

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    checkpoint,
    create,
    custom_loss,
    job,
    keys,
    model,
    sample,
    sampler,
    scenario,
    session,
    staged,
)
from tuneserve_engine.core.jobs import JobKind, Outcome, Rejection
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import (
    CheckpointRecord,
    CustomLossRecord,
    ModelRecord,
    ModelStatus,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.store import refusals
from tuneserve_engine.store.errors import ResultDropped


class SessionsContract(Contract):
    # --- sessions and the sweep -----------------------------------------------------------------

    @scenario
    async def test_ending_a_session_ends_what_belongs_to_it(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.store.put_record(model("t:train:0"))
        await bench.store.put_record(sampler())
        await bench.store.put_record(checkpoint())
        await bench.submit(1, 3)
        await bench.store.end_session("s", "success")
        await bench.store.end_session("s", "too late")
        assert await bench.store.get_record(SessionRecord, "s") == session(ended="success")
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.ENDED
        assert stored.ended == "success"
        assert await bench.store.get_record(ModelRecord, "t:train:0") == model("t:train:0")
        assert await bench.store.get_record(SamplerRecord, sampler().key) is None
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) == checkpoint()
        assert "session s ended (success)" in (await bench.rejection(bench.ids[3])).message
        taken = await bench.queue.take_jobs(bench.epoch, after=0, max_jobs=10)
        assert [(each.kind, each.model_id) for each in taken] == [
            (JobKind.OPTIM_STEP, "s:train:0"),
            (JobKind.UNLOAD_MODEL, "s:train:0"),
        ]
        await bench.finish(*(Outcome(each.request_id) for each in taken))
        await bench.store.end_session("unknown", "success")

    @scenario
    async def test_a_creation_reported_after_the_end_does_not_revive_the_model(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.store.end_session("s", "interrupted")
        ready = Update("model", "s:train:0", {"status": ModelStatus.READY})
        await bench.finish(Outcome(created.request_id, updates=(ready,), sampler=sampler()))
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.ENDED
        assert await bench.store.get_record(SamplerRecord, sampler().key) is None

    @scenario
    async def test_the_sweep_ends_sessions_without_heartbeat(self, bench: Bench) -> None:
        await bench.store.put_record(session("s"))
        await bench.store.put_record(session("t", last_seen_s=START_S + 100))
        await bench.store.put_record(model())
        await bench.store.sweep(START_S + 950, SweepPolicy(session_ttl_s=900))
        assert await bench.store.get_record(SessionRecord, "s") == session("s", ended="expired")
        kept = await bench.store.get_record(SessionRecord, "t")
        assert kept is not None and kept.ended is None
        stored = await bench.store.get_record(ModelRecord, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.ENDED

    @scenario
    async def test_the_sweep_abandons_a_gap_and_names_it(self, bench: Bench) -> None:
        policy = SweepPolicy(gap_ttl_s=600)
        await bench.submit(1, 3)
        await bench.submit(5, rejection=Rejection("spent"))
        bench.clock.now_s += 599
        await bench.submit(8)
        await bench.store.sweep(bench.clock.now_s, policy)
        assert await bench.ended(bench.ids[3]) is None
        await bench.store.sweep(bench.clock.now_s + 2, policy)
        for seq in (3, 8):
            rejection = await bench.rejection(bench.ids[seq])
            assert rejection.category == "user"
            assert rejection.message.startswith("seq_id 2, 4, 6-7 did not arrive within 600 s")
        assert await bench.released() == [1]
        await bench.submit(2, 9)
        assert "the next seq_id is 9" in (await bench.rejection(bench.ids[2])).message
        assert await bench.released() == [1, 9]

    @scenario
    async def test_abandoning_a_gap_passes_used_positions_behind_it(self, bench: Bench) -> None:
        await bench.submit(3, rejection=Rejection("spent"))
        await bench.submit(2)
        await bench.store.sweep(START_S + 601, SweepPolicy(gap_ttl_s=600))
        assert "seq_id 1 did not arrive" in (await bench.rejection(bench.ids[2])).message
        await bench.submit(4)
        assert await bench.released() == [4]

    @scenario
    async def test_the_sweep_drops_old_results(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        await bench.finish(Outcome(bench.ids[1], b"old"))
        bench.clock.now_s += 1000
        await bench.finish(Outcome(bench.ids[2], rejection=Rejection("new")))
        await bench.store.sweep(START_S + 1001, SweepPolicy(result_ttl_s=1000))
        with pytest.raises(ResultDropped, match=bench.ids[1]):
            await bench.store.wait(bench.ids[1], 1)
        assert (await bench.rejection(bench.ids[2])).message == "new"
        assert (await bench.store.submit(job(1))).duplicate
        assert await bench.store.job_key(bench.ids[1]) == ("alice", "s:train:0")

    @scenario
    async def test_the_sweep_deletes_expired_checkpoints(self, bench: Bench) -> None:
        for name, expires_s in (("gone", START_S), ("later", START_S + 1), ("never", None)):
            await bench.store.put_record(checkpoint(name, expires_s=expires_s))
        await bench.store.sweep(START_S, SweepPolicy())
        page = await bench.store.page_of_records(CheckpointRecord)
        assert {each.name for each in page.items} == {"later", "never"}

    @staged(leased=False)
    async def test_a_model_without_a_worker_needs_no_unload(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(2)  # held, and rejected by the end of the session
        await bench.store.end_session("s", "success")
        assert await bench.status() is ModelStatus.ENDED
        await bench.lease()
        assert await bench.released() == []

    @staged(leased=False)
    async def test_an_unload_waits_behind_jobs_that_wait_for_a_worker(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(1)
        await bench.store.end_session("s", "success")
        await bench.lease()
        taken = await bench.take()
        assert [each.kind for each in taken] == [JobKind.OPTIM_STEP, JobKind.UNLOAD_MODEL]

    @scenario
    async def test_the_sweep_drops_samples_of_silent_sessions(self, bench: Bench) -> None:
        policy = SweepPolicy(sample_ttl_s=120)
        for key in ("s", "t"):
            await bench.store.put_record(session(key))
            await bench.store.put_record(sampler(f"{key}:sample:0"))
        gone = (await bench.store.submit(sample(1))).request_id
        foreign = (await bench.store.submit(sample(1, tenant="bob"))).request_id
        kept = (await bench.store.submit(sample(2, scope="t:sample:0"))).request_id
        nobodys = (await bench.store.submit(sample(3, scope="unknown"))).request_id
        unplaced = (await bench.store.submit(sample(4, base_model="other"))).request_id
        await bench.submit(1)
        bench.clock.now_s += 121
        await bench.store.update_record(Update("session", "t", {"last_seen_s": START_S + 1}))
        await bench.store.sweep(START_S + 120, policy)
        assert await bench.ended(gone) is None
        await bench.store.sweep(START_S + 121, policy)
        for request_id in (gone, unplaced):
            rejection = await bench.rejection(request_id)
            assert rejection.category == "user"
            assert "session s was silent for 120 s" in rejection.message
            assert "submit the sample again" in rejection.message
        for request_id in (foreign, kept, nobodys, bench.ids[1]):
            assert await bench.ended(request_id) is None
        assert keys(await bench.take()) == [
            ("s:sample:0", 1),
            ("t:sample:0", 2),
            ("unknown", 3),
            ("s:train:0", 1),
        ]

    @scenario
    async def test_a_worker_learns_of_dropped_samples_that_it_has_taken(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(sampler())
        request_id = (await bench.store.submit(sample(1))).request_id
        await bench.take()
        await bench.store.sweep(START_S + 1000, SweepPolicy(sample_ttl_s=120))
        assert (await bench.store.renew(bench.epoch)).cancelled == [request_id]
        assert (await bench.store.renew(bench.epoch)).cancelled == []

    @scenario
    async def test_a_dropped_sample_that_was_running_after_all_changes_nothing(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(sampler())
        request_id = (await bench.store.submit(sample(1))).request_id
        await bench.store.sweep(START_S + 1000, SweepPolicy(sample_ttl_s=120))
        await bench.finish(Outcome(request_id, b"too late"))
        assert "was silent for" in (await bench.rejection(request_id)).message

    @scenario
    async def test_a_silent_session_stays_for_its_time_and_keeps_its_models(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.store.sweep(START_S + 6 * 86_400, SweepPolicy())
        assert await bench.status() is ModelStatus.READY
        await bench.store.sweep(START_S + 8 * 86_400, SweepPolicy())
        assert await bench.status() is ModelStatus.ENDED

    @scenario
    async def test_the_sweep_ends_any_number_of_due_records_in_steps(self, bench: Bench) -> None:
        ids = []
        for n in range(7):
            await bench.store.put_record(session(f"s{n}"))
            await bench.store.put_record(checkpoint(f"c{n}", expires_s=START_S + 1))
            for number in range(7):
                await bench.store.put_record(sampler(f"s{n}:sample:{number}"))
                scope = f"s{n}:sample:{number}"
                ids.append((await bench.store.submit(sample(1, scope=scope))).request_id)
                ids.append((await bench.store.submit(sample(2, scope=scope))).request_id)
        with patch.object(refusals, "RECORDS_AT_ONCE", 3):
            await bench.store.sweep(START_S + 121, SweepPolicy(sample_ttl_s=120))
            for request_id in ids:
                assert "was silent for" in (await bench.rejection(request_id)).message
            assert (await bench.store.page_of_records(CheckpointRecord)).total == 0
            assert (await bench.store.page_of_records(SamplerRecord)).total == 49
            await bench.store.sweep(START_S + 901, SweepPolicy(session_ttl_s=900))
        assert {
            each.ended for each in (await bench.store.page_of_records(SessionRecord)).items
        } == {"expired"}
        assert (await bench.store.page_of_records(SamplerRecord)).total == 0
        assert (await bench.store.page_of_records(CustomLossRecord)).total == 0

    @scenario
    async def test_a_large_session_ends_in_steps(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        for n in range(7):
            await bench.store.put_record(sampler(f"s:sample:{n}"))
            await bench.store.put_record(custom_loss(f"s:loss:{n}"))
            key = f"s:train:{n}"
            await bench.store.submit(create(key), model(key, status=ModelStatus.CREATING))
        await bench.store.put_record(model("s:train:3", status=ModelStatus.LOST))
        created = await bench.take()
        await bench.finish(*(Outcome(each.request_id) for each in created))
        with patch.object(refusals, "RECORDS_AT_ONCE", 3):
            await bench.store.end_session("s", "success")
        assert await bench.store.get_record(SessionRecord, "s") == session(ended="success")
        assert (await bench.store.page_of_records(SamplerRecord)).total == 0
        statuses = [each.status for each in (await bench.store.page_of_records(ModelRecord)).items]
        assert statuses.count(ModelStatus.ENDED) == 6
        unloads = [each.model_id for each in await bench.take()]
        assert sorted(unloads, key=str) == [f"s:train:{n}" for n in range(7)]

    @scenario
    async def test_times_in_the_future_are_dated_back(self, bench: Bench) -> None:
        """The clock was set back by an hour while running or stopped.

        Otherwise silence, gaps and idle models would last an hour longer.
        """
        for n, by_s, silent_s in ((0, 3600.0, 100.0), (1, 0.0, 0.0)):
            bench.clock.now_s = START_S + 3600
            name, key = f"s{n}", f"t:train:{n}"
            await bench.store.put_record(session(name, last_seen_s=START_S + 3500))
            await bench.store.put_record(session("old", last_seen_s=START_S - 50))
            await bench.submit(2, model_id=f"{name}:train:0")  # held
            created = await bench.store.submit(create(key), model(key))
            await bench.finish(Outcome(created.request_id))
            bench.clock.now_s = START_S
            await bench.store.sweep(START_S, SweepPolicy(set_back_s=by_s))
            found = await bench.store.get_record(SessionRecord, name)
            assert found is not None
            assert found.last_seen_s == pytest.approx(START_S - silent_s, abs=1e-5)
            old = await bench.store.get_record(SessionRecord, "old")
            assert old is not None and old.last_seen_s == START_S - 50
            bench.clock.now_s = START_S + 599
            await bench.queue.renew(bench.epoch)
            await bench.store.sweep(bench.clock.now_s, SweepPolicy(gap_ttl_s=600, park_s=605))
            assert await bench.ended(bench.ids[2]) is None
            assert (await bench.queue.renew(bench.epoch)).leaving == []
            bench.clock.now_s = START_S + 606
            await bench.queue.renew(bench.epoch)
            await bench.store.sweep(bench.clock.now_s, SweepPolicy(gap_ttl_s=600, park_s=605))
            assert "did not arrive" in (await bench.rejection(bench.ids[2])).message
            assert (await bench.queue.renew(bench.epoch)).leaving == [key]
            await bench.queue.unassign(bench.epoch, key)
