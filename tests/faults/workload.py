"""The tenants' work in the fault tests: small supervised and reinforcement training.

The tenant's number alone decides every request, so a disturbed run can be compared with an
undisturbed one, bit for bit. ``Client`` sends requests as the SDK does: several in flight, in any
order, and again when an answer is lost.
"""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    OptimStep,
    Outcome,
    SampleCommand,
    SaveWeights,
    encode,
)
from tuneserve_engine.core.records import (
    CheckpointKind,
    CheckpointRecord,
    ModelRecord,
    Record,
    SessionRecord,
)
from tuneserve_engine.store.base import Submitted

Pause = Callable[[], Awaitable[None]]


class Api(Protocol):
    """The API's half of a store, however it is reached."""

    async def submit(self, job: Job, *records: Record) -> Submitted: ...

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None: ...

    async def cancel(self, request_id: str) -> bool: ...


async def no_pause() -> None:
    await asyncio.sleep(0)


def file_id(*names: object) -> str:
    """A file id that is the same in every run."""
    return hashlib.md5(repr(names).encode()).hexdigest()


def gradient_body(tokens: Sequence[int], targets: Sequence[int], advantage: float | None) -> bytes:
    """A request of two datums, with importance sampling if there is an advantage."""
    body = wire.ForwardBackwardRequest(
        loss_fn="cross_entropy" if advantage is None else "importance_sampling"
    )
    for shift in (0, 1):
        datum = body.data.add()
        ids = np.roll(np.array(tokens, "<i4"), shift)
        datum.model_input.add().encoded_text.tokens = ids.tobytes()
        datum.loss_fn_inputs["target_tokens"].dense = np.array(targets, "<i8").tobytes()
        datum.loss_fn_inputs["target_tokens"].dtype = wire.DTYPE_INT64
        if advantage is not None:
            for name, value in (("advantages", advantage), ("logprobs", -1.0)):
                column = np.full(len(targets), value, "<f4")
                datum.loss_fn_inputs[name].dense = column.tobytes()
                datum.loss_fn_inputs[name].dtype = wire.DTYPE_FLOAT32
    return body.SerializeToString()


@dataclass
class Tenant:
    """One model's requests, in order. Odd tenants sample between steps, and cancel one sample."""

    number: int
    base_model: str
    rounds: int
    vocabulary: int = 60
    length: int = 6

    @property
    def name(self) -> str:
        return f"tenant-{self.number}"

    @property
    def session(self) -> str:
        return f"s-{self.number}"

    @property
    def model_id(self) -> str:
        return f"{self.session}:train:0"

    @property
    def checkpoint(self) -> str:
        return f"tinker://{self.model_id}/weights/final"

    @property
    def config(self) -> AdapterConfig:
        return AdapterConfig(rank=4, alpha=8.0, seed=self.number, train_unembed=False)

    def creation(self) -> tuple[Job, tuple[Record, ...]]:
        payload = encode(CreateModel(self.base_model, self.config))
        job = Job(self.name, JobKind.CREATE_MODEL, self.session, 0, payload)
        model = ModelRecord(
            self.model_id, self.name, self.session, self.base_model, self.config, 0.0, 0.0
        )
        return self._of_model(job, 0), (model,)

    def round(self, index: int) -> list[Job]:
        """The jobs of one round: gradients, a step, and in RL weights to sample from."""
        draw = random.Random(1000 * self.number + index)
        jobs = [(JobKind.FORWARD_BACKWARD, self._gradient(draw)) for _ in range(2)]
        step = OptimStep(AdamwParams(learning_rate=0.01 * (1 + index % 3), weight_decay=0.01))
        jobs.append((JobKind.OPTIM_STEP, encode(step)))
        if self.is_rl:
            save = SaveWeights(
                CheckpointKind.SAMPLER,
                self.snapshot(index),
                self._checkpoint(f"round-{index}", CheckpointKind.SAMPLER, self.snapshot(index)),
            )
            jobs.append((JobKind.SAVE_WEIGHTS, encode(save)))
        first = 1 + index * len(jobs)
        return [self.job(first + n, kind, payload) for n, (kind, payload) in enumerate(jobs)]

    def samples(self, index: int) -> list[Job]:
        return [self._sample(index, n) for n in range(2)] if self.is_rl else []

    def unwanted(self, index: int) -> list[Job]:
        """Samples that are cancelled."""
        return [self._sample(index, 2)] if self.is_rl else []

    def _sample(self, index: int, n: int) -> Job:
        snapshot = self.snapshot(index)
        command = SampleCommand([1 + index, 2], seed=97 * index + n, file_id=snapshot, max_tokens=3)
        scope = f"{self.session}:sample:0"
        key = (self.name, JobKind.SAMPLE, scope, 3 * index + n)
        return Job(*key, encode(command), base_model=self.base_model)

    def final(self) -> Job:
        file = file_id(self.number, "final")
        record = self._checkpoint("final", CheckpointKind.TRAINING, file)
        save = SaveWeights(CheckpointKind.TRAINING, file, record)
        return self.job(1 + self.rounds * len(self.round(0)), JobKind.SAVE_WEIGHTS, encode(save))

    @property
    def final_file(self) -> str:
        return file_id(self.number, "final")

    @property
    def is_rl(self) -> bool:
        return self.number % 2 == 1

    def snapshot(self, index: int) -> str:
        return file_id(self.number, index)

    def _gradient(self, draw: random.Random) -> bytes:
        tokens = [draw.randrange(self.vocabulary) for _ in range(self.length)]
        targets = [draw.randrange(self.vocabulary) for _ in range(self.length)]
        return gradient_body(tokens, targets, draw.uniform(-1, 1) if self.is_rl else None)

    def job(self, seq: int, kind: JobKind, payload: bytes) -> Job:
        """The model's request number ``seq``, counted from 0 for its creation."""
        return self._of_model(Job(self.name, kind, self.model_id, seq, payload), seq)

    def _of_model(self, job: Job, position: int) -> Job:
        return Job(
            job.tenant,
            job.kind,
            job.scope,
            job.seq,
            job.payload,
            self.model_id,
            position,
            self.base_model,
        )

    def _checkpoint(self, name: str, kind: CheckpointKind, file: str) -> CheckpointRecord:
        return CheckpointRecord(
            f"tinker://{self.model_id}/{kind.value}/{name}",
            self.name,
            self.model_id,
            kind,
            name,
            file,
            self.base_model,
            self.config,
            0.0,
        )

    def session_record(self) -> SessionRecord:
        return SessionRecord(self.session, self.name, created_s=0.0, last_seen_s=1e12)


