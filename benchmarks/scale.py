"""Simulate thousands of tenants on dozens of workers in virtual time: waits, shares, moves, deaths.

``virtual_service`` says what is real. Light tenants train on small batches and think for two
minutes between steps. Samplers train, save, sample and think for 20 seconds. Heavy tenants send
long requests, one after the other. Thinking times are exponential. A quarter of the workers has
slow devices. Workers die at random, one in a minute on average, and are away for half a minute on
average. For comparison, light tenants are alone: one for each worker.
"""

import argparse
import asyncio
import random
import statistics
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # parts of the simulation are in tests/support

import numpy as np
from plots import Panel, distribution, page
from results import publish, table
from virtual_service import INFO, DeviceKind, VirtualService

from tests.support.virtual_time import VirtualLoop
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.jobs import (
    CreateModel,
    Job,
    JobKind,
    OptimStep,
    SampleCommand,
    SaveWeights,
    encode,
)
from tuneserve_engine.core.records import (
    CheckpointKind,
    ModelRecord,
    Record,
    SamplerRecord,
    SessionRecord,
)

FAST = DeviceKind("fast", train_tokens_s=30_000, decode_step_s=0.012)
SLOW = DeviceKind("slow", train_tokens_s=10_000, decode_step_s=0.03)
CONFIG = AdapterConfig(rank=8, alpha=16.0, seed=1, train_unembed=False)
STEP = encode(OptimStep(AdamwParams(learning_rate=1e-4)))
PROMPT = [1] * 64
LONGEST_WAIT_S = 3600.0
RAMP_S, RAMPED_S = 120.0, 150.0
"""The time in which the tenants come, and from which on requests count."""


@dataclass(frozen=True)
class Habit:
    """The behaviour of one kind of tenant."""

    share: float  # of all tenants
    datums: int
    tokens: int  # of each datum
    think_s: float  # mean time between steps
    samples: int = 0  # after each step
    sampled: int = 64  # tokens of each

    def gradient(self) -> bytes:
        """Return the payload of a gradient request, whose tokens are all 1."""
        body = wire.ForwardBackwardRequest(loss_fn="cross_entropy")
        for _ in range(self.datums):
            datum = body.data.add()
            datum.model_input.add().encoded_text.tokens = np.ones(self.tokens, "<i4").tobytes()
            targets = datum.loss_fn_inputs["target_tokens"]
            targets.dense = np.ones(self.tokens, "<i8").tobytes()
            targets.dtype = wire.DTYPE_INT64
        return body.SerializeToString()


HABITS = {
    "light": Habit(0.95, datums=8, tokens=512, think_s=120.0),
    "sampler": Habit(0.04, datums=4, tokens=512, think_s=20.0, samples=8),
    "heavy": Habit(0.01, datums=16, tokens=1024, think_s=0.0),
}
GRADIENTS = {name: habit.gradient() for name, habit in HABITS.items()}


