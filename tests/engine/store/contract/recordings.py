"""Recordings of samples, stored for training that refers to them."""

from dataclasses import replace

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    sample,
    sampler,
    scenario,
    session,
)
from tuneserve_engine.core.jobs import Outcome, Rejection
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.recordings import Gone, SampleKey
from tuneserve_engine.store import refusals

DAY_S = 86_400.0
COUNTED = 100 + refusals.RECORDING_BYTES  # for a body of 100 bytes
POLICY = SweepPolicy(session_ttl_s=1e9, result_ttl_s=1e9)


async def draw(bench: Bench, *seqs: int, size: int = 100, tenant: str = "alice") -> None:
    """End samples that were to be recorded. Each body repeats its number ``size`` times."""
    for seq in seqs:
        submitted = await bench.store.submit(sample(seq, tenant=tenant))
        body = bytes([seq % 256]) * size
        await bench.finish(Outcome(submitted.request_id, b"result", recording=body))


async def kept(bench: Bench, *seqs: int, tenant: str = "alice") -> list[int | Gone]:
    """The number recorded for each sample, or the reason why the recording is missing."""
    found = []
    for seq in seqs:
        (one,) = await bench.store.recordings(tenant, [SampleKey("s:sample:0", seq)])
        found.append(one[0] if isinstance(one, bytes) else one)
    return found


async def use(bench: Bench, *seqs: int) -> None:
    await bench.store.recordings("alice", [SampleKey("s:sample:0", seq) for seq in seqs])


