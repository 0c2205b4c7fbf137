"""Recovery points and the log suffice to restore a model's state, and hold no more than needed."""

import hashlib
from unittest import mock

import pytest

from tests.engine.store.contract.bench import (
    START_S,
    Bench,
    Contract,
    checkpoint,
    job,
    model,
    point,
    sample,
    sampler,
    scenario,
    session,
)
from tuneserve_engine.core.jobs import JobKind, LoadWeights, Outcome, Rejection, SaveWeights, encode
from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import (
    INFLIGHT,
    CheckpointKind,
    CheckpointRecord,
    ModelStatus,
    SamplerRecord,
    Update,
)
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import LogEntry, RecoveryPoint
from tuneserve_engine.store.errors import ResultDropped


async def train(bench: Bench, *seqs: int) -> None:
    """End these requests, which have changed the model."""
    if await bench.store.get_record(type(model()), "s:train:0") is None:
        await bench.store.put_record(model())
    await bench.submit(*seqs)
    await bench.finish_changed(*seqs)


async def logged(bench: Bench, start: int = 0) -> list[int]:
    entries = await bench.queue.read_log(bench.epoch, "s:train:0", start=start)
    return [each.job.seq for each in entries]


async def points(bench: Bench, model_id: str = "s:train:0") -> list[RecoveryPoint]:
    return await bench.queue.recovery_points(bench.epoch, model_id)