@dataclass
class Seen:
    """The observations of all tenants."""

    waits: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By request: the time when it was sent, and the seconds until its result."""
    steps: dict[str, int] = field(default_factory=dict)  # by tenant
    failed: int = 0


_SEED_STRIDE = 1_000_000  # more than there are tenants


class ModelTenant:
    """One tenant with one model."""

    def __init__(
        self, service: VirtualService, number: int, kind: str, seen: Seen, seed: int
    ) -> None:
        self._service = service
        self._kind = kind
        self._habit = HABITS[kind]
        self._seen = seen
        self._name = f"{kind}-{number}"
        self._session = f"s-{number}"
        self._model = f"{self._session}:train:0"
        self._draw = random.Random(number + seed * _SEED_STRIDE)
        self._position = self._samplers = 0

    async def play(self, begins_s: float) -> None:
        """Train for ever, from ``begins_s`` on."""
        await asyncio.sleep(begins_s)
        session = SessionRecord(self._session, self._name, created_s=0.0, last_seen_s=1e12)
        await self._service.store.put_record(session)
        model = ModelRecord(
            self._model,
            self._name,
            self._session,
            INFO.name,
            CONFIG,
            created_s=0.0,
            last_request_s=0.0,
        )
        self._seen.steps[self._name] = 0
        creation = encode(CreateModel(INFO.name, CONFIG))
        await self._ask("create", JobKind.CREATE_MODEL, creation, model)
        while True:
            await asyncio.gather(
                self._ask("gradient", JobKind.FORWARD_BACKWARD, GRADIENTS[self._kind]),
                self._ask("step", JobKind.OPTIM_STEP, STEP),
            )
            if self._habit.samples:
                await self._sample()
            self._seen.steps[self._name] += 1
            if self._habit.think_s:
                await asyncio.sleep(self._draw.expovariate(1 / self._habit.think_s))

    async def _sample(self) -> None:
        scope = f"{self._session}:sample:{self._samplers}"
        file = uuid.UUID(int=self._draw.getrandbits(128)).hex
        self._samplers += 1
        sampler = SamplerRecord(scope, self._name, self._session, INFO.name, 0.0, file_id=file)
        save = SaveWeights(CheckpointKind.SAMPLER, file, None, sampler=sampler)
        await self._ask("save", JobKind.SAVE_WEIGHTS, encode(save))
        command = encode(SampleCommand(PROMPT, 1, file_id=file, max_tokens=self._habit.sampled))
        jobs = [
            Job(self._name, JobKind.SAMPLE, scope, seq, command, base_model=INFO.name)
            for seq in range(self._habit.samples)
        ]
        await asyncio.gather(*(self._timed("sample", job) for job in jobs))

    async def _ask(self, what: str, kind: JobKind, payload: bytes, *records: Record) -> None:
        position, self._position = self._position, self._position + 1
        scope = self._session if kind == JobKind.CREATE_MODEL else self._model
        of_model = self._model, position, INFO.name
        await self._timed(
            what, Job(self._name, kind, scope, position, payload, *of_model), *records
        )

    async def _timed(self, what: str, job: Job, *records: Record) -> None:
        loop, store = asyncio.get_running_loop(), self._service.store
        sent_s = loop.time()
        request_id = (await store.submit(job, *records)).request_id
        outcome = await store.wait(request_id, LONGEST_WAIT_S)
        assert outcome is not None, f"{what} of {self._name} has waited for an hour"
        self._seen.failed += outcome.rejection is not None
        waited_s = loop.time() - sent_s
        device = await self._service.device_of(self._model)
        self._seen.waits[f"{self._kind} {what}, {device}"].append((sent_s, waited_s))


def simulate(
    service: VirtualService,
    tenants: Mapping[str, int],
    seconds: float,
    ramp_s: float = RAMP_S,
    seed: int = 0,
) -> Seen:
    """Run so many tenants of each kind, which arrive in the first ``ramp_s`` seconds.

    The seed chooses the moments at which they arrive, and how long they think.
    """
    seen, draw = Seen(), random.Random(1 + seed)

    async def run() -> None:
        await service.start()
        kinds = [kind for kind, count in tenants.items() for _ in range(count)]
        playing = [
            asyncio.create_task(
                ModelTenant(service, number, kind, seen, seed).play(draw.random() * ramp_s)
            )
            for number, kind in enumerate(kinds)
        ]
        ended, _ = await asyncio.wait(
            [*playing, *service.tasks], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in ended:
            task.result()
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await service.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    return seen


def rows_of(seen: Seen, alone: Seen, after_s: float) -> list[list[Any]]:
    """Return the waits for each kind of request that was sent after ``after_s``.

    The last number is that of the 99th percentile, divided by that of tenants who are alone.
    """
    rows = []
    for name, waits in sorted(seen.waits.items()):
        found = [waited for sent_s, waited in waits if sent_s > after_s]
        if found:
            quiet = [waited for _, waited in alone.waits.get(name, [])]
            values = np.quantile(found, (0.5, 0.99, 1))
            p99_alone = np.quantile(quiet, 0.99) if quiet else None
            compared = ["-", "-"] if p99_alone is None else [p99_alone, values[1] / p99_alone]
            rows.append([name, len(found), *values, *compared])
    return rows


def _lost(service: VirtualService) -> int:
    """Return the number of models of workers that died."""
    return sum(count for _, count in service.deaths)


def _rate(seen: Seen) -> float:
    """Return the requests a second, of those that count."""
    sent_s = [at for waits in seen.waits.values() for at, _ in waits if at > RAMPED_S]
    return len(sent_s) / (max(sent_s, default=RAMPED_S + 1) - RAMPED_S)


def shares_of(service: VirtualService, seen: Seen, seconds: float) -> list[list[Any]]:
    """Return the steps of the tenants and the busy time of the devices: least, median, most."""
    steps = {
        f"steps of a {kind} tenant": [
            count for name, count in seen.steps.items() if name.startswith(f"{kind}-")
        ]
        for kind in HABITS
    }
    busy = {
        f"busy share of a {kind.name} device": [
            service.busy(name) / seconds for name in service.devices if name.startswith(kind.name)
        ]
        for kind in (FAST, SLOW)
    }
    return [
        [name, min(found), statistics.median(found), max(found)]
        for name, found in (steps | busy).items()
        if found
    ]


def kinds_of(workers: int, slow: float) -> Sequence[DeviceKind]:
    """Return the workers' devices; the share ``slow`` of them is slow."""
    count = round(slow * workers)
    return [SLOW] * count + [FAST] * (workers - count)


