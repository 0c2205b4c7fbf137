"""Leases: the workers, the ends of their leases, and the jobs of dead workers."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.engine.store.contract.bench import (
    INFO,
    Bench,
    Contract,
    checkpoint,
    create,
    keys,
    model,
    point,
    sample,
    sampler,
    scenario,
    session,
    staged,
    tenant,
)
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import (
    CheckpointRecord,
    ModelStatus,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Lease, Queue
from tuneserve_engine.store.errors import Fenced


async def kill(bench: Bench, times: int = 1) -> None:
    """Let the worker die of its running jobs, and let another process take its name."""
    for _ in range(times):
        await bench.lease(f"{bench.epoch + 1}th process")


class LeasesContract(Contract):
    # --- one worker after the other -------------------------------------------------------------

    @scenario
    async def test_the_same_owner_resumes_and_another_takes_over(self, bench: Bench) -> None:
        first = bench.epoch
        assert await bench.lease("worker") == Lease(first, resumed=True)
        parked = asyncio.create_task(bench.take(first))
        await asyncio.sleep(0.02)
        assert await bench.lease("another") == Lease(first + 1, resumed=False)
        with pytest.raises(Fenced, match=f"epoch {first} is over"):
            await asyncio.wait_for(parked, 5)

    @scenario
    async def test_a_renewal_returns_the_weights_of_tenants_that_have_one(
        self, bench: Bench
    ) -> None:
        for record in (tenant("alice", weight=0.5), tenant("bob"), tenant("carol", weight=3.0)):
            await bench.store.put_record(record)
        assert (await bench.queue.renew(bench.epoch)).weights == {"alice": 0.5, "carol": 3.0}
        await bench.store.update_record(
            Update("tenant", "alice", {"weight": None}), Update("tenant", "bob", {"weight": 2})
        )
        assert (await bench.queue.renew(bench.epoch)).weights == {"bob": 2.0, "carol": 3.0}

    @scenario
    async def test_a_resumed_lease_keeps_its_models_and_jobs(self, bench: Bench) -> None:
        await bench.join("second")
        await bench.submit(1, 3)
        before = await bench.take()
        await bench.lease("worker")
        assert await bench.take() == before

    @scenario
    async def test_an_expired_epoch_can_do_nothing(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(1)
        request_id = (await bench.store.submit(sample(1))).request_id
        old = bench.epoch
        await bench.lease("another")
        outcome = Outcome(
            request_id,
            b"x",
            checkpoint=checkpoint(),
            sampler=sampler(),
            updates=(Update("session", "s", {"sdk_version": "changed"}),),
        )
        calls: list[Callable[[Queue], Awaitable[object]]] = [
            lambda queue: queue.renew(old),
            lambda queue: queue.take_jobs(old, after=0, max_jobs=1),
            lambda queue: queue.note_running(old, [request_id]),
            lambda queue: queue.finish(old, [outcome]),
            lambda queue: queue.finish(old, []),
            lambda queue: queue.recovery_points(old, "s:train:0"),
            lambda queue: queue.read_log(old, "s:train:0", start=0),
            lambda queue: queue.save_point(old, point(0)),
            lambda queue: queue.unassign(old, "s:train:0"),
            lambda queue: queue.resign(old),
        ]
        for call in calls:
            with pytest.raises(Fenced, match=f"epoch {old} is over"):
                await call(bench.queue)
        assert await bench.ended(request_id) is None
        assert await bench.store.get_record(CheckpointRecord, checkpoint().key) is None
        assert await bench.store.get_record(SamplerRecord, sampler().key) is None
        assert await bench.store.get_record(SessionRecord, "s") == session()
        assert await bench.queue.recovery_points(bench.epoch, "s:train:0") == []
        assert keys(await bench.take()) == [("s:train:0", 1), ("s:sample:0", 1)]

    @scenario
    async def test_models_and_jobs_outlive_their_worker(self, bench: Bench) -> None:
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.submit(1, 2, 4)
        await bench.store.submit(sample(9))
        waiting = asyncio.create_task(bench.store.wait(bench.ids[1], 10))
        ready = Update("model", "s:train:0", {"status": ModelStatus.READY})
        await bench.finish(Outcome(created.request_id, b"{}", updates=(ready,)))
        before = await bench.take()
        await bench.lease("another")
        after = await bench.take(after=before[-1].release)
        assert [replace(each, release=0) for each in after] == [
            replace(each, release=0) for each in before
        ]
        assert await bench.status() is ModelStatus.READY
        await bench.submit(3)
        assert await bench.released() == [1, 2, 9, 3, 4]
        await bench.finish(Outcome(bench.ids[1], b"at last"))
        assert await waiting == Outcome(bench.ids[1], b"at last")

    @scenario
    async def test_a_worker_with_another_base_model_leaves_jobs_that_it_cannot_run(
        self, bench: Bench
    ) -> None:
        await bench.submit(1)
        other = replace(INFO, name="other")
        await bench.lease("another", other)
        assert await bench.has_nothing(bench.epoch)
        await bench.lease("a third")
        assert await bench.released() == [1]

    @scenario
    async def test_the_jobs_of_a_worker_that_serves_another_base_model_now_move_to_the_others(
        self, bench: Bench
    ) -> None:
        await bench.submit(1)
        second = await bench.join("second")
        await bench.lease("another", replace(INFO, name="other"))
        assert not await bench.has_nothing(second)
        assert keys(await bench.take(second)) == [("s:train:0", 1)]

    # --- several ----------------------------------------------------------------------------------

    @scenario
    async def test_a_silent_workers_models_move_to_the_others(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        second = await bench.join("second")
        await bench.submit(1, model_id="s:train:1")
        await bench.pass_time(6, second)
        assert keys(await bench.take()) == [("s:train:0", 1), ("s:train:0", 2)]
        await bench.pass_time(1, second)
        assert keys(await bench.take(second)) == [
            ("s:train:1", 1),
            ("s:train:0", 1),
            ("s:train:0", 2),
        ]
        with pytest.raises(Fenced):
            await bench.take()
        assert await bench.lease("worker") == Lease(second + 1, resumed=False)

    @scenario
    async def test_a_dead_worker_keeps_its_jobs_no_longer_if_the_clock_is_set_back(
        self, bench: Bench
    ) -> None:
        await bench.submit(1, 2)
        second = await bench.join("second")
        bench.clock.now_s -= 3600
        await bench.pass_time(8, second)
        assert keys(await bench.take(second)) == [("s:train:0", 1), ("s:train:0", 2)]

    @scenario
    async def test_a_clock_set_ahead_or_back_ends_no_lease(self, bench: Bench) -> None:
        second = await bench.join("second")
        for jump_s in (3600, -7200, 3600):
            bench.clock.now_s += jump_s
            for epoch in (second, bench.epoch) * 2:
                await bench.queue.renew(epoch)

    @scenario
    async def test_two_workers_share_the_jobs_of_a_dead_one(self, bench: Bench) -> None:
        for n in range(4):
            await bench.submit(1, model_id=f"s:train:{n}")
        epochs = [await bench.join("second"), await bench.join("third")]
        await bench.pass_time(7, *epochs)
        assert [len(await bench.take(epoch)) for epoch in epochs] == [2, 2]

    @scenario
    async def test_no_worker_counts_as_silent_while_the_store_is_away(self, bench: Bench) -> None:
        second = await bench.join("second")
        bench.clock.now_s += 60
        await bench.queue.renew(second)
        await bench.queue.renew(bench.epoch)
        bench.clock.now_s += 60
        third = await bench.join("third")
        await bench.pass_time(6, third)
        await bench.queue.renew(bench.epoch)
        await bench.pass_time(1, third)
        await bench.queue.renew(bench.epoch)
        with pytest.raises(Fenced):  # it had its full time to live again, and did not renew
            await bench.queue.renew(second)

    @scenario
    async def test_a_silent_worker_keeps_its_lease_while_no_other_needs_its_jobs(
        self, bench: Bench
    ) -> None:
        await bench.submit(1)
        bench.clock.now_s += 1000
        await bench.queue.renew(bench.epoch)
        assert await bench.released() == [1]

    @staged(StorePolicy(lease_ttl_s=20.0))
    async def test_the_policy_sets_the_time_to_live(self, bench: Bench) -> None:
        second = await bench.join("second")
        await bench.pass_time(20, second)
        await bench.queue.renew(bench.epoch)
        await bench.pass_time(21, second)
        with pytest.raises(Fenced):
            await bench.queue.renew(bench.epoch)

    @scenario
    async def test_a_worker_that_resigns_leaves_everything_to_the_others(
        self, bench: Bench
    ) -> None:
        await bench.submit(1, 2)
        await bench.store.submit(sample(1))
        second = await bench.join("second")
        await bench.queue.note_running(bench.epoch, [bench.ids[1]])
        await bench.queue.resign(bench.epoch)
        taken = await bench.take(second)
        assert keys(taken) == [("s:train:0", 1), ("s:train:0", 2), ("s:sample:0", 1)]
        assert [each.attempts for each in taken] == [0, 0, 0]
        await bench.queue.resign(second)
        third = await bench.join("third")
        assert keys(await bench.take(third)) == keys(taken)

    # --- attempts ---------------------------------------------------------------------------------

    @scenario
    async def test_the_running_jobs_of_a_dead_worker_count_an_attempt(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        await bench.queue.note_running(bench.epoch, [bench.ids[2]])
        # this replaces the previous note
        await bench.queue.note_running(bench.epoch, [bench.ids[1]])
        await kill(bench)
        assert [each.attempts for each in await bench.take()] == [1, 0]
        await bench.queue.note_running(bench.epoch, [bench.ids[1], "req_unknown"])
        await kill(bench)
        assert [each.attempts for each in await bench.take()] == [2, 0]
        await kill(bench)  # the worker dies before it notes anything
        assert [each.attempts for each in await bench.take()] == [2, 0]

    @scenario
    async def test_a_silent_workers_running_jobs_count_an_attempt_too(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        await bench.queue.note_running(bench.epoch, [bench.ids[1]])
        second = await bench.join("second")
        await bench.pass_time(7, second)
        assert [each.attempts for each in await bench.take(second)] == [1, 0]

    @scenario
    async def test_a_request_that_three_workers_died_with_ends(self, bench: Bench) -> None:
        """It may be the cause of their deaths, and it must not kill the next worker."""
        await bench.submit(1, 2, 3)
        beside = (await bench.store.submit(sample(1))).request_id
        waiting = asyncio.create_task(bench.store.wait(bench.ids[1], 10))
        for _ in range(3):
            assert await bench.ended(bench.ids[1]) is None
            await bench.queue.note_running(bench.epoch, [bench.ids[1]])
            await kill(bench)
        rejection = await bench.rejection(bench.ids[1])
        assert rejection.category == "server"
        assert "3 workers stopped while they ran this request" in rejection.message
        assert await waiting == await bench.ended(bench.ids[1])
        assert await bench.ended(beside) is None
        assert [each.attempts for each in await bench.take()] == [0, 0, 0]
        assert await bench.released() == [2, 3, 1]

    @staged(StorePolicy(job_attempts=2))
    async def test_the_policy_sets_the_number_of_deaths(self, bench: Bench) -> None:
        request_id = (await bench.store.submit(sample(1))).request_id
        for _ in range(2):
            assert await bench.ended(request_id) is None
            await bench.queue.note_running(bench.epoch, [request_id])
            await kill(bench)
        assert "2 workers" in (await bench.rejection(request_id)).message

    @scenario
    async def test_a_creation_that_kills_workers_fails_its_model(self, bench: Bench) -> None:
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.submit(1)
        for _ in range(3):
            await bench.queue.note_running(bench.epoch, [created.request_id])
            await kill(bench)
        assert "3 workers" in (await bench.rejection(created.request_id)).message
        assert "its creation failed" in (await bench.rejection(bench.ids[1])).message
        assert await bench.status() is ModelStatus.FAILED

    @scenario
    async def test_a_request_whose_workers_were_killed_from_outside_runs_again(
        self, bench: Bench
    ) -> None:
        """It is suspect and runs alone. It still has its three attempts."""
        await bench.submit(1, 2)
        await bench.queue.killed("nobody")
        for number in range(5):
            await bench.queue.note_running(bench.epoch, [bench.ids[1]])
            await bench.queue.killed("worker")
            with pytest.raises(Fenced):
                await bench.queue.renew(bench.epoch)
            await bench.lease(f"{number}th process")
        assert [each.attempts for each in await bench.take()] == [5, 0]
        for _ in range(3):
            assert await bench.ended(bench.ids[1]) is None
            await bench.queue.note_running(bench.epoch, [bench.ids[1]])
            await kill(bench)
        assert "8 workers stopped" in (await bench.rejection(bench.ids[1])).message
        assert await bench.released() == [2]

    @scenario
    async def test_a_request_that_is_killed_again_and_again_ends(self, bench: Bench) -> None:
        """It may die for want of memory, which it takes itself."""
        await bench.submit(1, 2)
        for number in range(refusals.MOST_DEATHS):
            assert await bench.ended(bench.ids[1]) is None
            await bench.queue.note_running(bench.epoch, [bench.ids[1]])
            await bench.queue.killed("worker")
            await bench.lease(f"{number}th process")
        assert f"{refusals.MOST_DEATHS} workers" in (await bench.rejection(bench.ids[1])).message
        assert await bench.released() == [2]

    @scenario
    async def test_only_deaths_count(self, bench: Bench) -> None:
        await bench.submit(1, 2)
        await bench.queue.note_running(bench.epoch, list(bench.ids.values()))
        await bench.finish(Outcome(bench.ids[1], b"done"))
        for _ in range(5):
            bench.clock.now_s += 10
            assert (await bench.lease("worker")).resumed
        await bench.queue.note_running(bench.epoch, [])
        await kill(bench, times=5)
        assert await bench.ended(bench.ids[1]) == Outcome(bench.ids[1], b"done")
        assert [each.attempts for each in await bench.take()] == [0]

    @scenario
    async def test_noting_a_job_placed_elsewhere_counts_nothing(self, bench: Bench) -> None:
        await bench.submit(1)
        second = await bench.join("second")
        await bench.queue.note_running(second, [bench.ids[1]])
        await bench.pass_time(7, bench.epoch)
        assert [each.attempts for each in await bench.take()] == [0]
