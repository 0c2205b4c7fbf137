"""Tools of the contract's tests: records and jobs in one line, an open store, a clock."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tuneserve_engine.core.adapter import AdapterConfig, BaseModelInfo
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    Outcome,
    Rejection,
    SampleCommand,
    encode,
)
from tuneserve_engine.core.policies import StorePolicy, SweepPolicy
from tuneserve_engine.core.records import (
    CheckpointKind,
    CheckpointRecord,
    CustomLossRecord,
    KeyRecord,
    ModelRecord,
    ModelStatus,
    SamplerRecord,
    Scope,
    SessionRecord,
    TenantRecord,
)
from tuneserve_engine.store.base import Lease, Queue, RecoveryPoint, Store

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")
CONFIG = AdapterConfig(rank=4, alpha=32.0, seed=1)
START_S = 1_000_000.0
POLICY = StorePolicy()


@dataclass
class Clock:
    now_s: float = START_S

    def __call__(self) -> float:
        return self.now_s


def session(key: str = "s", **fields: Any) -> SessionRecord:
    defaults = {"tenant": "alice", "created_s": START_S, "last_seen_s": START_S}
    return SessionRecord(key, **(defaults | fields))


def model(key: str = "s:train:0", **fields: Any) -> ModelRecord:
    defaults = {
        "tenant": "alice",
        "base_model": "tiny",
        "status": ModelStatus.READY,
        "created_s": START_S,
        "last_request_s": START_S,
    }
    return ModelRecord(key, parent=key.split(":")[0], config=CONFIG, **(defaults | fields))


def sampler(key: str = "s:sample:0", **fields: Any) -> SamplerRecord:
    return SamplerRecord(key, "alice", key.split(":")[0], "tiny", START_S, **fields)


def custom_loss(key: str = "s:loss:0", **fields: Any) -> CustomLossRecord:
    return CustomLossRecord(key, "alice", key.split(":")[0], START_S, **fields)


def checkpoint(name: str = "one", **fields: Any) -> CheckpointRecord:
    key = f"tinker://s:train:0/weights/{name}"
    defaults: dict[str, Any] = {"file_id": f"file-{name}", "created_s": START_S}
    kind = CheckpointKind.TRAINING
    return CheckpointRecord(
        key,
        "alice",
        "s:train:0",
        kind,
        name,
        base_model="tiny",
        config=CONFIG,
        **(defaults | fields),
    )


def api_key(key: str = "0a", **fields: Any) -> KeyRecord:
    defaults: dict[str, Any] = {"tenant": "alice", "parent": "alice", "created_s": START_S}
    return KeyRecord(
        key, digest="ab" * 32, scopes=[Scope.TRAIN, Scope.SAMPLE], **(defaults | fields)
    )


def tenant(name: str = "alice", **fields: Any) -> TenantRecord:
    return TenantRecord(name, name, START_S, **fields)


def job(seq: int, model_id: str = "s:train:0", **fields: Any) -> Job:
    """The ``seq``-th request of a model, counted from 1."""
    defaults = {
        "tenant": "alice",
        "kind": JobKind.OPTIM_STEP,
        "payload": f"payload {seq}".encode(),
        "base_model": "tiny",
    }
    values = defaults | fields
    return Job(scope=model_id, seq=seq, model_id=model_id, position=seq - 1, **values)


def create(key: str = "s:train:0", tenant: str = "alice") -> Job:
    """The request that creates a model. It waits for no other."""
    payload = encode(CreateModel("tiny", CONFIG))
    scope, _, number = key.split(":")
    kind = JobKind.CREATE_MODEL
    return Job(tenant, kind, scope, int(number), payload, model_id=key, base_model="tiny")


def sample(seq: int, file_id: str | None = None, sequences: int = 1, **fields: Any) -> Job:
    command = SampleCommand(prompt=[1, 2], seed=3, file_id=file_id, num_samples=sequences)
    defaults: dict[str, Any] = {
        "tenant": "alice",
        "scope": "s:sample:0",
        "payload": encode(command),
        "base_model": "tiny",
    }
    return Job(kind=JobKind.SAMPLE, seq=seq, **(defaults | fields))


def point(position: int, model_id: str = "s:train:0", file_id: str | None = None) -> RecoveryPoint:
    return RecoveryPoint(model_id, position, file_id or f"point-{position}", "numerics")


def keys(jobs: Sequence[Job]) -> list[tuple[str, int]]:
    """The keys of these jobs."""
    return [(each.scope, each.seq) for each in jobs]


@dataclass
class Bench:
    """An open store, the worker's access to it, and the clock that both use."""

    store: Store
    queue: Queue
    clock: Clock
    epoch: int = 0
    ids: dict[int, str] = field(default_factory=dict)
    marks: Iterator[int] = field(default_factory=count)

    async def lease(self, owner: str = "worker", info: BaseModelInfo = INFO) -> Lease:
        """Make ``owner`` the process that is the only worker of most tests."""
        lease = await self.queue.lease("worker", owner, info)
        self.epoch = lease.epoch
        return lease

    async def join(self, name: str, info: BaseModelInfo = INFO, *, speed: float = 1.0) -> int:
        """The epoch of one more worker."""
        return (await self.queue.lease(name, f"process of {name}", info, speed)).epoch

    async def submit(self, *seqs: int, model_id: str = "s:train:0", **fields: Any) -> None:
        jobs = [job(seq, model_id, **fields) for seq in seqs]
        submitted = await asyncio.gather(*(self.store.submit(each) for each in jobs))
        self.ids |= {seq: each.request_id for seq, each in zip(seqs, submitted, strict=True)}

    async def released(self) -> list[int]:
        """The seq numbers of the jobs that the only worker would take now, in order.

        A job that waits for no other marks the end, so the test need not wait to see that there is
        nothing.
        """
        kind = JobKind.UNLOAD_MODEL
        mark = Job("mark", kind, "mark", next(self.marks), base_model="tiny")
        marked = (await self.store.submit(mark)).request_id
        taken = await self.queue.take_jobs(self.epoch, after=0, max_jobs=20_000)
        assert taken.pop().request_id == marked
        await self.finish(Outcome(marked))
        return [each.seq for each in taken]

    async def take(self, epoch: int | None = None, after: int = 0) -> list[Job]:
        """All jobs of this worker. Waits until one exists."""
        return await self.queue.take_jobs(epoch or self.epoch, after=after, max_jobs=20_000)

    async def has_nothing(self, epoch: int, after: int = 0) -> bool:
        """Whether a take of this worker waits."""
        with contextlib.suppress(TimeoutError):
            return not await asyncio.wait_for(self.take(epoch, after), 0.1)
        return True

    async def park(self, model_id: str = "s:train:0") -> None:
        """Let the idle model's worker release it, after a time without requests."""
        policy = SweepPolicy(session_ttl_s=1e9, park_s=1.0, result_ttl_s=1e9)
        await self.store.sweep(self.clock.now_s + 2, policy)
        await self.queue.unassign(self.epoch, model_id)

    async def finish(self, *outcomes: Outcome, epoch: int | None = None) -> None:
        await self.queue.finish(epoch or self.epoch, outcomes)

    async def finish_changed(self, *seqs: int) -> None:
        """End the jobs of ``submit``, which have changed their model's state."""
        done = (Outcome(self.ids[seq], f"result {seq}".encode(), changed=True) for seq in seqs)
        await self.finish(*done)

    async def ended(self, request_id: str) -> Outcome | None:
        return await self.store.wait(request_id, 0)

    async def rejection(self, request_id: str) -> Rejection:
        outcome = await self.ended(request_id)
        assert outcome is not None and outcome.rejection is not None
        assert outcome.body == b""
        return outcome.rejection

    async def status(self, model_id: str = "s:train:0") -> ModelStatus:
        stored = await self.store.get_record(ModelRecord, model_id)
        assert stored is not None
        return stored.status

    async def pass_time(self, seconds: float, *epochs: int) -> None:
        """Let time pass in which only these workers renew their leases."""
        for _ in range(int(seconds)):
            self.clock.now_s += 1
            for epoch in epochs:
                await self.queue.renew(epoch)