def panels_of(alone: Seen, calm: Seen, storm: Seen, service: VirtualService) -> list[Panel]:
    """Return the plots of waits, shares, moves and recoveries; ``service`` is that of ``storm``."""

    def waits(seen: Seen, name: str, after_s: float) -> list[tuple[float, float]]:
        return distribution([waited for at, waited in seen.waits[name] if at > after_s])

    after_s = RAMPED_S
    light, sample = "light step, fast", "sampler sample, fast"
    steps = sorted(count for name, count in calm.steps.items() if name.startswith("heavy"))
    moves = [(at, n + 1.0) for n, at in enumerate(service.moved_s)]
    models = accumulate(float(count) for _, count in service.deaths)
    lost = [(at, count) for (at, _), count in zip(service.deaths, models, strict=True)]
    return [
        Panel(
            "Share of requests that took at most so long",
            "seconds",
            {
                "light step, alone": waits(alone, light, 0.0),
                "light step": waits(calm, light, after_s),
                "light step, workers die": waits(storm, light, after_s),
                "sample of 64 tokens": waits(calm, sample, after_s),
            },
            log_x=True,
        ),
        Panel(
            "Steps of heavy tenants, the slowest first",
            "tenant",
            {"steps": [(float(n), float(count)) for n, count in enumerate(steps)]},
        ),
        Panel(
            "Models that changed their worker",
            "seconds",
            {"handed over": moves, "their worker died": lost},
        ),
        Panel(
            "Share of a dead worker's requests that had ended after so long",
            "seconds",
            {"requests": distribution(service.recoveries)},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0, help="Virtual seconds.")
    parser.add_argument("--slow", type=float, default=0.25, help="Share of slow devices.")
    parser.add_argument("--deaths", type=float, default=60.0, help="Mean seconds between deaths.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the tenants' habits.")
    parser.add_argument("--plots", type=Path, help="Draw the plots into this file.")
    parser.add_argument("--dry-run", action="store_true", help="Do not store the tables.")
    asked = parser.parse_args()
    if asked.seconds <= RAMPED_S + 1:
        parser.error(f"seconds is {asked.seconds:g}; requests count from {RAMPED_S:g} s on")
    alone = Seen()
    for kind in (FAST, SLOW):
        service = VirtualService([kind] * asked.workers)
        seen = simulate(service, {"light": asked.workers}, asked.seconds, seed=asked.seed)
        alone.waits |= seen.waits
    kinds = kinds_of(asked.workers, asked.slow)
    tenants = {name: round(habit.share * asked.tenants) for name, habit in HABITS.items()}
    tables, figures, runs = "", {}, []
    for deaths_s in (0.0, asked.deaths):
        service = VirtualService(kinds, deaths_s=deaths_s)
        seen = simulate(service, tenants, asked.seconds, seed=asked.seed)
        runs.append(seen)
        name = "while workers die" if deaths_s else "at scale"
        about = (
            f"`benchmarks/scale.py`: {asked.tenants:,} tenants on {asked.workers} simulated "
            f"workers ({asked.slow:.0%} slow) for {asked.seconds:g} s of virtual time; "
            f"{_rate(seen):.0f} requests a second, those sent after {RAMPED_S:g} s. "
            f"{len(service.deaths)} workers with {_lost(service)} models died, "
            f"{service.moves} models were handed over, {seen.failed} requests failed."
        )
        columns = ["request, device", "count", "median, s", "p99, s", "slowest, s"]
        columns += ["p99 alone, s", "p99 / p99 alone"]
        rows = rows_of(seen, alone, RAMPED_S)
        tables += table(f"Waits {name}", about, columns, rows)
        about = (
            "Over the whole simulation. A step is a gradient, an optimizer step and its samples."
        )
        columns = ["what", "least", "median", "most"]
        rows = shares_of(service, seen, asked.seconds)
        tables += table(f"Shares {name}", about, columns, rows)
        figures[name] = {
            "failed": seen.failed,
            "moves": service.moves,
            "deaths": len(service.deaths),
            "lost": _lost(service),
            "recoveries_s": np.quantile(service.recoveries or [0.0], (0.5, 0.99, 1)).tolist(),
        }
    publish(figures, tables, dry_run=asked.dry_run)
    if asked.plots:
        asked.plots.write_text(page(panels_of(alone, *runs, service)))


if __name__ == "__main__":
    main()
