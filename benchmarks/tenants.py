"""Measure the cost of further tenants on one base model.

The comparisons: eight tenants with one datum each against one tenant with eight; more registered
adapters than active ones; the optimizer step of one adapter beside others; far more adapters than
the device holds; a batch of adapters of different kinds against LoRAs with as many parameters.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jax
from bare_engine import Bare, random_tokens, training_data
from bench_model import Shape, write_model
from contenders import Tenant, Work, tenants, train, wait_until_compiled
from results import machine, publish, table
from side_by_side import Pace, compared, limit_threads, take_turns

from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.backend.jax.adapters.arrays import adapter_bytes, target_shapes
from tuneserve_engine.backend.jax.model.weights import read_config
from tuneserve_engine.backend.jax.training.kind_programs import kind_step, step_specs
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_server.cli.local_server import LocalServer

CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
LEARNING_RATE = 1e-3
ACTIVE, TOKENS = 8, 128
STEPS = 8  # of one contender in one turn
OPTIMIZER_STEPS = 5
SEQUENCES = random_tokens([TOKENS] * ACTIVE, Shape().vocab, seed=1)
DATA = Tenant.data(SEQUENCES)

RANK_OF_KINDS = 32
LORA = replace(CONFIG, rank=RANK_OF_KINDS)
OSFT = replace(LORA, kind="osft", options={"form": "factors"})
"""For a weight [N, M], a LoRA trains rank * (N + M) numbers, and this kind rank more."""
MIXED = "2 LoRA + 2 OSFT"
BATCHES = {MIXED: [LORA, LORA, OSFT, OSFT], "4 LoRA": [LORA] * 4}
LEAST_OF_KINDS = 1 / 1.25
"""The lowest accepted pace: up to 1.25 times the time."""
DATUMS_OF_KINDS = (1, 4)
"""Datums of each tenant between two steps. A step's projections cost the same for any number."""


@dataclass
class Place:
    """The directory of the model and the compiled programs."""

    folder: Path

    @property
    def settings(self) -> dict[str, str]:
        cache = str(self.folder / "compiled")
        return {"base_model": str(self.folder / "bench"), "compile_cache": cache}

    @contextmanager
    def server(self, registered: int, **settings: str) -> Iterator[LocalServer]:
        """Start a new service."""
        with tempfile.TemporaryDirectory(dir=self.folder) as home:
            limit = {"max_tenant_models": str(registered)}
            with LocalServer(Path(home), **self.settings, **limit, **settings) as server:
                wait_until_compiled(server)
                yield server

    @contextmanager
    def service(self, registered: int, **settings: str) -> Iterator[list[Tenant]]:
        """Start a new service, and create its tenants."""
        with self.server(registered, **settings) as server:
            yield tenants(server, registered, CONFIG, LEARNING_RATE)

    def bare(self) -> Bare:
        folder = self.folder
        return Bare.beside(folder / "bare", folder / "bench", folder / "compiled", LEARNING_RATE)

    @property
    def decomposed(self) -> dict[str, str]:
        """The settings of a service that uses the bare engine's decomposition."""
        return {"decompositions": str(self.folder / "bare" / "decompositions")}

    @property
    def eight_slots(self) -> dict[str, str]:
        """The settings of a device with memory for eight adapters of the lowest rank bucket."""
        shapes = target_shapes(read_config(self.folder / "bench"))
        size = ACTIVE * adapter_bytes(shapes, CONFIG.rank)
        slots = str(ACTIVE)
        return {"max_rank": "8", "request_slots": slots, "adapter_device_bytes": str(size)}


def each_one(active: Sequence[Tenant]) -> Work:
    """Return one datum for each tenant."""
    return [(tenant, [datum]) for tenant, datum in zip(active, DATA, strict=True)]


def one_or_eight_served(served: list[Tenant], rounds: int) -> Iterator[dict[str, Any]]:
    """Compare eight tenants with one datum each with one tenant with eight, through the server."""
    for what, steps in (("gradients", False), ("steps", True)):

        def turn(work: Work, steps: bool = steps) -> int:
            train([work] * STEPS, steps=steps)
            return STEPS * ACTIVE * TOKENS

        contenders = {
            "8 tenants x 1 datum": lambda turn=turn: turn(each_one(served)),
            "1 tenant x 8 datums": lambda turn=turn: turn([(served[0], DATA)]),
        }
        yield compared(f"{what}, server, tokens/s", take_turns(contenders, rounds=rounds), 0.9)


