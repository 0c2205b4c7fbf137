"""What every store guarantees: one suite for all of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tuneserve_engine.adapters import AdapterConfig, BaseModelInfo
from tuneserve_engine.jobs import (
    CreateModel,
    Job,
    JobKind,
    LoadWeights,
    Outcome,
    Rejection,
    Sample,
    SaveWeights,
    encode,
)
from tuneserve_engine.queue.base import (
    Fenced,
    KeyReused,
    Lease,
    Queue,
    ResultExpired,
    Store,
    Submitted,
    SweepPolicy,
)
from tuneserve_engine.queue.remote import RemoteQueue, serve
from tuneserve_engine.queue.sqlite import SqliteStore
from tuneserve_engine.records import (
    Checkpoint,
    CheckpointKind,
    Model,
    ModelStatus,
    Sampler,
    Session,
    Update,
)

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")
CONFIG = AdapterConfig(rank=4, alpha=32.0, seed=1)
START_S = 1_000_000.0


@dataclass
class Clock:
    now_s: float = START_S

    def __call__(self) -> float:
        return self.now_s


def session(key: str = "s", **fields: Any) -> Session:
    return Session(key, "alice", created_s=START_S, last_seen_s=START_S, **fields)


def model(key: str = "s:train:0", **fields: Any) -> Model:
    defaults = {"status": ModelStatus.READY, "created_s": START_S, "last_request_s": START_S}
    return Model(key, "alice", key.split(":")[0], "tiny", CONFIG, **(defaults | fields))


def sampler(key: str = "s:sample:0", **fields: Any) -> Sampler:
    return Sampler(key, "alice", "s", "tiny", START_S, **fields)


def checkpoint(name: str = "one", **fields: Any) -> Checkpoint:
    key = f"tinker://s:train:0/weights/{name}"
    defaults: dict[str, Any] = {"file_id": f"file-{name}", "created_s": START_S}
    kind = CheckpointKind.TRAINING
    return Checkpoint(
        key,
        "alice",
        "s:train:0",
        kind,
        name,
        base_model="tiny",
        config=CONFIG,
        **(defaults | fields),
    )


def job(seq: int, model_id: str = "s:train:0", **fields: Any) -> Job:
    """The ``seq``-th request of a model, counted from 1 as the SDK does."""
    defaults = {"kind": JobKind.OPTIM_STEP, "payload": f"payload {seq}".encode()}
    values = defaults | fields
    return Job("alice", scope=model_id, seq=seq, model_id=model_id, position=seq - 1, **values)


def create(key: str = "s:train:0") -> Job:
    payload = encode(CreateModel("tiny", CONFIG))
    return Job("alice", JobKind.CREATE_MODEL, "s", int(key[-1]), payload, model_id=key)


def sample(seq: int, file_id: str | None = None) -> Job:
    payload = encode(Sample(prompt=[1, 2], seed=3, file_id=file_id))
    return Job("alice", JobKind.SAMPLE, "s:sample:0", seq, payload)


@dataclass
class Bench:
    """An open store, the worker's way to it, and the time that both go by."""

    store: Store
    queue: Queue
    clock: Clock
    epoch: int = 0
    ids: dict[int, str] = field(default_factory=dict)
    marks: Iterator[int] = field(default_factory=count)

    async def lease(self, owner: str = "worker") -> Lease:
        lease = await self.queue.lease(owner, INFO)
        self.epoch = lease.epoch
        return lease

    async def submit(self, *seqs: int, model_id: str = "s:train:0", **fields: Any) -> None:
        jobs = [job(seq, model_id, **fields) for seq in seqs]
        submitted = await asyncio.gather(*(self.store.submit(each) for each in jobs))
        self.ids |= {seq: each.request_id for seq, each in zip(seqs, submitted, strict=True)}

    async def released(self) -> list[int]:
        """The seq numbers of what a worker would take now, in order. A job that waits for nobody
        marks the end, so that no time needs to pass to see that there is nothing."""
        mark = Job("mark", JobKind.UNLOAD_MODEL, "mark", next(self.marks))
        marked = (await self.store.submit(mark)).request_id
        taken = await self.queue.take(self.epoch, after=0, max_jobs=10_000)
        assert taken.pop().request_id == marked
        await self.finish(Outcome(marked))
        return [each.seq for each in taken]

    async def finish(self, *outcomes: Outcome) -> None:
        await self.queue.finish(self.epoch, outcomes)

    async def ended(self, request_id: str) -> Outcome | None:
        return await self.store.wait(request_id, 0)

    async def rejection(self, request_id: str) -> Rejection:
        outcome = await self.ended(request_id)
        assert outcome is not None and outcome.rejection is not None
        assert outcome.body == b""
        return outcome.rejection