Test = Callable[[Any, Bench], Awaitable[None]]
Play = Callable[[Any, Path], None]


def scenario(test: Test) -> Play:
    """Run a test on a fresh, leased store in its own event loop."""
    return staged()(test)


def staged(policy: StorePolicy = POLICY, *, leased: bool = True) -> Callable[[Test], Play]:
    """A scenario on a store with this policy, with or without a worker at the start."""

    def stage(test: Test) -> Play:
        def play(self: "Contract", tmp_path: Path) -> None:
            async def main() -> None:
                async with self.bench(tmp_path, policy) as bench, asyncio.timeout(20):
                    if leased:
                        await bench.lease()
                    await test(self, bench)

            asyncio.run(main())

        play.__name__ = test.__name__
        play.__doc__ = test.__doc__
        return play

    return stage


class Contract:
    """A subclass says how to open the store under ``folder``."""

    def open(
        self, folder: Path, clock: Clock, policy: StorePolicy
    ) -> contextlib.AbstractAsyncContextManager[tuple[Store, Queue]]:
        raise NotImplementedError

    @asynccontextmanager
    async def bench(
        self, folder: Path, policy: StorePolicy = POLICY, clock: Clock | None = None
    ) -> AsyncIterator[Bench]:
        clock = clock or Clock()
        async with self.open(folder, clock, policy) as (store, queue):
            yield Bench(store, queue, clock)