def one_or_eight_bare(bare: Bare, rounds: int) -> Iterator[dict[str, Any]]:
    """Compare the same in the bare engine."""
    names = [f"t{i}" for i in range(ACTIVE)]
    for name in names:
        bare.create(name, CONFIG)
    eight = list(zip(names, (training_data([s]) for s in SEQUENCES), strict=True))
    one = [("t0", training_data(SEQUENCES))]
    for what, run in (("gradients", bare.gradients), ("steps", bare.step)):

        def turn(work: Any, run: Callable[[Any], Any] = run) -> int:
            for _ in range(STEPS):
                run(work)
            return STEPS * ACTIVE * TOKENS

        contenders = {
            "8 tenants x 1 datum": lambda turn=turn: turn(eight),
            "1 tenant x 8 datums": lambda turn=turn: turn(one),
        }
        yield compared(f"{what}, bare engine, tokens/s", take_turns(contenders, rounds=rounds), 0.9)
    for name in names:
        bare.backend.delete_adapter(name)


def optimizer(bare: Bare, rounds: int) -> Iterator[dict[str, Any]]:
    """Compare the steps of one adapter beside 2, 16 and 64 registered ones."""
    registered: list[str] = []

    def register(contender: str) -> None:
        wanted = int(contender.split()[0])
        while len(registered) > wanted:
            bare.backend.delete_adapter(registered.pop())
        while len(registered) < wanted:
            registered.append(f"o{len(registered)}")
            bare.create(registered[-1], CONFIG)
        bare.step([("o0", training_data(SEQUENCES[:1]))])

    def steps() -> int:
        for _ in range(OPTIMIZER_STEPS):
            bare.optim_steps(["o0"])
        return OPTIMIZER_STEPS

    names = [f"{count} registered" for count in (2, 16, 64)]
    paces = take_turns(dict.fromkeys(names, steps), rounds=10 * rounds, prepare=register)
    for name in names[1:]:
        pair = {name: paces[name], names[0]: paces[names[0]]}
        yield compared("optimizer steps of one adapter, bare engine, steps/s", pair, 0.9)


def more_registered(few: list[Tenant], many: list[Tenant], rounds: int) -> dict[str, Any]:
    """Compare eight of many tenants with eight that have the server alone."""

    def turn(active: list[Tenant]) -> int:
        train([each_one(active)] * STEPS)
        return STEPS * ACTIVE * TOKENS

    contenders = {
        f"{len(many)} registered": lambda: turn(many[:ACTIVE]),
        f"{len(few)} registered": lambda: turn(few),
    }
    paces = take_turns(contenders, rounds=rounds)
    return compared("steps of 8 tenants, server, tokens/s", paces, 0.95)