def scenario(test: Callable[[Any, Bench], Awaitable[None]]) -> Callable[[Any, Path], None]:
    """A test that plays on a fresh, leased store in an event loop of its own."""

    def play(self: "StoreContract", tmp_path: Path) -> None:
        async def main() -> None:
            async with self.bench(tmp_path) as bench, asyncio.timeout(20):
                await bench.lease()
                await test(self, bench)

        asyncio.run(main())

    play.__name__ = test.__name__
    return play


class StoreContract:
    """A subclass says how to open the store under ``folder``."""

    def open(self, folder: Path, clock: Clock) -> contextlib.AbstractAsyncContextManager[Any]:
        raise NotImplementedError

    @asynccontextmanager
    async def bench(self, folder: Path, clock: Clock | None = None) -> AsyncIterator[Bench]:
        clock = clock or Clock()
        async with self.open(folder, clock) as (store, queue):
            yield Bench(store, queue, clock)

    # --- order ------------------------------------------------------------------------------

    @scenario
    async def test_chunk_one_may_come_last(self, bench: Bench) -> None:
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
    async def test_a_job_without_position_waits_for_nobody(self, bench: Bench) -> None:
        await bench.submit(2)
        await bench.store.submit(sample(7))
        assert await bench.released() == [7]

    @scenario
    async def test_release_numbers_rise_in_the_order_of_execution(self, bench: Bench) -> None:
        await bench.submit(3, 1, 2)
        await bench.store.submit(sample(9))
        taken = await bench.queue.take(bench.epoch, after=0, max_jobs=10)
        assert [each.seq for each in taken] == [1, 2, 3, 9]
        releases = [each.release for each in taken]
        assert releases == sorted(set(releases)) and releases[0] > 0

    @scenario
    async def test_a_job_comes_out_as_it_went_in(self, bench: Bench) -> None:
        sent = replace(sample(10**18), payload=bytes(range(256)) * 1000, tenant="bob")
        request_id = (await bench.store.submit(sent)).request_id
        (taken,) = await bench.queue.take(bench.epoch, after=0, max_jobs=10)
        assert replace(taken, release=0) == replace(sent, request_id=request_id)
        assert await bench.store.job_tenant(request_id) == "bob"
        assert await bench.store.job_tenant("req_unknown") is None

    # --- duplicates ---------------------------------------------------------------------------

    @scenario
    async def test_a_resend_is_the_same_request_and_has_no_second_effect(
        self, bench: Bench
    ) -> None:
        first = await bench.store.submit(create(), model())
        await bench.store.update(Update("model", "s:train:0", {"base_model": "changed"}))
        again = await bench.store.submit(replace(create(), payload=b"other"), model())
        assert again == Submitted(first.request_id, duplicate=True)
        assert not first.duplicate
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.base_model == "changed"
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
        with pytest.raises(KeyReused, match=r"seq_id 1 of s:train:0 is already a optim_step"):
            await bench.submit(1, kind=JobKind.FORWARD_BACKWARD)
        assert await bench.released() == [1]

    @scenario
    async def test_tenants_do_not_share_keys(self, bench: Bench) -> None:
        first = await bench.store.submit(sample(1))
        second = await bench.store.submit(replace(sample(1), tenant="bob"))
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
    async def test_a_rejection_ends_at_once_and_spends_its_position(self, bench: Bench) -> None:
        await bench.submit(2)
        await bench.submit(1, rejection=Rejection("datum 3 has 9 tokens"))
        assert await bench.rejection(bench.ids[1]) == Rejection("datum 3 has 9 tokens", "user")
        assert await bench.released() == [2]

    @scenario
    async def test_a_rejection_ahead_of_its_turn_leaves_no_gap(self, bench: Bench) -> None:
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
            await bench.store.put(model(status=status))
            bench.ids.clear()
            await bench.submit(len(words))
            (request_id,) = bench.ids.values()
            rejection = await bench.rejection(request_id)
            assert (rejection.category, words in rejection.message) == (category, True)
        assert await bench.released() == []

    @scenario
    async def test_a_model_whose_creation_fails_ends_what_waits_for_it(self, bench: Bench) -> None:
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
    async def test_no_model_enters_an_ended_session(self, bench: Bench) -> None:
        await bench.store.put(session(ended="success"))
        submitted = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        assert "session s has ended" in (await bench.rejection(submitted.request_id)).message
        assert await bench.store.get(Model, "s:train:0") is None

    @scenario
    async def test_a_request_marks_its_model_as_in_use(self, bench: Bench) -> None:
        await bench.store.put(model())
        bench.clock.now_s += 50
        await bench.submit(1)
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.last_request_s == START_S + 50

    # --- take and wait ------------------------------------------------------------------------

    @scenario
    async def test_a_parked_take_returns_when_a_job_is_released(self, bench: Bench) -> None:
        taking = asyncio.create_task(bench.queue.take(bench.epoch, after=0, max_jobs=10))
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
        first = await bench.queue.take(bench.epoch, after=0, max_jobs=2)
        assert first == await bench.queue.take(bench.epoch, after=0, max_jobs=2)
        rest = await bench.queue.take(bench.epoch, after=first[-1].release, max_jobs=2)
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
                await asyncio.wait_for(bench.queue.take(bench.epoch, after=0, max_jobs=1), 0.02)
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
        await bench.submit(*range(1, 1001))
        waits = [asyncio.create_task(bench.store.wait(each, 15)) for each in bench.ids.values()]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in waits)
        await bench.finish(*(Outcome(each, each.encode()) for each in bench.ids.values()))
        outcomes = await asyncio.gather(*waits)
        assert [each.body.decode() for each in outcomes if each] == list(bench.ids.values())

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
        assert await bench.store.get(Checkpoint, checkpoint().key) is None

    @scenario
    async def test_a_fenced_worker_writes_nothing(self, bench: Bench) -> None:
        await bench.store.put(session())
        await bench.store.submit(sample(1))
        (taken,) = await bench.queue.take(bench.epoch, after=0, max_jobs=1)
        old = bench.epoch
        await bench.lease("another worker")
        update = Update("session", "s", {"sdk_version": "changed"})
        outcome = Outcome(
            taken.request_id, b"x", checkpoint=checkpoint(), sampler=sampler(), updates=(update,)
        )
        with pytest.raises(Fenced, match=f"epoch {old} is over"):
            await bench.queue.finish(old, [outcome])
        assert await bench.ended(taken.request_id) is None
        assert await bench.store.get(Checkpoint, checkpoint().key) is None
        assert await bench.store.get(Sampler, sampler().key) is None
        assert await bench.store.get(Session, "s") == session()

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
        assert await bench.store.get(Checkpoint, checkpoint().key) == checkpoint()
        assert await bench.store.get(Sampler, sampler().key) == sampler(file_id="f")
        stored = await bench.store.get(Model, "s:train:0")
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
            f"checkpoint {old.key} exists; pass overwrite=true or choose another name", "user"
        )
        assert await bench.store.get(Checkpoint, old.key) == old
        assert await bench.store.get(Sampler, sampler().key) is None
        await bench.finish(Outcome(bench.ids[3], b"3", checkpoint=new, overwrite=True))
        assert await bench.store.get(Checkpoint, old.key) == new

    @scenario
    async def test_the_name_of_an_expired_checkpoint_is_free(self, bench: Bench) -> None:
        await bench.store.put(checkpoint(file_id="old", expires_s=START_S))
        await bench.submit(1)
        new = checkpoint(file_id="new")
        await bench.finish(Outcome(bench.ids[1], b"1", checkpoint=new))
        assert (await bench.ended(bench.ids[1])).rejection is None  # type: ignore[union-attr]
        assert await bench.store.get(Checkpoint, new.key) == new

    # --- leases -------------------------------------------------------------------------------

    @scenario
    async def test_the_same_owner_resumes_and_another_fences_it(self, bench: Bench) -> None:
        first = bench.epoch
        assert await bench.lease("worker") == Lease(first, resumed=True)
        parked = asyncio.create_task(bench.queue.take(first, after=0, max_jobs=1))
        await asyncio.sleep(0.02)
        assert await bench.lease("another") == Lease(first + 1, resumed=False)
        with pytest.raises(Fenced):
            await parked
        with pytest.raises(Fenced):
            await bench.queue.take(first, after=0, max_jobs=1)

    @scenario
    async def test_a_resumed_lease_keeps_models_and_jobs(self, bench: Bench) -> None:
        await bench.store.put(model())
        await bench.submit(1, 3)
        await bench.lease("worker")
        assert await bench.released() == [1]
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.READY

    @scenario
    async def test_models_of_an_earlier_worker_are_lost_with_their_jobs(self, bench: Bench) -> None:
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.finish(Outcome(created.request_id, b"{}"))
        await bench.submit(1, 3)
        await bench.store.submit(sample(9))
        waiting = asyncio.create_task(bench.store.wait(bench.ids[1], 10))
        await bench.lease("another")
        for request_id in (bench.ids[1], bench.ids[3]):
            rejection = await bench.rejection(request_id)
            assert rejection.category == "server"
            assert "create a new model from your last checkpoint" in rejection.message
        assert await waiting == await bench.ended(bench.ids[1])
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.LOST
        assert await bench.released() == [9]

    @scenario
    async def test_models_still_to_be_created_move_to_the_next_worker(self, bench: Bench) -> None:
        load = LoadWeights("f", "tinker://x", True, config=CONFIG)
        for key, kind, payload in (
            ("s:train:0", JobKind.CREATE_MODEL, encode(CreateModel("tiny", CONFIG))),
            ("s:train:1", JobKind.LOAD_WEIGHTS, encode(load)),
        ):
            first = Job("alice", kind, "s", int(key[-1]), payload, model_id=key)
            await bench.store.submit(first, model(key, status=ModelStatus.CREATING))
            await bench.submit(2, 1, model_id=key)
        assert await bench.released() == [0, 1, 2, 1, 1, 2]
        await bench.lease("another")
        assert await bench.released() == [0, 1, 2, 1, 1, 2]
        for key in ("s:train:0", "s:train:1"):
            stored = await bench.store.get(Model, key)
            assert stored is not None and stored.status is ModelStatus.CREATING

    @scenario
    async def test_a_load_into_a_model_does_not_save_it_from_being_lost(self, bench: Bench) -> None:
        await bench.store.put(model())
        load = encode(LoadWeights("f", "tinker://x", True))
        await bench.submit(1, kind=JobKind.LOAD_WEIGHTS, payload=load)
        await bench.lease("another")
        assert (await bench.rejection(bench.ids[1])).category == "server"

    @scenario
    async def test_a_job_that_three_workers_did_not_finish_is_not_tried_again(
        self, bench: Bench
    ) -> None:
        """It may be what kills them; it must not kill the next."""
        fatal = (await bench.store.submit(sample(1))).request_id
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        for worker in ("second", "third"):
            bench.clock.now_s += 10
            await bench.lease(worker)
        later = (await bench.store.submit(sample(2))).request_id
        assert await bench.released() == [1, 0, 2]
        waiting = asyncio.create_task(bench.store.wait(fatal, 10))
        bench.clock.now_s += 10
        await bench.lease("fourth")
        assert (await bench.rejection(created.request_id)).category == "server"
        assert "3 workers" in (await bench.rejection(fatal)).message
        assert await waiting == await bench.ended(fatal)
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.LOST
        assert await bench.ended(later) is None
        assert await bench.released() == [2]

    @scenario
    async def test_a_worker_that_only_reconnects_costs_no_job_an_attempt(
        self, bench: Bench
    ) -> None:
        await bench.store.submit(sample(1))
        for _ in range(5):
            bench.clock.now_s += 10
            await bench.lease("worker")
        await bench.lease("another")
        assert await bench.released() == [1]

    @scenario
    async def test_a_worker_with_another_base_model_carries_nothing_over(
        self, bench: Bench
    ) -> None:
        sampled = (await bench.store.submit(sample(1))).request_id
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        lease = await bench.queue.lease("another", replace(INFO, name="other"))
        bench.epoch = lease.epoch
        for request_id in (sampled, created.request_id):
            rejection = await bench.rejection(request_id)
            assert rejection.category == "server"
            assert "tiny" in rejection.message and "other" in rejection.message
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.LOST
        assert await bench.released() == []

    @scenario
    async def test_the_base_model_is_what_the_last_lease_said(self, bench: Bench) -> None:
        assert await bench.store.base_model() == INFO
        other = replace(INFO, name="other", vocab_size=7)
        await bench.queue.lease("another", other)
        assert await bench.store.base_model() == other

    # --- records ------------------------------------------------------------------------------

    @scenario
    async def test_records_come_back_as_they_went_in(self, bench: Bench) -> None:
        metadata = {"name": "läuft ✓", "": "\x00"}
        for record in (
            session(tags=["a"], user_metadata=metadata),
            model(user_metadata=metadata),
            sampler(model_path="tinker://x"),
            checkpoint(expires_s=1.5, user_metadata=metadata),
        ):
            await bench.store.put(record)
            assert await bench.store.get(type(record), record.key) == record
            await bench.store.delete(type(record), record.key)
            assert await bench.store.get(type(record), record.key) is None

    @scenario
    async def test_put_new_keeps_what_is_there(self, bench: Bench) -> None:
        assert await bench.store.put_new(session(sdk_version="1")) == session(sdk_version="1")
        assert await bench.store.put_new(session(sdk_version="2")) == session(sdk_version="1")

    @scenario
    async def test_an_update_changes_only_what_it_names(self, bench: Bench) -> None:
        await bench.store.put(checkpoint())
        await bench.store.update(
            Update("checkpoint", checkpoint().key, {"public": True, "expires_s": 5.0}),
            Update("checkpoint", "missing", {"public": True}),
        )
        want = checkpoint(public=True, expires_s=5.0)
        assert await bench.store.get(Checkpoint, checkpoint().key) == want

    @scenario
    async def test_an_update_that_does_not_fit_changes_nothing(self, bench: Bench) -> None:
        await bench.store.put(checkpoint())
        good = Update("checkpoint", checkpoint().key, {"public": True})
        for changes in ({"colour": "red"}, {"size_bytes": "many"}, {"key": "other"}):
            with pytest.raises(ValueError, match=r"colour|size_bytes|key"):
                await bench.store.update(good, Update("checkpoint", checkpoint().key, changes))
        assert await bench.store.get(Checkpoint, checkpoint().key) == checkpoint()

    @scenario
    async def test_pages_list_the_newest_first(self, bench: Bench) -> None:
        for n in range(5):
            await bench.store.put(model(f"s:train:{n}"))
        await bench.store.put(replace(model("t:train:0"), tenant="bob"))
        await bench.store.put(model("s:train:1", last_request_s=START_S + 1))
        mine = await bench.store.page(Model, tenant="alice", limit=2, offset=1)
        assert ([each.key for each in mine.items], mine.total) == (["s:train:3", "s:train:2"], 5)
        other = await bench.store.page(Model, parent="t")
        assert ([each.key for each in other.items], other.total) == (["t:train:0"], 1)
        assert (await bench.store.page(Model)).total == 6
        assert (await bench.store.page(Model, tenant="alice", parent="t")).items == []
        assert (await bench.store.page(Session)).total == 0

    @scenario
    async def test_an_overwritten_checkpoint_is_listed_as_new(self, bench: Bench) -> None:
        await bench.submit(1, 2, 3)
        await bench.finish(
            Outcome(bench.ids[1], checkpoint=checkpoint("one")),
            Outcome(bench.ids[2], checkpoint=checkpoint("two")),
            Outcome(bench.ids[3], checkpoint=checkpoint("one"), overwrite=True),
        )
        page = await bench.store.page(Checkpoint, parent="s:train:0")
        assert [each.name for each in page.items] == ["one", "two"]

    # --- sessions and the sweep -----------------------------------------------------------------

    @scenario
    async def test_ending_a_session_ends_what_belongs_to_it(self, bench: Bench) -> None:
        await bench.store.put(session())
        await bench.store.put(model())
        await bench.store.put(model("t:train:0"))
        await bench.store.put(sampler())
        await bench.store.put(checkpoint())
        await bench.submit(1, 3)
        await bench.store.end_session("s", "success")
        await bench.store.end_session("s", "too late")
        assert await bench.store.get(Session, "s") == session(ended="success")
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.ENDED
        assert await bench.store.get(Model, "t:train:0") == model("t:train:0")
        assert await bench.store.get(Sampler, sampler().key) is None
        assert await bench.store.get(Checkpoint, checkpoint().key) == checkpoint()
        assert "session s ended (success)" in (await bench.rejection(bench.ids[3])).message
        taken = await bench.queue.take(bench.epoch, after=0, max_jobs=10)
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
        await bench.store.put(session())
        created = await bench.store.submit(create(), model(status=ModelStatus.CREATING))
        await bench.store.end_session("s", "interrupted")
        ready = Update("model", "s:train:0", {"status": ModelStatus.READY})
        await bench.finish(Outcome(created.request_id, updates=(ready,), sampler=sampler()))
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.ENDED
        assert await bench.store.get(Sampler, sampler().key) is None

    @scenario
    async def test_the_sweep_ends_sessions_without_heartbeat(self, bench: Bench) -> None:
        await bench.store.put(session("s"))
        await bench.store.put(replace(session("t"), last_seen_s=START_S + 100))
        await bench.store.put(model())
        await bench.store.sweep(START_S + 950, SweepPolicy(session_ttl_s=900))
        assert await bench.store.get(Session, "s") == session("s", ended="expired")
        kept = await bench.store.get(Session, "t")
        assert kept is not None and kept.ended is None
        stored = await bench.store.get(Model, "s:train:0")
        assert stored is not None and stored.status is ModelStatus.ENDED

    @scenario
    async def test_the_sweep_gives_up_a_gap_and_names_it(self, bench: Bench) -> None:
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
        assert "the next is 9" in (await bench.rejection(bench.ids[2])).message
        assert await bench.released() == [1, 9]

    @scenario
    async def test_a_gap_given_up_passes_spent_positions_behind_it(self, bench: Bench) -> None:
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
        with pytest.raises(ResultExpired, match=bench.ids[1]):
            await bench.store.wait(bench.ids[1], 1)
        assert (await bench.rejection(bench.ids[2])).message == "new"
        assert (await bench.store.submit(job(1))).duplicate
        assert await bench.store.job_tenant(bench.ids[1]) == "alice"

    @scenario
    async def test_the_sweep_deletes_expired_checkpoints(self, bench: Bench) -> None:
        for name, expires_s in (("gone", START_S), ("later", START_S + 1), ("never", None)):
            await bench.store.put(checkpoint(name, expires_s=expires_s))
        await bench.store.sweep(START_S, SweepPolicy())
        page = await bench.store.page(Checkpoint)
        assert {each.name for each in page.items} == {"later", "never"}

    @scenario
    async def test_files_of_records_and_unfinished_jobs_are_in_use(self, bench: Bench) -> None:
        await bench.store.put(checkpoint(file_id="of a checkpoint"))
        await bench.store.put(sampler(file_id="of a sampler"))
        await bench.store.put(sampler("s:sample:1"))
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
        await bench.store.delete(Checkpoint, checkpoint().key)
        in_use -= {"of a load", "of a checkpoint"}
        assert await bench.store.files_in_use() == in_use

    # --- durability ---------------------------------------------------------------------------

    def test_a_reopened_store_knows_everything(self, tmp_path: Path) -> None:
        async def before() -> tuple[dict[int, str], bytes]:
            async with self.bench(tmp_path) as bench:
                await bench.lease()
                await bench.store.put(session())
                await bench.submit(1, 2, 4)
                await bench.finish(Outcome(bench.ids[1], b"result", "application/x-protobuf"))
                return bench.ids, await bench.store.secret()

        async def after(ids: dict[int, str], secret: bytes) -> None:
            async with self.bench(tmp_path) as bench:
                assert await bench.store.base_model() == INFO
                assert await bench.lease() == Lease(1, resumed=True)
                assert await bench.store.get(Session, "s") == session()
                want = Outcome(ids[1], b"result", "application/x-protobuf")
                assert await bench.ended(ids[1]) == want
                assert await bench.store.submit(job(4)) == Submitted(ids[4], duplicate=True)
                await bench.submit(3)
                assert await bench.released() == [2, 3, 4]
                assert await bench.store.secret() == secret
                assert len(secret) >= 16

        asyncio.run(after(*asyncio.run(before())))

    @scenario
    async def test_one_bad_call_spoils_no_other(self, bench: Bench) -> None:
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


class TestSqliteStore(StoreContract):
    @asynccontextmanager
    async def open(self, folder: Path, clock: Clock) -> AsyncIterator[tuple[Store, Queue]]:
        store = await SqliteStore.open(folder / "store.db", clock=clock)
        try:
            yield store, store
        finally:
            await store.close()


class TestSqliteStoreOverASocket(StoreContract):
    """The worker's half goes through ``RemoteQueue``."""

    @asynccontextmanager
    async def open(self, folder: Path, clock: Clock) -> AsyncIterator[tuple[Store, Queue]]:
        store = await SqliteStore.open(folder / "store.db", clock=clock)
        queue = RemoteQueue(folder / "q.sock")
        try:
            async with serve(store, folder / "q.sock"):
                await queue.connect(5)
                yield store, queue
        finally:
            await queue.close()
            await store.close()