class PointsContract(Contract):
    # --- the log ----------------------------------------------------------------------------------

    @scenario
    async def test_the_log_has_everything_that_replay_needs(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.submit(1, kind=JobKind.FORWARD_BACKWARD, payload=b"\x00\xff")
        await bench.submit(2)
        sent = await bench.take()
        await bench.finish(
            Outcome(bench.ids[2], b"two", changed=True),
            Outcome(bench.ids[1], b"one", changed=True, halvings=3),
        )
        digests = [hashlib.blake2b(body, digest_size=16).digest() for body in (b"one", b"two")]
        assert await bench.queue.read_log(bench.epoch, "s:train:0", start=0) == [
            LogEntry(sent[0], digests[0], 3),
            LogEntry(sent[1], digests[1], 0),
        ]

    @scenario
    async def test_the_log_has_only_requests_that_changed_the_model(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3, 4, 5)
        await bench.submit(1, model_id="s:train:1")
        ids = {each.seq: each.request_id for each in await bench.take() if each.scope[-1] == "0"}
        await bench.finish(
            Outcome(ids[1], b"x", changed=True),
            Outcome(ids[2], b"x"),
            Outcome(ids[3], rejection=Rejection("NaN"), changed=True),
            Outcome(ids[5], b"x", changed=True),
        )
        assert await logged(bench) == [1, 5]
        assert await logged(bench, start=0) == [1, 5]
        assert await logged(bench, start=1) == [5]
        assert await logged(bench, start=4) == [5]
        assert await logged(bench, start=5) == []
        assert await bench.queue.read_log(bench.epoch, "unknown", start=0) == []

    @scenario
    async def test_the_log_is_read_in_pages(self, bench: Bench) -> None:
        for seq in range(1, 6):
            await bench.submit(seq, payload=bytes(400))
        await bench.finish_changed(1, 2, 3, 4, 5)
        with mock.patch.object(refusals, "TAKE_BYTES", 1000):
            assert [await logged(bench, start) for start in (0, 2, 4, 5)] == [
                [1, 2],
                [3, 4],
                [5],
                [],
            ]
        with mock.patch.object(refusals, "TAKE_BYTES", 100):
            assert await logged(bench) == [1]

    @scenario
    async def test_a_take_returns_as_much_as_one_message_holds(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3, payload=bytes(400))
        with mock.patch.object(refusals, "TAKE_BYTES", 1000):
            assert [each.seq for each in await bench.take()] == [1, 2]
        with mock.patch.object(refusals, "TAKE_BYTES", 100):
            assert [each.seq for each in await bench.take()] == [1]

    @scenario
    async def test_the_log_outlives_the_results(self, bench: Bench) -> None:
        await train(bench, 1)
        before = await bench.queue.read_log(bench.epoch, "s:train:0", start=0)
        await bench.store.sweep(START_S + 86_401, SweepPolicy())
        with pytest.raises(ResultDropped):
            await bench.ended(bench.ids[1])
        assert await bench.queue.read_log(bench.epoch, "s:train:0", start=0) == before != []

    @scenario
    async def test_the_next_worker_reads_points_and_log(self, bench: Bench) -> None:
        await train(bench, 1, 2)
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.lease("another")
        assert await points(bench) == [point(1)]
        assert await logged(bench, start=1) == [2]

    # --- points -----------------------------------------------------------------------------------

    @scenario
    async def test_the_last_two_points_are_kept(self, bench: Bench) -> None:
        await train(bench, 1, 2, 3)
        assert await points(bench) == []
        for position in (1, 2, 3):
            await bench.queue.save_point(bench.epoch, point(position))
        assert await points(bench) == [point(3), point(2)]
        assert await points(bench, "s:train:1") == []

    @scenario
    async def test_two_points_may_have_the_same_position(self, bench: Bench) -> None:
        await train(bench, 1)
        again = point(1, file_id="again")
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.queue.save_point(bench.epoch, again)
        assert await points(bench) == [again, point(1)]

    @scenario
    async def test_a_point_that_is_saved_again_counts_once(self, bench: Bench) -> None:
        """The answer to the first save was lost. The second must not replace the older point."""
        await train(bench, 1, 2, 3)
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.queue.save_point(bench.epoch, point(3))
        await bench.queue.save_point(bench.epoch, point(3))
        assert await points(bench) == [point(3), point(1)]
        assert await logged(bench) == [2, 3]

    @scenario
    async def test_the_log_starts_at_the_older_point(self, bench: Bench) -> None:
        await train(bench, 1, 2, 3, 4)
        await bench.queue.save_point(bench.epoch, point(2))
        assert await logged(bench) == [1, 2, 3, 4]  # the whole log, in case the file cannot be read
        await bench.queue.save_point(bench.epoch, point(3))
        assert await logged(bench) == [3, 4]
        await bench.queue.save_point(bench.epoch, point(4))
        assert await logged(bench) == [4]
        outcome = await bench.ended(bench.ids[1])
        assert outcome is not None and outcome.body == b"result 1"

    @scenario
    async def test_a_point_covers_only_ended_requests(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.submit(1, 2, 4)
        await bench.finish_changed(2)
        for position in (1, 2):
            with pytest.raises(ValueError, match="position 0 has not ended"):
                await bench.queue.save_point(bench.epoch, point(position))
        await bench.queue.save_point(bench.epoch, point(0))
        await bench.finish_changed(1)
        with pytest.raises(ValueError, match="position 2 has not ended"):
            await bench.queue.save_point(bench.epoch, point(3))  # its request has not arrived yet
        assert await points(bench) == [point(0)]

    @scenario
    async def test_used_positions_have_ended(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        await bench.submit(1)
        await bench.submit(2, rejection=Rejection("bad"))
        await bench.finish_changed(1)
        await bench.queue.save_point(bench.epoch, point(2))
        await bench.submit(4)
        await bench.store.sweep(START_S + 601, SweepPolicy(gap_ttl_s=600))
        await bench.queue.save_point(bench.epoch, point(4))
        assert await points(bench) == [point(4), point(2)]

    @scenario
    async def test_points_are_saved_in_order(self, bench: Bench) -> None:
        await train(bench, 1, 2)
        await bench.queue.save_point(bench.epoch, point(2))
        with pytest.raises(ValueError, match="one at 2 already"):
            await bench.queue.save_point(bench.epoch, point(1))
        assert await points(bench) == [point(2)]

    @scenario
    async def test_a_point_of_a_model_placed_elsewhere_is_ignored(self, bench: Bench) -> None:
        await train(bench, 1)
        await bench.submit(1, model_id="s:train:1")
        other = await bench.join("second")
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.queue.unassign(bench.epoch, "s:train:0")
        await bench.submit(2)
        assert [each.seq for each in await bench.take(other)] == [2]
        await bench.queue.save_point(bench.epoch, point(1, file_id="late"))
        assert await points(bench) == [point(1)]

    @scenario
    async def test_a_point_of_a_missing_model_is_ignored(self, bench: Bench) -> None:
        await bench.queue.save_point(bench.epoch, point(0, "unknown"))
        assert await points(bench, "unknown") == []
        await train(bench, 1)
        await bench.store.put_record(session())
        await bench.store.end_session("s", "success")
        (unload,) = await bench.take()
        await bench.queue.save_point(bench.epoch, point(1))  # the model still exists
        assert await points(bench) == [point(1)]
        await bench.finish(Outcome(unload.request_id))
        await bench.queue.save_point(bench.epoch, point(1))
        assert await points(bench) == []

    @scenario
    async def test_an_unloaded_model_leaves_nothing(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await train(bench, 1, 2)
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.store.end_session("s", "success")
        assert await logged(bench) == [1, 2]  # its worker may die before it unloads
        (unload,) = await bench.take()
        await bench.finish(Outcome(unload.request_id))
        assert await logged(bench) == []
        assert await points(bench) == []
        assert await bench.store.files_in_use() == set()

    @scenario
    async def test_the_end_of_a_parked_model_leaves_nothing(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await train(bench, 1, 2)
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.park()
        await bench.store.end_session("s", "success")
        assert await logged(bench) == []
        assert await points(bench) == []
        assert await bench.released() == []

    @scenario
    async def test_a_failed_creation_leaves_nothing(self, bench: Bench) -> None:
        await train(bench, 1)
        await bench.submit(2)
        failed = Update("model", "s:train:0", {"status": ModelStatus.FAILED})
        await bench.finish(Outcome(bench.ids[2], rejection=Rejection("no"), updates=(failed,)))
        assert await logged(bench) == []

    @scenario
    async def test_the_end_of_a_lost_model_leaves_nothing(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await train(bench, 1)
        await bench.queue.save_point(bench.epoch, point(1))
        await bench.submit(2)
        lost = Update("model", "s:train:0", {"status": ModelStatus.LOST})
        await bench.finish(Outcome(bench.ids[2], rejection=Rejection("no"), updates=(lost,)))
        assert await bench.store.files_in_use() == {"point-1"}  # an operator may inspect it
        await bench.store.end_session("s", "success")
        assert await bench.store.files_in_use() == set()
        assert await bench.status() is ModelStatus.LOST

    # --- files ------------------------------------------------------------------------------------

    @scenario
    async def test_files_of_records_and_unfinished_jobs_are_in_use(self, bench: Bench) -> None:
        await bench.store.put_record(checkpoint(file_id="of a checkpoint"))
        await bench.store.put_record(sampler(file_id="of a sampler"))
        await bench.store.put_record(sampler("s:sample:1"))
        await bench.store.submit(sample(1, "of a sample"))
        await bench.store.submit(sample(2))
        save = encode(SaveWeights(CheckpointKind.TRAINING, "of a save"))
        load = encode(LoadWeights("of a load", "tinker://x", True))
        await bench.submit(1, kind=JobKind.SAVE_WEIGHTS, payload=save)
        await bench.submit(2, kind=JobKind.LOAD_WEIGHTS, payload=load)
        await bench.submit(4, kind=JobKind.FORWARD_BACKWARD, payload=b"\xc1 not MessagePack")
        in_use = {"of a checkpoint", "of a sampler", "of a sample", "of a save", "of a load"}
        assert await bench.store.files_in_use() == in_use
        await bench.finish(Outcome(bench.ids[2]))
        await bench.store.delete_record(CheckpointRecord, checkpoint().key)
        in_use -= {"of a load", "of a checkpoint"}
        assert await bench.store.files_in_use() == in_use

    @scenario
    async def test_a_file_of_two_checkpoints_is_in_use_until_both_are_gone(
        self, bench: Bench
    ) -> None:
        for name in ("one", "two"):
            await bench.store.put_record(checkpoint(name, file_id="shared"))
        await bench.store.delete_record(CheckpointRecord, checkpoint("one").key)
        assert await bench.store.released_files() == {"shared"}
        assert await bench.store.files_in_use() == {"shared"}
        await bench.store.delete_record(CheckpointRecord, checkpoint("two").key)
        assert await bench.store.files_in_use() == set()

    @scenario
    async def test_a_waiting_sample_keeps_the_file_of_a_replaced_inflight_target(
        self, bench: Bench
    ) -> None:
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        key = f"s:train:0{INFLIGHT}"
        for seq, file_id in enumerate(("old", "new"), 1):
            target = sampler(key, file_id=file_id, size_bytes=8, model_id="s:train:0")
            client = sampler(f"s:sample:{seq}", target=key)
            save = encode(SaveWeights(CheckpointKind.SAMPLER, file_id, sampler=target))
            request = job(seq, kind=JobKind.SAVE_WEIGHTS, payload=save)
            submitted = await bench.store.submit(request, client)
            assert await bench.store.get_record(SamplerRecord, client.key) == client
            await bench.take()
            await bench.finish(Outcome(submitted.request_id, sampler=target))
            if file_id == "old":
                await bench.store.submit(sample(1, "old", scope=client.key))
        assert await bench.store.get_record(SamplerRecord, key) == target
        assert await bench.store.released_files() == {"old"}
        assert await bench.store.files_in_use() == {"old", "new"}
        assert (await bench.store.checkpoint_usage("alice")).count == 1
        await bench.store.end_session("s", "success")
        assert await bench.store.released_files() == {"old", "new"}

    @scenario
    async def test_files_of_stored_points_are_in_use(self, bench: Bench) -> None:
        await train(bench, 1, 2, 3)
        for position, want in (
            (1, {"point-1"}),
            (2, {"point-1", "point-2"}),
            (3, {"point-2", "point-3"}),
        ):
            await bench.queue.save_point(bench.epoch, point(position))
            assert await bench.store.files_in_use() == want

    @scenario
    async def test_a_loaded_file_is_in_use_until_no_replay_needs_it(self, bench: Bench) -> None:
        await bench.store.put_record(model())
        load = encode(LoadWeights("loaded", "tinker://x", True))
        await bench.submit(1, kind=JobKind.LOAD_WEIGHTS, payload=load)
        await bench.submit(2, kind=JobKind.FORWARD_BACKWARD, payload=b"\xc1 not MessagePack")
        await bench.finish_changed(1, 2)
        assert await bench.store.files_in_use() == {"loaded"}
        await bench.queue.save_point(bench.epoch, point(1))
        assert await bench.store.files_in_use() == {"loaded", "point-1"}
        await bench.queue.save_point(bench.epoch, point(2))
        assert await bench.store.files_in_use() == {"point-1", "point-2"}

    @scenario
    async def test_files_of_changed_or_deleted_records_are_released(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        for file_id in ("first", "first", "second"):  # saved again under the same name
            await bench.store.put_record(checkpoint(file_id=file_id))
        assert await bench.store.released_files() == {"first"}
        await bench.store.put_record(sampler(file_id="of a sampler"))
        await bench.store.put_record(sampler("s:sample:1"))
        await bench.store.delete_record(CheckpointRecord, checkpoint().key)
        await bench.store.end_session("s", "success")
        released = {"first", "second", "of a sampler"}
        assert await bench.store.released_files() == released
        await bench.store.put_record(checkpoint(file_id="expired"))
        await bench.store.update_record(
            Update("checkpoint", checkpoint().key, {"expires_s": START_S - 1})
        )
        await bench.store.sweep(START_S, SweepPolicy())
        assert await bench.store.released_files() == released | {"expired"}
        await bench.store.forget_released(["first", "of a sampler", "unknown"])
        assert await bench.store.released_files() == {"second", "expired"}

    @scenario
    async def test_files_of_dropped_points_are_released(self, bench: Bench) -> None:
        await bench.store.put_record(session())
        await train(bench, 1, 2, 3)
        for position, want in ((1, set()), (2, set()), (3, {"point-1"}), (3, {"point-1"})):
            await bench.queue.save_point(bench.epoch, point(position))
            assert await bench.store.released_files() == want
        await bench.park()
        await bench.store.end_session("s", "success")
        assert await bench.store.released_files() == {"point-1", "point-2", "point-3"}

    @scenario
    async def test_the_file_of_a_failed_save_is_released(self, bench: Bench) -> None:
        """The file may exist: otherwise tenants could leave any number of files without a name."""
        await bench.store.put_record(session())
        await bench.store.put_record(model())
        await bench.store.put_record(checkpoint(file_id="taken"))
        for seq in (1, 2, 3, 4):
            save = encode(SaveWeights(CheckpointKind.TRAINING, f"of save {seq}"))
            await bench.submit(seq, kind=JobKind.SAVE_WEIGHTS, payload=save)
        new = [checkpoint(file_id="of save 1"), checkpoint("two", file_id="of save 2")]
        await bench.finish(Outcome(bench.ids[1], checkpoint=new[0]))  # its name is taken
        await bench.finish(Outcome(bench.ids[2], checkpoint=new[1]))
        await bench.finish(Outcome(bench.ids[3], rejection=Rejection("no room")))
        assert await bench.store.released_files() == {"of save 1", "of save 3"}
        await bench.store.end_session("s", "success")
        sampler_of_4 = sampler(file_id="of save 4")
        await bench.finish(Outcome(bench.ids[4], sampler=sampler_of_4))  # for a session that ended
        released = {"of save 1", "of save 3", "of save 4"}
        assert await bench.store.released_files() == released
        assert await bench.store.files_in_use() == {"taken", "of save 2"}