def by_turns(few: list[Tenant], many: list[Tenant], rounds: int) -> dict[str, Any]:
    """Compare all of many tenants, eight at a time, with always the same eight."""
    groups = cycle([many[i : i + ACTIVE] for i in range(0, len(many), ACTIVE)])
    count = max(len(many) // ACTIVE // rounds, STEPS)

    def turn(chosen: list[list[Tenant]]) -> int:
        train([each_one(group) for group in chosen])
        return count * ACTIVE * TOKENS

    contenders = {
        f"{len(many)} registered, by turns": lambda: turn(list(islice(groups, count))),
        f"{len(few)} registered": lambda: turn([few] * count),
    }
    paces = take_turns(contenders, rounds=rounds)
    return compared("steps of 8 tenants, device memory for 8, server, tokens/s", paces, 0.8)


def kinds_served(server: LocalServer, rounds: int) -> list[dict[str, Any]]:
    """Compare two LoRAs and two adapters of another kind with four LoRAs, through the server."""
    members = {
        name: [tenants(server, 1, config, LEARNING_RATE)[0] for config in configs]
        for name, configs in BATCHES.items()
    }

    def turn(name: str, count: int) -> int:
        work = [(member, DATA[:count]) for member in members[name]]
        train([work] * (STEPS // count))
        return STEPS * len(work) * TOKENS

    rows: list[dict[str, Any]] = []
    for count in DATUMS_OF_KINDS:
        turns = {name: partial(turn, name, count) for name in members}
        rows += of_kinds("server", count, take_turns(turns, rounds=rounds, pids=(server.pid,)))
    return rows


def kinds_bare(bare: Bare, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare the same in the bare engine; also return figures about each batch."""
    losses: dict[str, float] = {}
    for name, configs in BATCHES.items():
        for index, config in enumerate(configs):
            bare.create(f"{name} {index}", config)

    def turn(name: str, count: int) -> int:
        data = training_data(SEQUENCES[:count])
        work = [(f"{name} {index}", data) for index in range(len(BATCHES[name]))]
        for _ in range(STEPS // count):
            losses[name] = bare.step(work)[-1] / (count * TOKENS)
        return STEPS * len(work) * TOKENS

    def gradients(name: str) -> int:
        data = training_data(SEQUENCES[:1])
        work = [(f"{name} {index}", data) for index in range(len(BATCHES[name]))]
        for _ in range(STEPS):
            bare.gradients(work)
        return STEPS * len(work) * TOKENS

    paces = take_turns({name: partial(gradients, name) for name in BATCHES}, rounds=rounds)
    asked = f"gradients of rank {RANK_OF_KINDS} by {TOKENS} tokens of each, bare engine, tokens/s"
    rows = [compared(asked, paces, LEAST_OF_KINDS)]
    for count in DATUMS_OF_KINDS:
        turns = {name: partial(turn, name, count) for name in BATCHES}
        paces = take_turns(turns, rounds=rounds)
        rows += of_kinds("bare engine", count, paces)
    after = "loss per token in the end"
    about = []
    for name, configs in BATCHES.items():
        pace, last = paces[name], configs[-1]
        speed = {"median": pace.median, "mean": statistics.mean(pace.per_s)}
        found = {f"tokens/s, {which}": value for which, value in speed.items()}
        found |= {"its last tenant": last.kind, **step_memory(bare, last), after: losses[name]}
        about.append({"batch": name, **found})
    return rows, about


def of_kinds(where: str, count: int, paces: dict[str, Pace]) -> list[dict[str, Any]]:
    by_cpu = {name: Pace(pace.per_cpu_s) for name, pace in paces.items()}
    asked = f"steps of rank {RANK_OF_KINDS} by {count * TOKENS} tokens of each, {where}"
    return [
        compared(f"{asked}, tokens/s", paces, LEAST_OF_KINDS),
        compared("the same, tokens per second of processor time", by_cpu, LEAST_OF_KINDS),
    ]


def step_memory(bare: Bare, config: AdapterConfig) -> dict[str, float]:
    """Return the memory of the compiled optimizer step in MiB."""
    kind, shapes = kind_of(config), dict(bare.backend.info.target_shapes)
    specs = step_specs(kind, shapes, config.rank, bare.backend.static_shapes.max_rank)
    step = jax.jit(partial(kind_step, kind, shapes), donate_argnums=range(4), keep_unused=True)
    memory = step.lower(*specs).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes
    used += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    shared = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(specs[-1]))
    return {"its step's peak, MiB": used / 2**20, "of it shared, MiB": shared / 2**20}


def measure(place: Place, rounds: int, crowd: int) -> list[dict[str, Any]]:
    with place.service(ACTIVE) as few:
        rows = list(one_or_eight_served(few, rounds))
        with place.service(64) as many:
            rows.append(more_registered(few, many, rounds))
    bare = place.bare()
    rows += [*one_or_eight_bare(bare, rounds), *optimizer(bare, rounds)]
    with (
        place.service(ACTIVE, **place.eight_slots) as few,
        place.service(crowd, **place.eight_slots) as many,
    ):
        train(each_one(many[i : i + ACTIVE]) for i in range(0, len(many), ACTIVE))
        rows.append(by_turns(few, many, rounds))
    return rows


def measure_kinds(place: Place, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, about = kinds_bare(place.bare(), rounds)
    with place.server(ACTIVE, **place.decomposed) as server:
        rows += kinds_served(server, rounds)
    return rows, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crowd", type=int, default=1000, help="adapters, with memory for eight")
    parser.add_argument("--only-kinds", action="store_true", help="only compare the adapter kinds")
    parser.add_argument("--folder", type=Path, help="keeps model and programs for later runs")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    with _folder(arguments.folder) as name:
        place = Place(Path(name))
        write_model(place.folder / "bench")
        rows = [] if arguments.only_kinds else measure(place, arguments.rounds, arguments.crowd)
        rows_of_kinds, kinds = measure_kinds(place, arguments.rounds)
    rows += rows_of_kinds
    about = (
        f"`benchmarks/tenants.py --rounds {arguments.rounds}`: bench model, rank {CONFIG.rank} "
        f"unless stated, datums of {TOKENS} tokens; {machine('jax', threads=threads)}. "
        "Medians of rounds in turns."
    )
    of_kinds = "The same two batches in the bare engine, at the same rank and learning rate."
    section = table("Tenants", about, list(rows[0]), [list(row.values()) for row in rows])
    section += table("Kinds", of_kinds, list(kinds[0]), [list(row.values()) for row in kinds])
    publish({"tenants": rows, "kinds": kinds}, section, dry_run=arguments.dry_run)


def _folder(given: Path | None) -> AbstractContextManager[Any]:
    if given is not None:
        return nullcontext(given)
    return tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd())


if __name__ == "__main__":
    main()
