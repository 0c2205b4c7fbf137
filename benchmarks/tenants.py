"""Many tenants on one base model: what each further one costs.

Eight tenants with a datum each against one tenant with eight; more registered adapters than active
ones; the optimizer step of one adapter beside others; far more adapters than the device holds.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench_model import Shape, write_model
from contenders import Bare, Tenant, Work, random_tokens, tenants, train, wait_until_compiled
from results import machine, publish, table
from side_by_side import compared, limit_threads, take_turns

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.jax.adapters import adapter_bytes, target_shapes
from tuneserve_engine.backend.jax.models.weights import read_config
from tuneserve_server.local import LocalServer

CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
LEARNING_RATE = 1e-3
ACTIVE, TOKENS = 8, 128
STEPS = 8  # of one contender before it is the next one's turn
OPTIMIZER_STEPS = 5
SEQUENCES = random_tokens([TOKENS] * ACTIVE, Shape().vocab, seed=1)
DATA = Tenant.data(SEQUENCES)


@dataclass
class Place:
    """Where the model and the compiled programs are."""

    folder: Path

    @property
    def settings(self) -> dict[str, str]:
        cache = str(self.folder / "compiled")
        return {"base_model": str(self.folder / "bench"), "compile_cache": cache}

    @contextmanager
    def service(self, registered: int, **settings: str) -> Iterator[list[Tenant]]:
        """The tenants of a service of its own."""
        with tempfile.TemporaryDirectory(dir=self.folder) as home:
            limit = {"max_tenant_models": str(registered)}
            with LocalServer(Path(home), **self.settings, **limit, **settings) as server:
                wait_until_compiled(server)
                yield tenants(server, registered, CONFIG, LEARNING_RATE)

    def bare(self) -> Bare:
        folder = self.folder
        return Bare.beside(folder / "bare", folder / "bench", folder / "compiled", LEARNING_RATE)

    @property
    def eight_slots(self) -> dict[str, str]:
        """Settings of a device with memory for eight adapters, all of the lowest ranks."""
        shapes = target_shapes(read_config(self.folder / "bench"))
        size = ACTIVE * adapter_bytes(shapes, CONFIG.rank)
        slots = str(ACTIVE)
        return {"max_rank": "8", "request_slots": slots, "adapter_device_bytes": str(size)}


def each_one(active: Sequence[Tenant]) -> Work:
    """A datum for each tenant."""
    return [(tenant, [datum]) for tenant, datum in zip(active, DATA, strict=True)]


def one_or_eight_served(served: list[Tenant], rounds: int) -> Iterator[dict[str, Any]]:
    """Eight tenants with a datum each against one with eight, through the server."""
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
    """The same in the bare engine."""
    names = [f"t{i}" for i in range(ACTIVE)]
    for name in names:
        bare.create(name, CONFIG)
    eight = list(zip(names, (bare.data([s]) for s in SEQUENCES), strict=True))
    one = [("t0", bare.data(SEQUENCES))]
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
    """Steps of one adapter, beside so many others in all."""
    registered: list[str] = []

    def register(contender: str) -> None:
        wanted = int(contender.split()[0])
        while len(registered) > wanted:
            bare.backend.delete_adapter(registered.pop())
        while len(registered) < wanted:
            registered.append(f"o{len(registered)}")
            bare.create(registered[-1], CONFIG)
        bare.step([("o0", bare.data(SEQUENCES[:1]))])

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
    """Eight of many tenants against the only eight."""

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
    """All of many tenants, eight at a time, against always the same eight."""
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


def measure(folder: Path, rounds: int, crowd: int) -> list[dict[str, Any]]:
    write_model(folder / "bench")
    place = Place(folder)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crowd", type=int, default=1000, help="adapters on a device for eight")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        rows = measure(Path(name), arguments.rounds, arguments.crowd)
    about = (
        f"`benchmarks/tenants.py --rounds {arguments.rounds}`: bench model, rank {CONFIG.rank}, "
        f"datums of {TOKENS} tokens; {machine('jax', threads=threads)}. Medians of rounds in turns."
    )
    section = table("Tenants", about, list(rows[0]), [list(row.values()) for row in rows])
    publish({"tenants": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
