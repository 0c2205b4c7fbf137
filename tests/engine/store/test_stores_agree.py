"""Redis follows the rules of SQLite: the same random calls, one by one, get the same answers.

The stores share no code below the words of their messages, so a slip in one shows.
"""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.engine.store.contract.bench import (
    INFO,
    START_S,
    Clock,
    checkpoint,
    create,
    job,
    model,
    point,
    sample,
    sampler,
    session,
)
from tests.redis_server import RedisServer
from tests.support.memory_store import MemoryStore
from tuneserve_engine.core.jobs import Job, JobKind, LoadWeights, Outcome, Rejection, encode
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.recordings import SampleKey
from tuneserve_engine.core.records import (
    CheckpointRecord,
    ModelRecord,
    ModelStatus,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_engine.core.usage import CurvePoint, PointKind, Usage
from tuneserve_engine.store.base import Completion, SamplerClient, Store
from tuneserve_engine.store.errors import Fenced, KeyReused, LimitReached, ResultDropped
from tuneserve_engine.store.redis.store import RedisStore

SEEDS = 6
CALLS = 200
POLICY = StorePolicy(
    model_jobs=6,
    tenant_jobs=14,
    server_jobs=20,
    tenant_bytes=3000,
    tenant_models=4,
    tenant_refusals=12,
    tenant_sessions=1,
    tenant_samplers_a_minute=2,
)
SWEEP = SweepPolicy(
    session_ttl_s=300,
    park_s=15,
    sample_ttl_s=20,
    gap_ttl_s=25,
    result_ttl_s=20,
    ended_session_ttl_s=60,
)
SESSIONS = ("s", "t")
MODELS = ("s:train:0", "s:train:1", "t:train:0", "t:train:1")
INFOS = (INFO, INFO, replace(INFO, name="other"))
REFUSALS = (Fenced, KeyReused, LimitReached, ResultDropped, KeyError, ValueError)

Call = Callable[[Store], Awaitable[Any]]


def told(result: Any) -> Any:
    """A result without the numbers that each store may choose."""
    if isinstance(result, list):
        if result and isinstance(result[0], Completion):  # outcomes that end together have no order
            return sorted((replace(each, number=0) for each in result), key=str)
        return [told(each) for each in result]
    return replace(result, release=0) if isinstance(result, Job) else result


class Script:
    """Random calls, with arguments that earlier answers make interesting."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.epochs = [1]
        self.ids = ["req_unknown"]
        self.patience_s = 0.0

    def pick(self, things: Any) -> Any:
        return self.random.choice(list(things))

    def next(self) -> tuple[str, Call]:
        """The next call, and its name."""
        self.clock.now_s += self.pick((0, 0, 0, 0.5, 1, 2, 2, 5))
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [6 if name in ("do_submit", "do_take", "do_finish") else 1 for name in names]
        (name,) = self.random.choices(names, weights)
        return name, getattr(self, name)()

    def do_submit(self) -> Call:
        kind = self.pick(("step", "step", "step", "sample", "create", "load", "rejected"))
        model_id, seq = self.pick(MODELS), self.random.randrange(1, 12)
        size = self.pick((10, 10, 10, 700))
        made = replace(job(seq, model_id), payload=bytes(size), kind=JobKind.FORWARD_BACKWARD)
        records: tuple[Any, ...] = ()
        if kind == "sample":
            key = self.pick(("s:sample:0", "t:sample:0"))
            made = sample(seq, self.pick((None, "f")), scope=key, base_model=self.base())
        elif kind == "create":
            made = create(model_id)
            records = (model(model_id, status=ModelStatus.CREATING),)
        elif kind == "load":
            payload = encode(LoadWeights(f"file-{seq}", "tinker://x", True))
            made = replace(made, kind=JobKind.LOAD_WEIGHTS, payload=payload)
        elif kind == "rejected":
            made = replace(made, rejection=Rejection("bad", "user"))
        return lambda store: store.submit(made, *records)

    def base(self) -> str:
        return str(self.pick(INFOS).name)

    def do_take(self) -> Call:
        epoch, most = self.pick(self.epochs), self.pick((1, 3, 100))
        return lambda store: self.take(store, epoch, most)

    def do_finish_all(self) -> Call:
        """Finish every job that a worker has, in order."""
        epoch = self.pick(self.epochs)

        async def finish(store: Store) -> Any:
            taken = await self.take(store, epoch, 100)
            outcomes = [Outcome(each.request_id, b"r", changed=True) for each in taken]
            return [taken, await store.finish(epoch, outcomes)]

        return finish

    async def take(self, store: Store, epoch: int, most: int) -> list[Job]:
        """The available jobs, or none. Memory is asked first, because it answers at once."""
        if isinstance(store, MemoryStore):
            limit_s, self.patience_s = 0.01, 10.0
        else:
            limit_s = self.patience_s
        try:
            async with asyncio.timeout(limit_s):
                return await store.take_jobs(epoch, after=0, max_jobs=most)
        except TimeoutError:
            self.patience_s = 0.05
            return []

    def heard(self, name: str, result: Any) -> None:
        if name == "do_submit":
            self.ids.append(result.request_id)
        elif name == "do_lease":
            self.epochs = [*self.epochs[-3:], result.epoch]
        elif name == "do_take" and result:
            # An unload is the last job of its model. Finished alone, it would not be.
            self.ids += [job.request_id for job in result if job.kind != JobKind.UNLOAD_MODEL]

    def do_finish(self) -> Call:
        if self.random.random() < 0.2:
            return self.do_finish_all()
        outcomes = []
        for request_id in self.random.sample(self.ids[-12:], min(2, len(self.ids[-12:]))):
            outcome = Outcome(request_id, b"r" * self.random.randrange(5))
            if self.random.random() < 0.6:
                usage = Usage(
                    self.random.randrange(64) / 64, trained_tokens=self.random.randrange(9)
                )
                kind: PointKind = self.pick(("forward_backward", "optim_step"))
                point = CurvePoint(kind, self.random.randrange(9), loss_sum=0.5)
                outcome = replace(outcome, usage=usage, point=point)
            extra = self.pick(("", "", "", "changed", "changed", "saved", "updated", "rejected"))
            if extra == "changed":
                outcome = replace(outcome, changed=True, halvings=self.random.randrange(3))
            elif extra == "saved":
                one = checkpoint(self.pick("ab"), expires_s=self.pick((None, START_S + 50)))
                key = f"{self.pick(SESSIONS)}:sample:1"
                overwrite = self.pick((True, False))
                outcome = replace(
                    outcome, checkpoint=one, sampler=sampler(key), overwrite=overwrite
                )
            elif extra == "updated":
                status = self.pick(("ready", "ready", "ready", "failed", "lost"))
                change = Update("model", self.pick(MODELS), {"status": status})
                outcome = replace(outcome, updates=(change,))
            elif extra == "rejected":
                outcome = replace(outcome, rejection=Rejection("no", "server"), changed=True)
            outcomes.append(outcome)
        epoch = self.pick(self.epochs)
        return lambda store: store.finish(epoch, outcomes)

    def do_wait(self) -> Call:
        request_id = self.pick(self.ids)
        return lambda store: store.wait(request_id, 0)

    def do_job_key(self) -> Call:
        request_id = self.pick(self.ids)
        return lambda store: store.job_key(request_id)

    def do_cancel(self) -> Call:
        request_id = self.pick(self.ids)
        return lambda store: store.cancel(request_id)

    def client(self) -> SamplerClient:
        scope = self.pick(("s:sample:0", "t:sample:0"))
        return SamplerClient("alice", scope, self.pick((0, 0, 0, 1)))

    def do_completions(self) -> Call:
        client = self.client()
        return lambda store: store.completions(client, after=0, limit=1000, timeout_s=0)

    def do_acknowledge(self) -> Call:
        client, ids = self.client(), self.random.sample(self.ids, min(4, len(self.ids)))
        return lambda store: store.acknowledge(client, ids)

    def do_join(self) -> Call:
        key = f"{self.pick(SESSIONS)}:sample:{self.pick((0, 1))}"
        return lambda store: store.join_sampler(key)

    def do_lease(self) -> Call:
        name, owner, info = self.pick("vw"), self.pick("pq"), self.pick(INFOS)
        return lambda store: store.lease(name, owner, info)

    def do_renew(self) -> Call:
        epoch = self.pick(self.epochs)
        return lambda store: store.renew(epoch)

    def do_begin(self) -> Call:
        epoch, ids = self.pick(self.epochs), self.random.sample(self.ids, min(3, len(self.ids)))
        return lambda store: store.note_running(epoch, ids)

    def do_resign(self) -> Call:
        epoch = self.pick(self.epochs)
        if self.random.random() < 0.7:
            return self.do_renew()
        if epoch % 3 == 0:
            return lambda store: store.killed("vw"[epoch % 2])
        return lambda store: store.resign(epoch)

    def do_release(self) -> Call:
        epoch, model_id = self.pick(self.epochs), self.pick(MODELS)
        return lambda store: store.unassign(epoch, model_id)

    def do_points(self) -> Call:
        epoch, model_id = self.pick(self.epochs), self.pick(MODELS)
        return lambda store: store.recovery_points(epoch, model_id)

    def do_log(self) -> Call:
        epoch, model_id, start = self.pick(self.epochs), self.pick(MODELS), self.pick((0, 2))
        return lambda store: store.read_log(epoch, model_id, start=start)

    def do_save_point(self) -> Call:
        epoch, n = self.pick(self.epochs), self.random.randrange(6)
        saved = point(n, self.pick(MODELS), f"point-{self.random.random()}")
        return lambda store: store.save_point(epoch, saved)

    def do_put(self) -> Call:
        new: Any = self.pick(
            (
                session(self.pick(SESSIONS), last_seen_s=self.clock.now_s),
                model(self.pick(MODELS), status=ModelStatus.READY),
            )
        )
        record: Any = self.pick(
            (
                sampler(f"{self.pick(SESSIONS)}:sample:0", file_id=self.pick((None, "g"))),
                checkpoint(self.pick("ab"), expires_s=self.clock.now_s + 20),
            )
        )
        if self.random.random() < 0.5:
            new = self.pick((new, sampler(f"s:sample:{self.random.randrange(9)}")))
            return lambda store: store.put_new_record(new)
        return lambda store: store.put_record(record)

    def do_update(self) -> Call:
        seen = Update("session", self.pick(SESSIONS), {"last_seen_s": self.clock.now_s})
        status = Update("model", self.pick(MODELS), {"status": "ready", "diverged": True})
        wrong = Update("model", self.pick(MODELS), {"diverged": "perhaps"})
        updates = self.pick(((seen,), (seen, status), (status,), (seen, wrong)))

        async def update(store: Store) -> Any:
            if wrong in updates and await store.get_record(ModelRecord, wrong.key) is None:
                return None  # the error for a missing record with a bad value is not compared
            with contextlib.suppress(ValueError):  # the words are msgspec's
                return await store.update_record(*updates)
            return "refused"

        return update

    def do_delete(self) -> Call:
        key = checkpoint(self.pick("ab")).key
        return lambda store: store.delete_record(CheckpointRecord, key)

    def do_page(self) -> Call:
        kind, tenant = (
            self.pick((SessionRecord, ModelRecord, SamplerRecord, CheckpointRecord)),
            self.pick((None, "alice")),
        )
        parent = self.pick((None, "s", "s:train:0"))
        limit, offset = self.pick((None, 1, 2)), self.pick((0, 1))
        return lambda store: store.page_of_records(
            kind, tenant=tenant, parent=parent, limit=limit, offset=offset
        )

    def do_end_session(self) -> Call:
        key = self.pick(SESSIONS)
        if self.random.random() < 0.7:
            return self.do_sweep()
        return lambda store: store.end_session(key, "success")

    def do_sweep(self) -> Call:
        now_s = self.clock.now_s
        return lambda store: store.sweep(now_s, SWEEP)

    def do_served(self) -> Call:
        return lambda store: store.base_models()

    def do_used(self) -> Call:
        tenant, since_s = self.pick((None, "alice", "bob")), self.pick((0.0, 2 * START_S))
        name, after = self.pick(self.ids or ["req_unknown"]), self.pick((-1, 4))

        async def used(store: Store) -> Any:
            curve = sorted(map(str, await store.curve("s:train:0", after=after)))
            state = await store.request(name)
            if state is not None and state.usage is not None:
                state = replace(
                    state, usage=replace(state.usage, total_s=round(state.usage.total_s))
                )
            kept = [
                replace(each, usage=each.usage and replace(each.usage, total_s=0.0))
                for each in await store.kept_requests("alice", "s:train:0", limit=5)
            ]
            sums = [await store.usage(tenant, since_s), await store.usage(tenant, 0.0, since_s)]
            return [sums, curve, state, kept, await store.stats()]

        return used

    def do_files_in_use(self) -> Call:
        async def files(store: Store) -> Any:
            released = await store.released_files()
            await store.forget_released(sorted(released)[::2])
            return [await store.files_in_use(), released, await store.released_files()]

        return files


class RecordingScript(Script):
    """Samples that are recorded, and the life of the recordings.

    No two uses are at the same time, because each store may order them differently.
    """

    def next(self) -> tuple[str, Call]:
        self.clock.now_s += self.pick((0.125, 1, 2, 5))
        name = self.pick(("record", "record", "record", "read", "read", "sampler", "sweep", "end"))
        return name, getattr(self, name)()

    def scope(self) -> str:
        return str(self.pick(("s:sample:0", "t:sample:0")))

    def record(self) -> Call:
        made = sample(self.random.randrange(1, 9), scope=self.scope())
        body = b"d" * self.random.randrange(40)
        rejection = self.pick((None, None, None, Rejection("no", "user")))

        async def record(store: Store) -> Any:
            submitted = await store.submit(made)
            outcome = Outcome(submitted.request_id, b"r", rejection=rejection, recording=body)
            await store.finish(1, [outcome])
            return submitted

        return record

    def read(self) -> Call:
        key = SampleKey(self.scope(), self.random.randrange(1, 9))
        return lambda store: store.recordings("alice", [key])

    def sampler(self) -> Call:
        made = sampler(self.scope())
        return lambda store: store.put_record(made)

    def sweep(self) -> Call:
        now_s = self.clock.now_s
        policy = replace(SWEEP, recording_ttl_s=40, recording_bytes=2000)
        return lambda store: store.sweep(now_s, policy)

    def end(self) -> Call:
        key = self.pick(SESSIONS)

        async def end(store: Store) -> None:
            await store.put_record(session(key, last_seen_s=self.clock.now_s))
            if self.clock.now_s % 3 < 1:
                await store.end_session(key, "success")

        return end


async def answer(call: Call, store: Store) -> Any:
    try:
        return told(await call(store))
    except REFUSALS as error:
        return type(error), str(error)


async def play(
    seed: int, server: RedisServer, prefix: str, kind: type[Script] = Script, calls: int = CALLS
) -> None:
    clock = Clock()
    script = kind(seed, clock)
    async with Redis.from_url(server.url, protocol=2) as redis:
        # The same requests get the same ids as in memory.
        await redis.hset(f"{{{prefix}}}:meta", mapping={"format": 1, "secret": bytes(32)})
    memory = MemoryStore(clock=clock, policy=POLICY)
    other = await RedisStore.open(server.url, clock=clock, policy=POLICY, prefix=prefix)
    try:
        if kind is RecordingScript:
            for store in (memory, other):
                await store.lease("worker", "process", INFO)
        for number in range(calls):
            name, call = script.next()
            wanted, found = await answer(call, memory), await answer(call, other)
            assert found == wanted, f"seed {seed}, call {number}: {name}"
            if not isinstance(wanted, tuple):
                script.heard(name, wanted)
    finally:
        await other.close()
        await memory.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_redis_answers_as_memory_does(seed: int, redis_server: RedisServer, tmp_path: Path) -> None:
    prefix = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    asyncio.run(play(seed, redis_server, prefix))


@pytest.mark.parametrize("seed", range(2))
def test_redis_stores_recordings_as_memory_does(
    seed: int, redis_server: RedisServer, tmp_path: Path
) -> None:
    prefix = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    asyncio.run(play(seed, redis_server, prefix, RecordingScript, 2 * CALLS))
