"""Limits: the exact number at which each refuses, and the requests that are never refused."""

import asyncio
from dataclasses import replace

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
    staged,
    tenant,
)
from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import (
    ModelRecord,
    ModelStatus,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.store.base import Submitted
from tuneserve_engine.store.errors import KeyReused, LimitReached


async def is_refused(bench: Bench, refused: Job, *words: str) -> bool:
    """Whether the store has no room for the job. The refusal must contain all these words."""
    try:
        submitted = await bench.store.submit(refused)
    except LimitReached as error:
        assert 1 <= error.retry_after_s <= 30
        for word in words:
            assert word in str(error)
        return True
    assert not submitted.duplicate
    return False


def of(size: int, seq: int, model_id: str = "s:train:0", tenant: str = "alice") -> Job:
    """A request with a payload of this many bytes."""
    return job(seq, model_id, payload=bytes(size), tenant=tenant)


def _creation(key: str, tenant: str = "alice") -> Job:
    """The request that creates a model, as the server places it: the first in the model's log."""
    return replace(create(key, tenant), position=0)


async def _created(
    bench: Bench, number: int, session_id: str = "s", tenant: str = "alice"
) -> Submitted:
    key = f"{session_id}:train:{number}"
    created = model(key, tenant=tenant, status=ModelStatus.CREATING)
    return await bench.store.submit(_creation(key, tenant), created)


async def _waiting(bench: Bench, *submitted: Submitted) -> list[str | None]:
    """The states of these requests."""
    found = [await bench.store.request(each.request_id) for each in submitted]
    return [None if each is None else each.state for each in found]


class LimitsContract(Contract):
    # --- per model --------------------------------------------------------------------------------

    @staged(StorePolicy(model_jobs=3))
    async def test_a_model_has_a_limit_of_requests(self, bench: Bench) -> None:
        await bench.submit(1, 2, 5)
        assert await is_refused(bench, job(6), "model s:train:0 has 3 unfinished requests", "limit")
        assert await is_refused(bench, job(3))
        await bench.submit(1, model_id="s:train:1")
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        await bench.submit(3, 4)
        assert await is_refused(bench, job(6))
        assert await bench.released() == [3, 4, 5]

    @staged(StorePolicy(model_bytes=100))
    async def test_a_model_has_a_limit_of_bytes(self, bench: Bench) -> None:
        assert not await is_refused(bench, of(60, 1))
        words = ("model s:train:0 has 60 bytes", "the 41 bytes of this one", "limit of 100")
        assert await is_refused(bench, of(41, 2), *words)
        assert not await is_refused(bench, of(40, 2))
        assert not await is_refused(bench, of(0, 3))
        assert await is_refused(bench, of(1, 4))
        assert not await is_refused(bench, of(1, 1, "s:train:1"))

    @staged(StorePolicy(model_bytes=100, tenant_bytes=100, server_bytes=100))
    async def test_a_request_larger_than_a_limit_is_accepted_alone(self, bench: Bench) -> None:
        assert not await is_refused(bench, of(1000, 1))
        assert await is_refused(bench, of(0, 2))
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        assert not await is_refused(bench, of(1, 2))
        assert await is_refused(bench, of(100, 3))
        assert not await is_refused(bench, of(99, 3))

    # --- per tenant and server --------------------------------------------------------------------

    @staged(StorePolicy(tenant_jobs=3))
    async def test_a_tenant_has_a_limit_of_requests(self, bench: Bench) -> None:
        await bench.submit(1, 3)
        first = (await bench.store.submit(sample(1))).request_id
        assert await is_refused(bench, sample(2), "your key has 3 unfinished requests")
        assert await is_refused(bench, job(1, "s:train:1"))
        assert not await is_refused(bench, sample(1, tenant="bob"))
        await bench.finish(Outcome(first))
        assert not await is_refused(bench, job(1, "s:train:1"))
        assert await is_refused(bench, sample(2))

    @staged(StorePolicy(tenant_bytes=100))
    async def test_a_tenant_has_a_limit_of_bytes(self, bench: Bench) -> None:
        assert not await is_refused(bench, of(60, 1))
        assert await is_refused(bench, of(41, 1, "s:train:1"), "60 bytes", "limit of 100")
        assert not await is_refused(bench, of(40, 1, "s:train:1"))
        assert not await is_refused(bench, of(100, 1, "t:train:0", tenant="bob"))

    @staged(StorePolicy(server_jobs=3))
    async def test_the_server_has_a_limit_of_requests(self, bench: Bench) -> None:
        for name in ("alice", "bob", "carol"):
            assert not await is_refused(bench, sample(1, tenant=name))
        assert await is_refused(bench, sample(1, tenant="dave"), "the server has 3 unfinished")
        taken = await bench.take()
        await bench.finish(Outcome(taken[0].request_id))
        assert not await is_refused(bench, sample(1, tenant="dave"))

    @staged(StorePolicy(server_bytes=100))
    async def test_the_server_has_a_limit_of_bytes(self, bench: Bench) -> None:
        assert not await is_refused(bench, of(60, 1))
        bobs = "t:train:0"
        assert await is_refused(bench, of(41, 1, bobs, "bob"), "the server", "limit of 100")
        assert not await is_refused(bench, of(40, 1, bobs, "bob"))

    @staged(StorePolicy(tenant_jobs=5))
    async def test_concurrent_calls_cannot_exceed_a_limit(self, bench: Bench) -> None:
        refused = await asyncio.gather(*(is_refused(bench, sample(seq)) for seq in range(20)))
        assert refused.count(False) == 5

    # --- requests that are never refused ----------------------------------------------------------

    @staged(StorePolicy(model_jobs=2, tenant_jobs=2, model_bytes=40, tenant_bytes=40))
    async def test_a_request_that_a_model_waits_for_is_accepted(self, bench: Bench) -> None:
        """Without it, the requests held behind the gap would never end."""
        await bench.submit(3, 4)
        assert await is_refused(bench, job(2))  # an earlier request is missing
        assert await is_refused(bench, job(5))
        assert not await is_refused(bench, of(1000, 1))
        assert await is_refused(bench, job(2))  # 1 can run, so nothing is stuck
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        assert not await is_refused(bench, job(2))
        assert await bench.released() == [2, 3, 4]

    @staged(StorePolicy(server_jobs=2, model_jobs=2))
    async def test_the_servers_limit_also_holds_for_a_request_that_a_model_waits_for(
        self, bench: Bench
    ) -> None:
        await bench.submit(2, 3)
        assert await is_refused(bench, job(1), "the server")

    @staged(StorePolicy(server_bytes=40))
    async def test_the_servers_limit_of_bytes_holds_for_it_too(self, bench: Bench) -> None:
        assert not await is_refused(bench, of(30, 2))
        assert await is_refused(bench, of(11, 1), "the server")
        assert not await is_refused(bench, of(10, 1))

    @staged(StorePolicy(server_jobs=1, tenant_models=1, waiting_models=0))
    async def test_a_resend_is_never_refused(self, bench: Bench) -> None:
        first = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        again = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        assert again == replace(first, duplicate=True)
        with pytest.raises(KeyReused):
            await bench.store.submit(replace(create(), kind=JobKind.LOAD_WEIGHTS))

    @staged(StorePolicy(model_jobs=1, tenant_jobs=2, server_jobs=2))
    async def test_a_rejected_request_needs_no_room(self, bench: Bench) -> None:
        await bench.store.put_record(model("s:train:1", status=ModelStatus.ENDED))
        await bench.submit(1)
        await bench.store.submit(sample(1))
        await bench.submit(2, rejection=Rejection("bad"))
        await bench.submit(1, model_id="s:train:1")
        assert "has ended" in (await bench.rejection(bench.ids[1])).message
        taken = await bench.take()
        await bench.finish(Outcome(taken[1].request_id))
        assert not await is_refused(bench, sample(2))
        assert await is_refused(bench, sample(3), "2 unfinished")

    @staged(StorePolicy(model_jobs=1, tenant_jobs=1, server_jobs=1))
    async def test_no_limit_stops_a_model_from_being_unloaded(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(1)
        await bench.store.end_session("s", "success")
        assert len(await bench.take()) == 2

    # --- after a refusal --------------------------------------------------------------------------

    @staged(StorePolicy(tenant_jobs=1))
    async def test_a_refused_request_leaves_nothing(self, bench: Bench) -> None:
        first = (await bench.store.submit(sample(1))).request_id
        with pytest.raises(LimitReached):
            await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        assert await bench.store.get_record(ModelRecord, "s:train:0") is None
        await bench.finish(Outcome(first))
        assert not (await bench.store.submit(create(), model())).duplicate
        assert [each.kind for each in await bench.take()] == [JobKind.CREATE_MODEL]

    @staged(StorePolicy(tenant_jobs=2, tenant_bytes=800))
    async def test_every_end_of_a_request_makes_room(self, bench: Bench) -> None:
        async def is_full() -> bool:
            return await is_refused(bench, sample(99))

        await bench.store.put_record(model())
        await bench.store.put_record(session())
        await bench.store.put_record(sampler())
        await bench.submit(2, 3)
        assert await is_full()
        await bench.store.sweep(START_S + 601, SweepPolicy(sample_ttl_s=10**9))  # a gap
        await bench.store.submit(sample(1))
        await bench.store.submit(sample(2))
        assert await is_full()
        await bench.store.sweep(START_S + 601, SweepPolicy())  # a silent session
        await bench.submit(4, 5)
        assert await is_full()
        for _ in range(3):  # deaths
            await bench.queue.note_running(bench.epoch, [bench.ids[4]])
            await bench.lease(f"{bench.epoch + 1}th process")
        await bench.submit(7)
        assert await is_full()
        # the gap again, but now an unload takes the room
        await bench.store.end_session("s", "success")
        assert await is_full()
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        await bench.submit(1, 3, model_id="s:train:1")
        assert await is_full()
        failed = Update("model", "s:train:1", {"status": ModelStatus.FAILED})
        await bench.store.put_record(model("s:train:1"))
        no = Rejection("no")
        await bench.finish(Outcome(bench.ids[1], rejection=no, updates=(failed,)))
        await bench.store.submit(sample(3))
        await bench.store.submit(sample(4))
        assert await is_full()

    @staged(StorePolicy(tenant_bytes=40))
    async def test_a_payload_stored_for_the_log_takes_no_room(self, bench: Bench) -> None:
        await bench.submit(1, payload=bytes(40))
        await bench.finish_changed(1)
        assert not await is_refused(bench, of(40, 2))

    # --- models -----------------------------------------------------------------------------------

    @staged(StorePolicy(tenant_models=2, waiting_models=0))
    async def test_a_tenant_has_a_limit_of_models(self, bench: Bench) -> None:
        for n in (0, 1):
            key = f"s:train:{n}"
            await bench.store.submit(create(key), model(key, status=ModelStatus.CREATING))
        third = model("s:train:2", status=ModelStatus.CREATING)
        with pytest.raises(LimitReached, match="2 models in use, which is the limit") as refused:
            await bench.store.submit(create("s:train:2"), third)
        assert 1 <= refused.value.retry_after_s <= 30
        assert await bench.store.get_record(ModelRecord, "s:train:2") is None
        bobs = model("t:train:0", tenant="bob", status=ModelStatus.CREATING)
        await bench.store.submit(create("t:train:0", tenant="bob"), bobs)
        await bench.store.put_new_record(session())
        await bench.store.submit(sample(1), sampler("s:sample:1"))
        assert await bench.store.get_record(SamplerRecord, "s:sample:1") is not None

    # --- of one tenant ----------------------------------------------------------------------------

    @staged(StorePolicy(tenant_jobs=2, tenant_models=1, waiting_models=0))
    async def test_a_tenants_own_limits_override_the_general_ones(self, bench: Bench) -> None:
        await bench.store.put_record(tenant(max_jobs=3, max_models=2))
        await bench.store.put_record(tenant("bob", max_jobs=0, max_checkpoints=7))
        for n in (0, 1):
            key = f"s:train:{n}"
            await bench.store.submit(create(key), model(key))
        with pytest.raises(LimitReached, match="2 models in use, which is the limit"):
            await bench.store.submit(create("s:train:2"), model("s:train:2"))
        assert not await is_refused(bench, sample(1))
        assert await is_refused(bench, sample(2), "your key has 3 unfinished requests")
        assert await is_refused(bench, sample(1, tenant="bob"), "your key has 0 unfinished")
        for seq in (1, 2):
            assert not await is_refused(bench, sample(seq, tenant="carol"))
        assert await is_refused(bench, sample(3, tenant="carol"), "your key has 2 unfinished")

    @staged(StorePolicy(tenant_jobs=2, tenant_models=1, waiting_models=0))
    async def test_a_limit_that_a_tenant_lacks_is_the_general_one(self, bench: Bench) -> None:
        await bench.store.put_record(tenant(weight=2.0))
        await bench.store.submit(create(), model())
        with pytest.raises(LimitReached, match="1 models in use"):
            await bench.store.submit(create("s:train:1"), model("s:train:1"))
        assert not await is_refused(bench, sample(1))
        assert await is_refused(bench, sample(2), "your key has 2 unfinished requests")

    @staged(StorePolicy(tenant_models=1, waiting_models=0))
    async def test_a_parked_model_leaves_room_for_another(self, bench: Bench) -> None:
        await bench.store.submit(create(), model())
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        await bench.queue.unassign(bench.epoch, "s:train:0")
        await bench.store.submit(create("s:train:1"), model("s:train:1"))
        with pytest.raises(LimitReached):  # none of its models has ended
            await bench.store.submit(create("s:train:2"), model("s:train:2"))
        await bench.submit(1)  # an old model is restored despite the limit
        assert await bench.released() == [1, 1]

    @staged(StorePolicy(tenant_models=2, waiting_models=0))
    async def test_the_idlest_model_is_parked_for_one_more(self, bench: Bench) -> None:
        """A third model once had to wait until another had rested for ``park_s``, 15 minutes."""
        for n in (0, 1):
            key = f"s:train:{n}"
            await bench.store.submit(create(key), model(key))
            await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
            bench.clock.now_s += 1
        await bench.submit(1)  # the older model gets a request, so it is busy
        await bench.store.submit(create("s:train:2"), model("s:train:2"))
        assert (await bench.queue.renew(bench.epoch)).leaving == ["s:train:1"]
        with pytest.raises(LimitReached, match=r"2 models in use, .* too few of them are idle"):
            await bench.store.submit(create("s:train:3"), model("s:train:3"))
        # a request arrived before the model was parked, so it stays
        await bench.submit(1, model_id="s:train:1")
        assert (await bench.queue.renew(bench.epoch)).leaving == []

    @staged(StorePolicy(tenant_models=3))
    async def test_after_lowering_the_limit_enough_models_are_parked(self, bench: Bench) -> None:
        for n in range(3):
            key = f"s:train:{n}"
            await bench.store.submit(create(key), model(key))
        await bench.finish(*(Outcome(each.request_id) for each in await bench.take()))
        await bench.store.put_record(tenant(max_models=2))
        await bench.store.submit(create("s:train:3"), model("s:train:3"))
        assert len((await bench.queue.renew(bench.epoch)).leaving) == 2

    @staged(StorePolicy(tenant_models=1, waiting_models=0))
    async def test_a_dead_model_leaves_room_for_another(self, bench: Bench) -> None:
        statuses = (ModelStatus.FAILED, ModelStatus.LOST)
        for n, status in enumerate(statuses):
            key = f"s:train:{n}"
            created = await bench.store.submit(create(key), model(key))
            with pytest.raises(LimitReached):
                await bench.store.submit(create("s:train:9"), model("s:train:9"))
            update = Update("model", key, {"status": status})
            no = Rejection("no")
            await bench.finish(Outcome(created.request_id, rejection=no, updates=(update,)))
        await bench.store.put_record(session("t"))
        await bench.store.submit(create("t:train:0"), model("t:train:0"))
        with pytest.raises(LimitReached):
            await bench.store.submit(create("s:train:9"), model("s:train:9"))
        await bench.store.end_session("t", "success")  # its unload is still pending
        await bench.store.submit(create("s:train:9"), model("s:train:9"))

    @staged(StorePolicy(tenant_models=1, waiting_models=0), leased=False)
    async def test_a_model_that_waits_for_a_worker_is_in_use(self, bench: Bench) -> None:
        await bench.store.submit(create(), model())
        with pytest.raises(LimitReached):
            await bench.store.submit(create("s:train:1"), model("s:train:1"))

    @staged(StorePolicy(tenant_models=1, waiting_models=2))
    async def test_a_new_model_waits_until_another_is_idle(self, bench: Bench) -> None:
        first = await _created(bench, 0)
        second = await _created(bench, 1)
        third = await _created(bench, 2)
        assert [each.waits for each in (first, second, third)] == [False, True, True]
        with pytest.raises(LimitReached, match=r"1 models in use, .* 2 more wait to be created"):
            await _created(bench, 3)
        assert not (await _created(bench, 0, "bobs", tenant="bob")).waits
        again = await bench.store.submit(_creation("s:train:1"), model("s:train:1"))
        assert again.duplicate and again.request_id == second.request_id
        await bench.store.submit(job(2, "s:train:1"))  # comes after its model's creation
        assert await _waiting(bench, second, third) == ["held", "held"]
        bench.clock.now_s += 10 * SweepPolicy.gap_ttl_s  # this is not a gap: no request is missing
        await bench.store.sweep(bench.clock.now_s, SweepPolicy())
        assert await _waiting(bench, second, third) == ["held", "held"]
        assert {each.model_id for each in await bench.take()} == {"s:train:0", "bobs:train:0"}

        await bench.finish(Outcome(first.request_id))
        await bench.store.sweep(bench.clock.now_s, SweepPolicy())
        assert (await bench.queue.renew(bench.epoch)).leaving == ["s:train:0"]
        assert await _waiting(bench, second, third) == ["ready", "held"]
        assert [each.position for each in await bench.take() if each.model_id == "s:train:1"] == [
            0,
            1,
        ]
        await bench.store.sweep(bench.clock.now_s, SweepPolicy())  # the first model has work now
        assert await _waiting(bench, third) == ["held"]

    @staged(StorePolicy(tenant_models=1, waiting_models=1))
    async def test_a_new_model_does_not_overtake_a_waiting_one(self, bench: Bench) -> None:
        first = await _created(bench, 0)
        second = await _created(bench, 1)
        await bench.finish(Outcome(first.request_id))
        with pytest.raises(LimitReached):  # the free room belongs to the waiting model
            await _created(bench, 2)
        await bench.store.sweep(bench.clock.now_s, SweepPolicy())
        assert await _waiting(bench, second) == ["ready"]
        assert (await _created(bench, 2)).waits

    @staged(StorePolicy(tenant_models=1, waiting_models=1))
    async def test_a_session_that_ends_ends_the_wait_of_its_models(self, bench: Bench) -> None:
        for key in ("s", "t", "u"):
            await bench.store.put_record(session(key))
        await _created(bench, 0)
        second = await _created(bench, 0, "t")
        await bench.store.end_session("t", "success")
        outcome = await bench.store.wait(second.request_id, 0)
        assert outcome is not None and outcome.rejection is not None
        assert "session t ended (success)" in outcome.rejection.message
        assert "for room for its model" in outcome.rejection.message
        third = await _created(bench, 0, "u")  # its place is free
        assert third.waits
        await bench.store.end_session("s", "success")  # the only one in use
        await bench.store.sweep(bench.clock.now_s, SweepPolicy())
        assert await _waiting(bench, third) == ["ready"]

    @staged(StorePolicy(tenant_models=1, waiting_models=2))
    async def test_a_higher_limit_admits_waiting_models(self, bench: Bench) -> None:
        submitted = [await _created(bench, n) for n in range(3)]
        await bench.store.put_record(tenant(max_models=2))
        await bench.store.sweep(bench.clock.now_s, SweepPolicy())
        assert await _waiting(bench, *submitted) == ["ready", "ready", "held"]

    @scenario
    async def test_the_policy_defaults_leave_room(self, bench: Bench) -> None:
        await bench.submit(*range(1, 257))
        assert await is_refused(bench, job(257), "256")
        for seq in range(1024 - 256):
            await bench.store.submit(sample(seq))
        assert await is_refused(bench, sample(10_000), "1024")
        await bench.queue.save_point(bench.epoch, point(0, "unknown"))
        assert await bench.store.get_record(SessionRecord, "s") is None
