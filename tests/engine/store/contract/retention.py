"""Limits on sessions, and the removal of ended sessions with everything that belongs to them."""

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    checkpoint,
    create,
    custom_loss,
    job,
    model,
    sampler,
    scenario,
    session,
    staged,
)
from tuneserve_engine.core.jobs import JobKind, Outcome, Rejection
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import (
    CheckpointRecord,
    CustomLossRecord,
    ModelRecord,
    ModelStatus,
    Record,
    RunEventRecord,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.core.usage import CurvePoint
from tuneserve_engine.store.errors import LimitReached

DAY_S = 86_400.0
POLICY = SweepPolicy(ended_session_ttl_s=30 * DAY_S, sample_ttl_s=1e9)


async def refused(bench: Bench, new: Record) -> tuple[str, int] | None:
    """The words and the ``Retry-After`` with which the store refuses a new record."""
    try:
        await bench.store.put_new_record(new)
    except LimitReached as error:
        assert "nothing was created" in str(error)
        assert await bench.store.get_record(type(new), new.key) is None
        return str(error), error.retry_after_s
    return None


def event(model_id: str) -> RunEventRecord:
    return RunEventRecord(f"{model_id}:event:0", "alice", model_id, "note", 3, START_S, "{}")


async def sweep(bench: Bench, days: float) -> None:
    """Sweep this many days after the start."""
    bench.clock.now_s = START_S + days * DAY_S
    await bench.store.sweep(bench.clock.now_s, POLICY)


async def left(bench: Bench) -> set[str]:
    """The keys of all records that belong to sessions."""
    kinds: tuple[type[Record], ...] = (
        *(SessionRecord, ModelRecord, RunEventRecord, SamplerRecord, CheckpointRecord),
        CustomLossRecord,
    )
    pages = [await bench.store.page_of_records(kind) for kind in kinds]
    return {record.key for page in pages for record in page.items}


async def unload(bench: Bench) -> None:
    """Let the worker finish all its jobs, here the unloads of ended models."""
    taken = await bench.take()
    assert {each.kind for each in taken} == {JobKind.UNLOAD_MODEL}
    await bench.finish(*(Outcome(each.request_id) for each in taken))


class RetentionContract(Contract):
    # --- limits -----------------------------------------------------------------------------------

    @staged(StorePolicy(tenant_sessions=2))
    async def test_a_tenant_has_a_limit_of_open_sessions(self, bench: Bench) -> None:
        for key in "ab":
            assert await refused(bench, session(key)) is None
        assert await refused(bench, session("b")) is None  # exists already
        told = await refused(bench, session("c"))
        assert told is not None and told[1] == 30
        assert "your key has 2 sessions that have not ended, and the limit is 2" in told[0]
        assert await refused(bench, session("c", tenant="bob")) is None
        await bench.store.end_session("a", "success")
        assert await refused(bench, session("d")) is None
        assert await refused(bench, session("e")) is not None
        await bench.store.sweep(START_S + 8 * DAY_S, SweepPolicy())
        for key in "ef":
            assert await refused(bench, session(key)) is None

    @staged(StorePolicy(server_sessions=3))
    async def test_the_server_has_a_limit_of_open_sessions(self, bench: Bench) -> None:
        for name in ("alice", "bob", "carol"):
            assert await refused(bench, session(name, tenant=name)) is None
        told = await refused(bench, session("dave", tenant="dave"))
        assert told is not None and "the server has 3 sessions" in told[0]
        await bench.store.delete_record(SessionRecord, "bob")
        assert await refused(bench, session("dave", tenant="dave")) is None

    @staged(StorePolicy(tenant_sessions_a_minute=3, tenant_samplers_a_minute=2))
    async def test_a_tenant_has_a_limit_of_new_records_a_minute(self, bench: Bench) -> None:
        for n in range(3):
            bench.clock.now_s = START_S + 10 * n
            assert await refused(bench, session(f"s{n}", created_s=bench.clock.now_s)) is None
            await bench.store.end_session(f"s{n}", "success")
        bench.clock.now_s = START_S + 25.5
        told = await refused(bench, session("s3", created_s=bench.clock.now_s))
        assert told is not None and told[1] == 35
        assert "you created 3 sessions within a minute, which is the limit" in told[0]
        assert await refused(bench, session("other", tenant="bob")) is None
        assert await refused(bench, sampler("s:sample:0")) is None
        assert await refused(bench, sampler("s:sample:1")) is None
        told = await refused(bench, sampler("s:sample:2"))
        assert told is not None and "2 samplers within a minute" in told[0]
        bench.clock.now_s = START_S + 60
        assert await refused(bench, session("s3", created_s=bench.clock.now_s)) is None
        assert await refused(bench, session("s4", created_s=bench.clock.now_s)) is not None
        bench.clock.now_s = START_S - 3600  # set back: records from the future do not count
        assert await refused(bench, session("s4", created_s=bench.clock.now_s)) is None

    # --- retention --------------------------------------------------------------------------------

    @scenario
    async def test_an_ended_session_is_forgotten_with_everything_it_owns(
        self, bench: Bench
    ) -> None:
        for key in ("s", "t"):
            await bench.store.put_record(session(key))
            await bench.store.submit(create(f"{key}:train:0"), model(f"{key}:train:0"))
            await bench.store.put_record(sampler(f"{key}:sample:0"))
            await bench.store.put_record(custom_loss(f"{key}:loss:0"))
            await bench.store.put_record(event(f"{key}:train:0"))
        point = CurvePoint("optim_step", 0, loss_sum=0.5)
        taken = await bench.take()
        await bench.finish(*(Outcome(each.request_id, point=point) for each in taken))
        await bench.store.end_session("s", "success")
        await bench.store.put_record(custom_loss("s:loss:1"))  # accepted just before the end
        await unload(bench)
        of_t = {"t", "t:train:0", "t:train:0:event:0", "t:sample:0", "t:loss:0"}
        await bench.store.update_record(
            Update("session", "t", {"last_seen_s": START_S + 29 * DAY_S})
        )
        await sweep(bench, 30)
        assert await left(bench) == {"s", "s:train:0", "s:train:0:event:0", "s:loss:1"} | of_t
        assert len(await bench.store.curve("s:train:0")) == 1
        await sweep(bench, 30.1)
        assert await left(bench) == of_t
        assert await bench.store.curve("s:train:0") == []
        assert len(await bench.store.curve("t:train:0")) == 1
        assert await refused(bench, session("s")) is None  # a new one

    @scenario
    async def test_an_open_session_is_not_forgotten(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        policy = SweepPolicy(session_ttl_s=1e9, ended_session_ttl_s=1.0)
        await bench.store.sweep(START_S + 100 * DAY_S, policy)
        assert await left(bench) == {"s", "s:train:0"}

    @scenario
    async def test_a_model_stays_as_long_as_it_has_checkpoints(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        for key in ("s:train:0", "s:train:1"):
            await bench.store.put_record(model(key))
        later = START_S + 40 * DAY_S
        await bench.store.put_record(checkpoint("one"))
        await bench.store.put_record(checkpoint("two", expires_s=later))
        await bench.store.end_session("s", "success")
        await sweep(bench, 31)
        names = {checkpoint(name).key for name in ("one", "two")}
        assert await left(bench) == {"s:train:0"} | names
        await bench.store.delete_record(CheckpointRecord, checkpoint("one").key)
        assert await left(bench) == {"s:train:0", checkpoint("two").key}
        await sweep(bench, 41)
        assert await left(bench) == set()

    @scenario
    async def test_the_model_of_an_open_session_outlives_its_checkpoints(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model(status=ModelStatus.FAILED))
        await bench.store.put_record(checkpoint())
        await bench.store.delete_record(CheckpointRecord, checkpoint().key)
        assert await left(bench) == {"s", "s:train:0"}

    @scenario
    async def test_a_model_with_a_pending_unload_is_forgotten_after_it(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.submit(1)
        await bench.finish_changed(1)
        await bench.store.end_session("s", "success")
        await sweep(bench, 31)
        assert await left(bench) == {"s:train:0"}
        (taken,) = await bench.take()
        assert taken.kind == JobKind.UNLOAD_MODEL
        await bench.finish(Outcome(taken.request_id))
        assert await left(bench) == set()
        await bench.store.sweep(bench.clock.now_s + 3 * DAY_S, POLICY)
        assert await bench.store.job_key(bench.ids[1]) is None

    @scenario
    async def test_failed_and_lost_models_are_forgotten_with_their_session(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        for n, status in enumerate((ModelStatus.FAILED, ModelStatus.LOST)):
            key = f"s:train:{n}"
            created = await bench.store.submit(create(key), model(key))
            update = Update("model", key, {"status": status})
            no = Rejection("no")
            await bench.finish(Outcome(created.request_id, rejection=no, updates=(update,)))
            await bench.store.submit(job(1, key))  # refused, and known all the same
        await bench.store.end_session("s", "success")
        await sweep(bench, 31)
        assert await left(bench) == set()

    @scenario
    async def test_a_sweep_forgets_hundreds(self, bench: Bench) -> None:
        for n in range(450):
            await bench.store.put_record(session(f"s{n}", ended="success"))
        await bench.store.put_record(session("open"))
        await bench.store.update_record(
            Update("session", "open", {"last_seen_s": START_S + 30 * DAY_S})
        )
        await sweep(bench, 31)
        assert await left(bench) == {"open"}
