"""A tenant's stored and pending checkpoints, unnamed saves and samplers."""

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    checkpoint,
    job,
    model,
    sampler,
    scenario,
    session,
    staged,
    tenant,
)
from tests.engine.store.contract.retention import refused
from tuneserve_engine.core.jobs import Job, JobKind, Outcome, Rejection, Saves
from tuneserve_engine.core.policies import StorePolicy
from tuneserve_engine.core.records import CheckpointRecord, ModelStatus, SamplerRecord, Update
from tuneserve_engine.store.base import CheckpointUsage


def save(seq: int, key: str = "", size: int = 10, **fields: object) -> Job:
    return job(seq, kind=JobKind.SAVE_WEIGHTS, saves=Saves(key, size), **fields)


class KeepingContract(Contract):
    @scenario
    async def test_a_tenants_checkpoints_and_saves_are_counted(self, bench: Bench) -> None:
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(0, 0)
        await bench.store.put_record(checkpoint("one", size_bytes=1))
        await bench.store.put_record(checkpoint("dead", size_bytes=2, expires_s=START_S))
        await bench.store.put_record(checkpoint("live", size_bytes=4, expires_s=START_S + 1))
        await bench.store.put_record(sampler("s:sample:0", size_bytes=8, file_id="f", model_id="m"))
        await bench.store.put_record(sampler("s:sample:1", file_id="f", model_path="tinker://x"))
        await bench.store.put_record(sampler("s:sample:2"))
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(3, 13)
        assert await bench.store.checkpoint_usage(
            "alice", checkpoint("one").key
        ) == CheckpointUsage(2, 12)
        assert await bench.store.checkpoint_usage("alice", "s:sample:0") == CheckpointUsage(2, 5)
        assert await bench.store.checkpoint_usage("bob") == CheckpointUsage(0, 0)
        assert [each.key for each in await bench.store.unnamed_saves("alice")] == ["s:sample:0"]
        assert await bench.store.unnamed_saves("bob") == []
        await bench.store.update_record(Update("sampler", "s:sample:0", {"size_bytes": 9}))
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(3, 14)
        await bench.store.delete_record(SamplerRecord, "s:sample:0")
        await bench.store.delete_record(CheckpointRecord, checkpoint("one").key)
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(1, 4)
        assert await bench.store.unnamed_saves("alice") == []

    @staged(StorePolicy(tenant_checkpoints=3, tenant_checkpoint_bytes=1000))
    async def test_pending_saves_count(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.store.put_record(checkpoint("one", size_bytes=1))
        ids = [(await bench.store.submit(save(seq))).request_id for seq in (1, 2, 3)]
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(3, 21, 2)
        told = (await bench.rejection(ids[2])).message
        assert "you have 1 checkpoints, and 2 more are being saved" in told
        assert "keeps up to 3 of yours; delete some" in told
        assert (await bench.store.submit(save(1))).duplicate
        kept = checkpoint("two", size_bytes=7)
        await bench.finish(
            Outcome(ids[0], checkpoint=kept), Outcome(ids[1], rejection=Rejection("no"))
        )
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(2, 8)
        ids.append((await bench.store.submit(save(4))).request_id)
        assert await bench.ended(ids[3]) is None
        ids.append((await bench.store.submit(save(5, key=kept.key))).request_id)
        assert await bench.ended(ids[4]) is None  # it replaces another checkpoint
        failed = Update("model", "s:train:0", {"status": ModelStatus.FAILED})
        await bench.finish(Outcome(ids[3], rejection=Rejection("no"), updates=(failed,)))
        assert await bench.store.checkpoint_usage("alice") == CheckpointUsage(2, 8)

    @staged(StorePolicy(tenant_checkpoints=9, tenant_checkpoint_bytes=20))
    async def test_pending_bytes_count(self, bench: Bench) -> None:
        ids = [(await bench.store.submit(save(seq, size=11))).request_id for seq in (1, 2, 3)]
        assert await bench.ended(ids[1]) is None
        told = (await bench.rejection(ids[2])).message
        assert "have 22 bytes, and 2 more are being saved; the limit is 20 bytes" in told

    @staged(StorePolicy(tenant_checkpoints=1, tenant_checkpoint_bytes=20))
    async def test_a_tenants_own_limits_of_checkpoints_take_precedence(self, bench: Bench) -> None:
        await bench.store.put_record(tenant(max_checkpoints=2, max_checkpoint_bytes=0))
        first = (await bench.store.submit(save(1))).request_id
        assert "the limit is 0 bytes" in (await bench.rejection(first)).message
        await bench.store.put_record(tenant(max_checkpoints=2))
        ids = [(await bench.store.submit(save(seq, size=1))).request_id for seq in (2, 3, 4)]
        assert await bench.ended(ids[1]) is None
        assert "up to 2 of yours" in (await bench.rejection(ids[2])).message

    @staged(StorePolicy(session_samplers=2, tenant_samplers=3))
    async def test_the_samplers_of_a_session_and_of_a_tenant_are_limited(
        self, bench: Bench
    ) -> None:
        for key in "st":
            await bench.store.put_record(session(key))
        for n in (0, 1):
            assert await refused(bench, sampler(f"s:sample:{n}")) is None
        assert await refused(bench, sampler("s:sample:1")) is None  # exists already
        told = await refused(bench, sampler("s:sample:2"))
        assert told is not None
        assert "session s has 2 sampling sessions, and the limit is 2" in told[0]
        assert "continue in a new session" in told[0]
        assert await refused(bench, sampler("t:sample:0")) is None
        told = await refused(bench, sampler("t:sample:1"))
        assert told is not None
        assert "your key has 3 sampling sessions, and the limit is 3" in told[0]
        assert "end sessions that you no longer need" in told[0]
        await bench.store.end_session("s", "success")
        assert await refused(bench, sampler("t:sample:1")) is None
