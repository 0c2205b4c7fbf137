"""The facts that a store still knows after its process has ended."""

import asyncio
from pathlib import Path

import pytest

from tests.engine.store.contract.bench import (
    INFO,
    START_S,
    Bench,
    Contract,
    job,
    model,
    point,
    sample,
    sampler,
    session,
)
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.core.records import SessionRecord
from tuneserve_engine.store.base import Completion, Lease, SamplerClient, ServedModel, Submitted
from tuneserve_engine.store.errors import LimitReached


class DurabilityContract(Contract):
    def test_a_reopened_store_knows_everything(self, tmp_path: Path) -> None:
        async def before() -> tuple[dict[int, str], bytes]:
            async with self.bench(tmp_path) as bench:
                await bench.lease()
                await bench.store.put_record(session())
                await bench.submit(1, 2, 4)
                await bench.finish(Outcome(bench.ids[1], b"result", "application/x-protobuf"))
                return bench.ids, await bench.store.secret()

        async def after(ids: dict[int, str], secret: bytes) -> None:
            async with self.bench(tmp_path) as bench:
                assert await bench.store.base_models() == [ServedModel(INFO, 1, START_S)]
                assert await bench.lease() == Lease(1, resumed=True)
                assert await bench.store.get_record(SessionRecord, "s") == session()
                want = Outcome(ids[1], b"result", "application/x-protobuf")
                assert await bench.ended(ids[1]) == want
                assert await bench.store.submit(job(4)) == Submitted(ids[4], duplicate=True)
                await bench.submit(3)
                assert await bench.released() == [2, 3, 4]
                assert await bench.store.secret() == secret
                assert len(secret) >= 16

        asyncio.run(after(*asyncio.run(before())))

    def test_a_reopened_store_has_its_recordings(self, tmp_path: Path) -> None:
        key = SampleKey("s:sample:0", 1)

        async def before() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.lease()
                await bench.store.put_record(sampler())
                submitted = await bench.store.submit(sample(1))
                await bench.finish(Outcome(submitted.request_id, b"result", recording=b"drawn"))

        async def after() -> None:
            async with self.bench(tmp_path) as bench:
                assert await bench.store.recordings("alice", [key]) == [b"drawn"]
                policy = SweepPolicy(recording_bytes=4)
                await bench.store.sweep(START_S, policy)  # it is the only one, and still counted
                submitted = await bench.store.submit(sample(2))
                await bench.lease()
                await bench.finish(Outcome(submitted.request_id, b"result", recording=b"more"))
                await bench.store.sweep(START_S, policy)
                assert await bench.store.recordings("alice", [key]) == [Gone.NO_ROOM]

        asyncio.run(before())
        asyncio.run(after())

    def test_a_reopened_store_can_restore_its_models(self, tmp_path: Path) -> None:
        policy = StorePolicy(tenant_jobs=3)

        async def before() -> None:
            async with self.bench(tmp_path, policy) as bench:
                await bench.lease()
                await bench.store.put_record(model())
                await bench.submit(1, 2)
                await bench.finish_changed(1, 2)
                await bench.queue.save_point(bench.epoch, point(1))
                await bench.submit(3)
                await bench.store.submit(sample(1))
                for _ in range(2):
                    await bench.queue.note_running(bench.epoch, [bench.ids[3]])
                    await bench.lease(f"process {bench.epoch}")

        async def after() -> None:
            async with self.bench(tmp_path, policy) as bench:
                assert await bench.lease("yet another") == Lease(4, resumed=False)
                assert await bench.queue.recovery_points(4, "s:train:0") == [point(1)]
                log = await bench.queue.read_log(4, "s:train:0", start=1)
                assert [each.job.seq for each in log] == [2]
                taken = await bench.take()
                assert [(each.seq, each.attempts) for each in taken] == [(3, 2), (1, 0)]
                await bench.store.submit(sample(2))
                with pytest.raises(LimitReached):
                    await bench.store.submit(sample(3))

        asyncio.run(before())
        asyncio.run(after())

    def test_a_reopened_store_knows_its_clients_and_their_cursors(self, tmp_path: Path) -> None:
        client = SamplerClient("alice", "s:sample:0", 1)

        async def told(bench: Bench) -> list[Completion]:
            return await bench.store.completions(client, after=0, limit=9, timeout_s=0)

        async def play() -> None:
            async with self.bench(tmp_path) as bench:
                await bench.lease()
                await bench.store.put_record(sampler())
                assert [await bench.store.join_sampler("s:sample:0") for _ in "12"] == [1, 2]
                jobs = [await bench.store.submit(sample(10**9 + n)) for n in range(3)]
                ids = [each.request_id for each in jobs]
                await bench.store.cancel(ids[0])
                await bench.finish(Outcome(ids[1], b"x"))
                before = await told(bench)
            async with self.bench(tmp_path) as bench:
                assert await bench.lease() == Lease(1, resumed=True)
                assert await bench.store.join_sampler("s:sample:0") == 3
                assert await told(bench) == before
                await bench.finish(Outcome(ids[0], b"in vain"), Outcome(ids[2], b"x"))
                (*_, last) = await told(bench)
                assert last == Completion(ids[2], before[-1].number + 1, size=1)

        asyncio.run(play())