class RecordingsContract(Contract):
    @scenario
    async def test_a_recording_can_be_read_by_its_sample_key(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        await draw(bench, 1, 2**62 + 3)
        keys = [SampleKey("s:sample:0", seq) for seq in (2**62 + 3, 7, 1)]
        found = await bench.store.recordings("alice", keys)
        assert found == [bytes([3]) * 100, Gone.UNKNOWN, bytes([1]) * 100]
        assert await bench.store.recordings("bob", keys[:1]) == [Gone.UNKNOWN]
        assert await bench.store.recordings("alice", []) == []

    @scenario
    async def test_only_successful_samples_that_ask_for_it_are_recorded(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        ids = [(await bench.store.submit(sample(seq))).request_id for seq in (1, 2, 3)]
        await bench.store.cancel(ids[0])
        await bench.finish(
            Outcome(ids[0], b"late", recording=b"late"),
            Outcome(ids[1], b"not recorded"),
            Outcome(ids[2], rejection=Rejection("no"), recording=b"failed"),
        )
        assert await kept(bench, 1, 2, 3) == [Gone.UNKNOWN] * 3

    @scenario
    async def test_a_sample_without_a_sampling_session_of_its_tenant_is_not_recorded(
        self, bench: Bench
    ) -> None:
        await draw(bench, 1)
        await bench.store.put_record(sampler())
        await draw(bench, 2, tenant="bob")
        assert await kept(bench, 1) == [Gone.UNKNOWN]
        assert await kept(bench, 2, tenant="bob") == [Gone.UNKNOWN]

    @scenario
    async def test_each_use_restarts_the_retention_of_a_recording(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        await draw(bench, 1, 2)
        bench.clock.now_s = START_S + 0.75 * DAY_S
        await use(bench, 2)
        bench.clock.now_s = START_S + 1.5 * DAY_S
        await bench.store.sweep(bench.clock.now_s, POLICY)
        assert await kept(bench, 1, 2) == [Gone.UNUSED, 2]

    @scenario
    async def test_the_reason_for_dropping_a_recording_is_known_for_as_long_again(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(sampler())
        await draw(bench, 1)
        for days, found in ((1.1, Gone.UNUSED), (1.9, Gone.UNUSED), (2.1, Gone.UNKNOWN)):
            bench.clock.now_s = START_S + days * DAY_S
            await bench.store.sweep(bench.clock.now_s, POLICY)
            assert await kept(bench, 1) == [found]

    @scenario
    async def test_above_a_tenants_limit_the_least_recently_used_are_dropped(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(sampler())
        for seq in (1, 2, 3, 4):
            bench.clock.now_s += 1
            await draw(bench, seq)
        bench.clock.now_s += 1
        await use(bench, 1)
        policy = SweepPolicy(recording_bytes=2 * COUNTED + 50)
        await bench.store.sweep(bench.clock.now_s, policy)
        assert await kept(bench, 1, 2, 3, 4) == [1, Gone.NO_ROOM, Gone.NO_ROOM, 4]
        await draw(bench, 5)  # dropped recordings no longer count
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(recording_bytes=3 * COUNTED))
        assert await kept(bench, 1, 4, 5) == [1, 4, 5]

    @scenario
    async def test_one_sweep_drops_all_recordings_above_the_limit(self, bench: Bench) -> None:
        """This holds however few recordings a step drops."""
        await bench.store.put_record(sampler())
        for seq in range(1, 13):
            bench.clock.now_s += 1
            await draw(bench, seq)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(refusals, "DROPPED_AT_ONCE", 2)
            await bench.store.sweep(bench.clock.now_s, replace(POLICY, recording_bytes=3 * COUNTED))
        assert await kept(bench, *range(1, 13)) == [Gone.NO_ROOM] * 9 + [10, 11, 12]

    @scenario
    async def test_the_only_recording_stays_at_any_size(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        await draw(bench, 1, size=1000)
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(recording_bytes=250))
        assert await kept(bench, 1) == [1]

    @scenario
    async def test_a_tenants_recordings_are_not_dropped_for_anothers(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        await draw(bench, 1, 2)
        other = sampler("t:sample:0")
        await bench.store.put_record(type(other)(**(vars(other) | {"tenant": "bob"})))
        for seq in (1, 2, 3):
            job = sample(seq, tenant="bob", scope="t:sample:0")
            request_id = (await bench.store.submit(job)).request_id
            await bench.finish(Outcome(request_id, b"r", recording=bytes(100)))
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(recording_bytes=2 * COUNTED))
        assert await kept(bench, 1, 2) == [1, 2]
        keys = [SampleKey("t:sample:0", seq) for seq in (1, 2, 3)]
        found = await bench.store.recordings("bob", keys)
        assert found.count(Gone.NO_ROOM) == 1

    @scenario
    async def test_recordings_of_an_ended_session_are_dropped_and_no_more_are_stored(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(sampler())
        await draw(bench, 1)
        running = (await bench.store.submit(sample(2))).request_id
        await bench.store.end_session("s", "success")
        await bench.finish(Outcome(running, b"result", recording=b"2"))
        await bench.store.sweep(bench.clock.now_s, POLICY)
        await bench.store.sweep(bench.clock.now_s, POLICY)
        assert await kept(bench, 1, 2) == [Gone.UNKNOWN] * 2

    @scenario
    async def test_a_forgotten_sample_that_runs_again_is_recorded_again(self, bench: Bench) -> None:
        await bench.store.put_record(sampler())
        await draw(bench, 1, size=100)
        bench.clock.now_s += 100
        policy = SweepPolicy(session_ttl_s=1e9, result_ttl_s=10)
        await bench.store.sweep(bench.clock.now_s, policy)
        await bench.store.sweep(bench.clock.now_s, policy)
        submitted = await bench.store.submit(sample(1))
        assert not submitted.duplicate
        await bench.finish(Outcome(submitted.request_id, b"again", recording=b"\7" * 50))
        await draw(bench, 2, size=100)
        await bench.store.sweep(bench.clock.now_s, SweepPolicy(recording_bytes=2 * COUNTED - 50))
        assert await kept(bench, 1, 2) == [7, 2]  # the first 100 bytes are no longer counted

    @scenario
    async def test_an_answer_has_as_many_recordings_as_one_message_carries(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(sampler())
        size = refusals.RECORDINGS_BYTES // 2 - refusals.RECORDING_BYTES
        await draw(bench, 1, 2, 3, size=size)
        keys = [SampleKey("s:sample:0", seq) for seq in (1, 2, 3)]
        assert len(await bench.store.recordings("alice", keys)) == 2
        large = 2 * refusals.RECORDINGS_BYTES
        await draw(bench, 4, size=large)
        (one,) = await bench.store.recordings("alice", [SampleKey("s:sample:0", 4), *keys])
        assert len(one) == large