@dataclass
class Client:
    """Plays a tenant.

    ``results`` are the bodies by (scope, seq): everything that the client received. ``given_up``
    are the outcomes of cancelled samples, which may have ended before.
    """

    tenant: Tenant
    api: Api
    pause: Pause  # called between any two actions
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    resends: float = 0.1
    results: dict[tuple[str, int], bytes] = field(default_factory=dict)
    given_up: dict[str, Outcome] = field(default_factory=dict)

    async def run(self) -> None:
        job, records = self.tenant.creation()
        await self._one(job, *records)
        for index in range(self.tenant.rounds):
            await self.before_round(index)
            await self._together(self.tenant.round(index))
            giving_up = (self._give_up(job) for job in self.tenant.unwanted(index))
            await asyncio.gather(self._together(self.tenant.samples(index)), *giving_up)
        await self._one(self.tenant.final())
        for request_id, outcome in self.given_up.items():
            assert await self._outcome(request_id) == outcome, "an outcome changed"

    async def before_round(self, index: int) -> None:
        """Wait until the round may start: for plays that end a worker between two rounds."""

    async def _together(self, jobs: Sequence[Job]) -> None:
        shuffled = list(jobs)
        self.draw.shuffle(shuffled)
        await asyncio.gather(*(self._one(job) for job in shuffled))

    async def _one(self, job: Job, *records: Record) -> None:
        request_id = await self._submit(job, *records)
        if self.draw.random() < self.resends:
            assert await self._submit(job, *records) == request_id, "a resend is the same request"
        outcome = await self._outcome(request_id)
        assert outcome.rejection is None, f"{job.kind} {job.seq}: {outcome.rejection}"
        key = (job.scope, job.seq)
        body = without_cache_hits(outcome.body) if job.kind == JobKind.SAMPLE else outcome.body
        assert self.results.setdefault(key, body) == body, "a result changed"

    async def _give_up(self, job: Job) -> None:
        """Cancel the sample before it runs, while it does, or when it has ended."""
        request_id = await self._submit(job)
        for _ in range(self.draw.randrange(4)):
            await self.pause()
        while True:
            await self.pause()
            try:
                assert await self.api.cancel(request_id)
            except ConnectionError:
                continue
            break
        self.given_up[request_id] = outcome = await self._outcome(request_id)
        rejection = outcome.rejection
        assert rejection is None or "was cancelled" in rejection.message, rejection

    async def _outcome(self, request_id: str) -> Outcome:
        while True:
            await self.pause()
            try:
                outcome = await self.api.wait(request_id, 5.0)
            except ConnectionError:
                continue
            if outcome is not None:
                return replace(outcome, usage=None)  # reported later for a cancelled sample

    async def _submit(self, job: Job, *records: Record) -> str:
        while True:
            await self.pause()
            try:
                return (await self.api.submit(job, *records)).request_id
            except ConnectionError:
                continue


def without_cache_hits(sampled: bytes) -> bytes:
    """A sample's response without the part about cached work."""
    response = wire.SampleResponse.FromString(sampled)
    response.ClearField("prompt_cache_hit_tokens")
    return response.SerializeToString(deterministic=True)


def state_bits(directory: object, base_model: str) -> list[object]:
    """Everything in a saved state, as bytes."""
    from tuneserve_engine.adapters import checkpoint

    state = checkpoint.read_checkpoint(directory, base_model)  # type: ignore[arg-type]
    groups = (state.weights, state.first_moment, state.second_moment, state.accumulator)
    return [
        state.step,
        *[(g, name, a.tobytes()) for g, group in enumerate(groups) for name, a in group.items()],
    ]
