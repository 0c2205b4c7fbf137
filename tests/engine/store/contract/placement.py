"""Placement: the worker of each job, and the models that a worker is asked to hand over."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from tests.engine.store.contract.bench import (
    INFO,
    START_S,
    Bench,
    Contract,
    create,
    job,
    keys,
    model,
    sample,
    scenario,
    staged,
)
from tuneserve_engine.core.jobs import JobKind, Outcome
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.store.base import ServedModel
from tuneserve_engine.store.errors import Fenced, StoreUnusable

OTHER = replace(INFO, name="other", vocab_size=7)
MODELS = [f"s:train:{n}" for n in range(6)]


class PlacementContract(Contract):
    # --- placement of jobs ----------------------------------------------------------------------

    @scenario
    async def test_two_workers_share_the_models_of_their_base_model(self, bench: Bench) -> None:
        second = await bench.join("second")
        for key in MODELS:
            await bench.store.submit(create(key), model(key))
            await bench.submit(1, 2, model_id=key)
        shares = [{each.model_id for each in await bench.take(e)} for e in (bench.epoch, second)]
        assert [len(each) for each in shares] == [3, 3]
        assert shares[0] | shares[1] == set(MODELS)

    @scenario
    async def test_a_model_stays_with_its_worker(self, bench: Bench) -> None:
        await bench.submit(1)
        second = await bench.join("second")
        await bench.submit(2, 3)
        assert [each.seq for each in await bench.take()] == [1, 2, 3]
        await bench.finish(*(Outcome(each) for each in bench.ids.values()))
        await bench.submit(4)
        assert [each.seq for each in await bench.take()] == [4]
        assert await bench.has_nothing(second)

    @scenario
    async def test_a_sample_goes_to_the_worker_with_the_fewest_sequences(
        self, bench: Bench
    ) -> None:
        epochs = [bench.epoch, await bench.join("second"), await bench.join("third")]
        for seq in range(9):
            await bench.store.submit(sample(seq))
        taken = [await bench.take(epoch) for epoch in epochs]
        assert [len(each) for each in taken] == [3, 3, 3]
        done = [Outcome(each.request_id, b"x") for each in taken[1]]
        await bench.finish(*done, epoch=epochs[1])
        for seq in range(10, 13):
            await bench.store.submit(sample(seq))
        assert [each.seq for each in await bench.take(epochs[1])] == [10, 11, 12]
        for seq, sequences in ((20, 8), (21, 4), (22, 4), (23, 4)):
            await bench.store.submit(sample(seq, sequences=sequences))
        taken = [[each.seq for each in await bench.take(epoch)][3:] for epoch in epochs]
        assert taken == [[20], [21, 23], [22]]

    @scenario
    async def test_the_first_16_sequences_of_a_snapshot_stay_together(self, bench: Bench) -> None:
        """Their worker loads it once. Further ones go to the worker with the fewest."""
        epochs = [bench.epoch, await bench.join("second"), await bench.join("third")]
        await bench.store.submit(sample(100))
        for seq in range(4):
            await bench.store.submit(sample(seq, "snapshot", sequences=4))
        assert [each.seq for each in await bench.take(epochs[1])] == [0, 1, 2, 3]
        assert await bench.has_nothing(epochs[2])
        for seq in range(4, 20):
            await bench.store.submit(sample(seq, "snapshot"))
        taken = {epoch: await bench.take(epoch) for epoch in epochs}
        assert [len(each) for each in taken.values()] == [1 + 8, 4, 8]
        for epoch, mine in taken.items():
            await bench.finish(*(Outcome(each.request_id, b"x") for each in mine), epoch=epoch)
        for seq in range(30, 33):
            await bench.store.submit(sample(seq, "snapshot"))
        assert [each.seq for each in await bench.take(epochs[0])] == [30, 31, 32]
        await bench.queue.resign(epochs[0])
        assert [each.seq for each in await bench.take(epochs[1])] == [30, 31, 32]

    @scenario
    async def test_cancelled_samples_no_longer_count_for_their_snapshot(self, bench: Bench) -> None:
        second = await bench.join("second")
        ids = [
            (await bench.store.submit(sample(seq, "snapshot", sequences=15))).request_id
            for seq in range(2)
        ]
        assert [len(await bench.take(epoch)) for epoch in (bench.epoch, second)] == [1, 1]
        for request_id in ids:
            await bench.store.cancel(request_id)
        await bench.store.submit(sample(5, sequences=1))
        for seq in range(6, 9):
            await bench.store.submit(sample(seq, "snapshot", sequences=5))
        assert [each.seq for each in await bench.take(second)] == [6, 7, 8]

    @scenario
    async def test_snapshots_are_spread_over_workers(self, bench: Bench) -> None:
        epochs = [bench.epoch, await bench.join("second"), await bench.join("third")]
        for number in range(60):
            await bench.store.submit(sample(1, "snapshot", scope=f"{number}:sample:0"))
            await bench.store.submit(sample(2, "snapshot", scope=f"{number}:sample:0"))
        placed = [[job.scope for job in await bench.take(epoch)] for epoch in epochs]
        assert [len(each) for each in placed] == [40, 40, 40]
        assert [len(set(each)) for each in placed] == [20, 20, 20]

    @scenario
    async def test_samples_go_to_the_worker_of_their_sessions_model(self, bench: Bench) -> None:
        """As long as it has less than 16 sequences more than the average."""
        second = await bench.join("second")
        await bench.submit(1, model_id="t:train:0")
        await bench.submit(1, model_id="s:train:0")
        assert keys(await bench.take(second)) == [("s:train:0", 1)]
        for number in range(4):
            await bench.store.submit(sample(1, "snapshot", scope=f"s:sample:{number}"))
        assert len(await bench.take(second)) == 1 + 4
        for number in range(4, 50):
            await bench.store.submit(sample(1, "snapshot", scope=f"s:sample:{number}"))
        samples = [len(await bench.take(epoch)) - 1 for epoch in (second, bench.epoch)]
        assert samples == [41, 9]  # 32 more than the other, which is 16 more than the average

    @scenario
    async def test_models_and_samples_are_balanced_separately(self, bench: Bench) -> None:
        second = await bench.join("second")
        await bench.submit(1)
        assert keys(await bench.take()) == [("s:train:0", 1)]
        await bench.store.submit(sample(1))
        assert keys(await bench.take()) == [("s:train:0", 1), ("s:sample:0", 1)]
        assert await bench.has_nothing(second)
        await bench.submit(1, model_id="t:train:0")
        assert keys(await bench.take(second)) == [("t:train:0", 1)]

    @scenario
    async def test_samples_go_to_workers_that_only_sample(self, bench: Bench) -> None:
        """And to the others once these are gone; a sample that was placed stays where it is."""
        await bench.submit(1)
        await bench.store.submit(sample(0))
        samplers = [await bench.join(name, speed=0.0) for name in ("one", "two")]
        for seq in range(1, 40):
            await bench.store.submit(sample(seq))
        assert keys(await bench.take()) == [("s:train:0", 1), ("s:sample:0", 0)]
        one, two = [[each.seq for each in await bench.take(epoch)] for epoch in samplers]
        assert sorted(map(len, (one, two))) == [19, 20] and sorted(one + two) == [*range(1, 40)]
        await bench.queue.resign(samplers[0])
        assert sorted(each.seq for each in await bench.take(samplers[1])) == [*range(1, 40)]
        await bench.queue.resign(samplers[1])
        mine = [each.seq for each in await bench.take() if each.kind == JobKind.SAMPLE]
        assert sorted(mine) == [*range(40)]

    @scenario
    async def test_a_worker_that_only_samples_gets_no_models(self, bench: Bench) -> None:
        sampler = await bench.join("sampler", speed=0.0)
        for key in MODELS:
            await bench.store.submit(create(key), model(key))
            await bench.submit(1, model_id=key)
        assert {each.model_id for each in await bench.take()} == set(MODELS)
        assert await bench.has_nothing(sampler)
        assert (await bench.queue.renew(bench.epoch)).leaving == []  # no room is made for it
        await bench.queue.resign(bench.epoch)
        assert await bench.has_nothing(sampler)
        successor = await bench.join("successor")
        assert {each.model_id for each in await bench.take(successor)} == set(MODELS)

    @staged(leased=False)
    async def test_models_wait_for_a_worker_that_trains(self, bench: Bench) -> None:
        sampler = await bench.join("sampler", speed=0.0)
        await bench.submit(1, 2)
        await bench.store.submit(sample(7))
        assert [each.seq for each in await bench.take(sampler)] == [7]
        assert await bench.store.base_models() == [ServedModel(INFO, 1, START_S, samplers=1)]
        await bench.lease()
        assert [each.seq for each in await bench.take()] == [1, 2]
        (served,) = await bench.store.base_models()
        assert (served.workers, served.samplers, served.trainers) == (2, 1, 1)

    @scenario
    async def test_a_worker_that_only_samples_changes_no_limit_of_models(
        self, bench: Bench
    ) -> None:
        other = replace(INFO, max_rank=8)
        await bench.join("sampler", other, speed=0.0)
        (served,) = await bench.store.base_models()
        assert (served.info, served.samplers) == (INFO, 1)
        await bench.join("trainer", other)
        (served,) = await bench.store.base_models()
        assert served.info == other

    @scenario
    async def test_a_worker_may_come_back_as_one_that_only_samples(self, bench: Bench) -> None:
        """Its models wait, or go to another; under the same process nothing changes."""
        await bench.submit(1)
        again = await bench.queue.lease("worker", "another process", INFO, 0.0)
        await bench.store.submit(sample(7))
        assert [each.seq for each in await bench.take(again.epoch)] == [7]
        second = await bench.join("second")
        assert [each.seq for each in await bench.take(second)] == [1]
        assert (await bench.queue.lease("second", "process of second", INFO)).resumed

    @scenario
    async def test_jobs_of_another_base_model_are_not_taken(self, bench: Bench) -> None:
        other = await bench.join("other", OTHER)
        await bench.submit(1)
        await bench.submit(1, model_id="s:train:1", base_model="other")
        await bench.store.submit(sample(1))
        await bench.store.submit(sample(2, base_model="other"))
        assert keys(await bench.take()) == [("s:train:0", 1), ("s:sample:0", 1)]
        assert keys(await bench.take(other)) == [("s:train:1", 1), ("s:sample:0", 2)]

    @scenario
    async def test_a_job_needs_the_base_model_of_its_model(self, bench: Bench) -> None:
        other = await bench.join("other", OTHER)
        await bench.store.put_record(model(base_model="other"))
        await bench.submit(1, base_model="")
        (taken,) = await bench.take(other)
        assert (taken.seq, taken.base_model) == (1, "other")

    @staged(leased=False)
    async def test_jobs_without_a_worker_wait_for_one_that_serves_them(self, bench: Bench) -> None:
        await bench.submit(2, 1, 4, base_model="other")
        await bench.store.submit(sample(7, base_model="other"))
        await bench.submit(1, model_id="s:train:1", base_model="other")
        await bench.lease()
        assert await bench.released() == []
        other = await bench.join("other", OTHER)
        assert [each.seq for each in await bench.take(other)] == [1, 2, 7, 1]
        await bench.submit(3, base_model="other")
        assert [each.seq for each in await bench.take(other)] == [1, 2, 7, 1, 3, 4]

    @scenario
    async def test_a_parked_take_returns_when_jobs_are_placed_again(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        second = await bench.join("second")
        taking = asyncio.create_task(bench.take(second))
        await asyncio.sleep(0.05)
        assert not taking.done()
        await bench.queue.resign(bench.epoch)
        assert [each.seq for each in await asyncio.wait_for(taking, 5)] == [1, 2]

    @scenario
    async def test_a_cursor_sees_jobs_that_move_here_in_the_order_of_each_model(
        self, bench: Bench
    ) -> None:
        await bench.submit(1, 2)  # placed with the first worker
        second = await bench.join("second")
        await bench.store.submit(sample(1))  # placed with the first worker
        await bench.submit(1, model_id="s:train:1")  # placed with the second worker
        await bench.submit(3, 4)
        (mine,) = await bench.take(second)
        assert mine.model_id == "s:train:1"
        await bench.queue.resign(bench.epoch)
        moved = await bench.take(second, after=mine.release)
        assert keys(moved) == [
            ("s:train:0", 1),
            ("s:train:0", 2),
            ("s:sample:0", 1),
            ("s:train:0", 3),
            ("s:train:0", 4),
        ]
        releases = [each.release for each in moved]
        assert releases == sorted(set(releases)) and releases[0] > mine.release
        await bench.submit(5)
        (last,) = await bench.take(second, after=releases[-1])
        assert last.seq == 5

    @scenario
    async def test_results_of_a_job_placed_with_another_worker_are_refused(
        self, bench: Bench
    ) -> None:
        await bench.submit(1)
        second = await bench.join("second")
        await bench.submit(1, model_id="s:train:1")
        mine, others = (await bench.take()) + (await bench.take(second))
        batch = [Outcome(mine.request_id, b"x"), Outcome(others.request_id, b"x")]
        with pytest.raises(Fenced, match=others.request_id):
            await bench.finish(*batch)
        assert await bench.ended(mine.request_id) is None
        assert await bench.ended(others.request_id) is None
        await bench.finish(batch[1], epoch=second)
        await bench.finish(*batch)  # that job has ended, so its second outcome is ignored
        assert await bench.ended(mine.request_id) == batch[0]

    # --- handing over ---------------------------------------------------------------------------

    @scenario
    async def test_a_handed_over_model_is_placed_again_with_its_jobs(self, bench: Bench) -> None:
        await bench.submit(1, 2, 4)
        seen = await bench.take()
        second = await bench.join("second")
        await bench.queue.unassign(bench.epoch, "s:train:0")
        # Neither worker has a model now. A tie goes to the worker that joined first.
        again = await bench.take(after=seen[-1].release)
        assert [each.seq for each in again] == [1, 2]
        await bench.submit(1, model_id="s:train:1")  # placed with the second worker
        await bench.submit(1, model_id="s:train:2")  # placed with the first worker
        await bench.queue.unassign(bench.epoch, "s:train:2")
        await bench.queue.unassign(bench.epoch, "s:train:0")
        await bench.submit(3)
        mine, others = await bench.take(), await bench.take(second)
        assert sorted(keys(mine + others)) == [
            ("s:train:0", 1),
            ("s:train:0", 2),
            ("s:train:0", 3),
            ("s:train:0", 4),
            ("s:train:1", 1),
            ("s:train:2", 1),
        ]
        for jobs in (mine, others):
            own = [each.seq for each in jobs if each.model_id == "s:train:0"]
            assert own in ([], [1, 2, 3, 4])

    @scenario
    async def test_a_model_handed_over_without_jobs_is_placed_at_once(self, bench: Bench) -> None:
        await bench.submit(1)
        await bench.submit(1, model_id="s:train:1")
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        second = await bench.join("second")
        await bench.queue.unassign(bench.epoch, "s:train:0")
        assert await bench.has_nothing(second)
        await bench.submit(2)
        assert keys(await bench.take(second)) == [("s:train:0", 2)]

    @scenario
    async def test_handing_over_a_model_of_another_worker_changes_nothing(
        self, bench: Bench
    ) -> None:
        await bench.submit(1)
        second = await bench.join("second")
        before = await bench.take()
        await bench.queue.unassign(second, "s:train:0")
        await bench.queue.unassign(second, "unknown")
        assert await bench.take() == before

    @scenario
    async def test_a_worker_hands_over_half_of_its_surplus_to_a_new_one(self, bench: Bench) -> None:
        for key in MODELS[:5]:
            await bench.submit(1, model_id=key)
        assert (await bench.queue.renew(bench.epoch)).leaving == []
        await bench.join("other", OTHER)
        assert (await bench.queue.renew(bench.epoch)).leaving == []
        second = await bench.join("second")
        idle = [each for each in await bench.take() if each.model_id == MODELS[3]]
        await bench.finish(*(Outcome(each.request_id) for each in idle))
        orders = [MODELS[3], MODELS[0]]  # the idle one first, then by name
        assert (await bench.queue.renew(bench.epoch)).leaving == orders
        assert (await bench.queue.renew(second)).leaving == []
        for key in orders:
            await bench.queue.unassign(bench.epoch, key)
        assert keys(await bench.take(second)) == [(MODELS[0], 1)]
        await bench.submit(2, model_id=MODELS[3])
        assert keys(await bench.take(second)) == [(MODELS[0], 1), (MODELS[3], 2)]
        assert (await bench.queue.renew(bench.epoch)).leaving == []  # 3 and 2
        assert (await bench.queue.renew(second)).leaving == []

    @scenario
    async def test_workers_together_hand_over_no_more_than_the_average(self, bench: Bench) -> None:
        """Each renews its lease before it sees what the others hand over."""
        second = await bench.join("second")
        for number in range(24):
            await bench.submit(1, model_id=f"s:train:{number}")
        third = await bench.join("third")
        for epoch in (bench.epoch, second):
            assert len((await bench.queue.renew(epoch)).leaving) == 4
        assert (await bench.queue.renew(third)).leaving == []

    @scenario
    async def test_idle_models_are_handed_over_once(self, bench: Bench) -> None:
        """Also if the parts are no whole numbers: 20 models on three workers are 7, 7 and 6."""
        second = await bench.join("second")
        for number in range(20):
            await bench.submit(1, model_id=f"s:train:{number}")
        for epoch in (bench.epoch, second):
            mine = [Outcome(each.request_id) for each in await bench.take(epoch)]
            await bench.finish(*mine, epoch=epoch)
        third = await bench.join("third")
        moves = []
        for _ in range(3):
            leaving = {
                epoch: (await bench.queue.renew(epoch)).leaving
                for epoch in (bench.epoch, second, third)
            }
            moves.append(sum(map(len, leaving.values())))
            for epoch, models in leaving.items():
                for key in models:
                    await bench.queue.unassign(epoch, key)
        assert moves == [6, 0, 0]

    @scenario
    async def test_no_model_is_handed_over_to_the_worker_that_gives_it_up(
        self, bench: Bench
    ) -> None:
        """By its part, a worker of speed 4 should have 17 of 31 models. It then gets the 18th."""
        fast = await bench.join("fast", speed=4.0)
        slow = [await bench.join(name) for name in ("two", "three")]
        for number in range(31):
            await bench.submit(1, model_id=f"s:train:{number}")
        epochs = (bench.epoch, fast, *slow)
        for epoch in epochs:
            mine = [Outcome(each.request_id) for each in await bench.take(epoch)]
            await bench.finish(*mine, epoch=epoch)
        moves = 0
        for _ in range(3):
            for epoch in epochs:
                for key in (await bench.queue.renew(epoch)).leaving:
                    await bench.queue.unassign(epoch, key)
                    moves += 1
        assert moves == 0

    @scenario
    async def test_models_are_placed_and_handed_over_by_speed(self, bench: Bench) -> None:
        """24 models go to speeds of 1 and 3 as 6 and 18. With one of 0.5 beside them: 5, 17, 2."""
        fast = await bench.join("fast", speed=3.0)
        for number in range(24):
            await bench.submit(1, model_id=f"s:train:{number}")
        assert [len(await bench.take(epoch)) for epoch in (bench.epoch, fast)] == [6, 18]
        assert (await bench.queue.renew(bench.epoch)).leaving == []
        assert (await bench.queue.renew(fast)).leaving == []
        slow = await bench.join("slow", speed=0.5)
        leaving = {each: (await bench.queue.renew(each)).leaving for each in (bench.epoch, fast)}
        assert [len(each) for each in leaving.values()] == [1, 1]
        for epoch, names in leaving.items():
            for key in names:
                await bench.queue.unassign(epoch, key)
        taken = [len(await bench.take(epoch)) for epoch in (bench.epoch, fast, slow)]
        assert taken == [5, 17, 2]
        for epoch in (bench.epoch, fast, slow):
            assert (await bench.queue.renew(epoch)).leaving == []

    @scenario
    async def test_idle_models_of_a_lost_worker_go_to_the_others_at_once(
        self, bench: Bench
    ) -> None:
        """Otherwise a worker that joins would get them beside what the others hand over."""
        for number in range(6):
            await bench.submit(1, model_id=f"s:train:{number}")
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        second = await bench.join("second")
        await bench.queue.resign(bench.epoch)
        third = await bench.join("third")
        assert len((await bench.queue.renew(second)).leaving) == 3
        assert (await bench.queue.renew(third)).leaving == []

    @scenario
    async def test_a_surplus_of_one_model_moves_nothing(self, bench: Bench) -> None:
        await bench.submit(1)
        await bench.join("second")
        assert (await bench.queue.renew(bench.epoch)).leaving == []

    @scenario
    async def test_an_idle_model_is_parked_until_its_next_request(self, bench: Bench) -> None:
        policy = SweepPolicy(park_s=900)
        for key in MODELS[:3]:
            await bench.submit(1, model_id=key)
        jobs = {each.model_id: each.request_id for each in await bench.take()}
        await bench.finish(Outcome(jobs[MODELS[0]]), Outcome(jobs[MODELS[2]]))
        bench.clock.now_s += 1
        await bench.submit(2, model_id=MODELS[2])
        (*_, again) = await bench.take()
        await bench.finish(Outcome(again.request_id))
        await bench.store.sweep(START_S + 900, policy)
        assert (await bench.queue.renew(bench.epoch)).leaving == []
        await bench.store.sweep(START_S + 900.5, policy)  # model 1 is busy, model 2 younger
        assert (await bench.queue.renew(bench.epoch)).leaving == [MODELS[0]]
        await bench.submit(2, model_id=MODELS[0])
        assert (await bench.queue.renew(bench.epoch)).leaving == []

    @scenario
    async def test_a_parked_model_is_restored_by_its_next_request(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.submit(1)
        await bench.finish(Outcome(bench.ids[1]))
        await bench.store.sweep(START_S + 1000, SweepPolicy())
        assert (await bench.queue.renew(bench.epoch)).leaving == ["s:train:0"]
        await bench.queue.unassign(bench.epoch, "s:train:0")
        assert (await bench.queue.renew(bench.epoch)).leaving == []
        await bench.submit(2)
        assert [each.seq for each in await bench.take()] == [2]
        assert (await bench.queue.renew(bench.epoch)).leaving == []

    # --- base models and workers ----------------------------------------------------------------

    @scenario
    async def test_a_base_model_name_has_one_revision(self, bench: Bench) -> None:
        """Otherwise a model would silently continue on the weights of another revision."""
        first, second = (replace(INFO, revision=letter * 40) for letter in "ab")
        await bench.join("pinned", first)
        known, other = first.revision, second.revision
        refusal = (
            f"has revision {other} of base model 'tiny', .* by revision {known}, .*"
            f"--base-model-revision {known}, .*"
        )
        with pytest.raises(StoreUnusable, match=refusal):
            await bench.join("moved", second)
        await bench.join("directory")
        with pytest.raises(StoreUnusable, match=refusal):
            await bench.join("moved", second)
        await bench.join("as pinned", first)
        await bench.join("apart", replace(second, name="tiny-b"))
        found = {
            each.info.name: (each.info.revision, each.workers)
            for each in await bench.store.base_models()
        }
        assert found == {"tiny": ("a" * 40, 4), "tiny-b": ("b" * 40, 1)}

    @scenario
    async def test_base_models_lists_every_base_model_and_its_living_workers(
        self, bench: Bench
    ) -> None:
        assert await bench.store.base_models() == [ServedModel(INFO, 1, START_S)]
        other = await bench.join("other", OTHER)
        bench.clock.now_s += 3
        await bench.join("second")
        assert await bench.store.base_models() == [
            ServedModel(OTHER, 1, START_S),
            ServedModel(INFO, 2, START_S + 3),
        ]
        await bench.queue.resign(other)
        bench.clock.now_s += 3
        newer = replace(INFO, context_length=2048)
        await bench.join("third", newer)
        bench.clock.now_s += 1  # the first was silent for 7 s, and the time to live is 6
        assert await bench.store.base_models() == [
            ServedModel(OTHER, 0, START_S),
            ServedModel(newer, 2, START_S + 6),
        ]

    @scenario
    async def test_workers_report_metrics_until_they_are_gone(self, bench: Bench) -> None:
        second = await bench.join("second")
        other = await bench.join("other", OTHER)
        assert [each.metrics for each in await bench.store.base_models()] == [{}, {}]
        await bench.queue.renew(bench.epoch, {"units_total": 1.0, "adapters": 2.0})
        # these replace the previous metrics
        await bench.queue.renew(bench.epoch, {"units_total": 3.5e9})
        await bench.queue.renew(second, {})
        await bench.queue.renew(other, {"ready": 0.0})
        await bench.queue.renew(other)  # no new metrics
        told = {each.info.name: each.metrics for each in await bench.store.base_models()}
        assert told == {
            INFO.name: {"worker": {"units_total": 3.5e9}, "second": {}},
            OTHER.name: {"other": {"ready": 0.0}},
        }
        await bench.queue.resign(other)
        await bench.pass_time(7, second)  # the first was silent for longer than the time to live
        left = {each.info.name: each.metrics for each in await bench.store.base_models()}
        assert left == {INFO.name: {"second": {}}, OTHER.name: {}}

    @scenario
    async def test_the_metrics_of_a_silent_worker_are_dropped(self, bench: Bench) -> None:
        await bench.queue.renew(bench.epoch, {"ready": 1.0})
        bench.clock.now_s += 7
        (served,) = await bench.store.base_models()
        assert (served.workers, served.metrics) == (0, {})

    @scenario
    async def test_a_successor_does_not_report_its_predecessors_metrics(self, bench: Bench) -> None:
        await bench.queue.renew(bench.epoch, {"units_total": 7.0})
        await bench.lease("another")
        (served,) = await bench.store.base_models()
        assert served.metrics == {}

    @staged(leased=False)
    async def test_nothing_is_served_before_the_first_worker(self, bench: Bench) -> None:
        assert await bench.store.base_models() == []

    @scenario
    async def test_a_failed_or_ended_model_does_not_count_for_its_worker(
        self, bench: Bench
    ) -> None:
        """Otherwise its worker would seem to have more models than it has."""
        await bench.join("second")
        for n in range(3):
            await bench.store.put_record(model(f"s:train:{n}"))
        await bench.submit(1)
        unload = job(2, kind=JobKind.UNLOAD_MODEL)
        await bench.store.submit(unload)
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        for n in (1, 2):
            await bench.submit(1, model_id=f"s:train:{n}")
        assert Counter(each.model_id for each in await bench.take()) == {"s:train:1": 1}
