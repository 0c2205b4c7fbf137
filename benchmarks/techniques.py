"""Measure the gain from single techniques of the engine.

The techniques are the activations kept for the backward pass (``remat``), and adapters that are
loaded onto the device before their turn.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from bare_engine import Bare, random_tokens, training_data
from bench_model import Shape, write_model
from results import machine, publish, table
from side_by_side import cpu_ratio, limit_threads, ratio, take_turns

from tuneserve_engine.backend.jax.adapters.arrays import adapter_bytes, target_shapes
from tuneserve_engine.backend.jax.adapters.room import AdapterRoom
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.model.weights import read_config
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.backend_options import Remat
from tuneserve_engine.core.shapes import StaticShapes

CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
POLICIES: tuple[Remat, ...] = ("dots", "none", "attention", "full")
DATUMS, TOKENS = 8, 512
ACTIVE, REGISTERED, ROOM = 4, 16, 8
"""The adapters of a batch, all adapters, and the adapters that the device has room for."""


def engine(model: Path, remat: Remat = "dots", room: AdapterRoom | None = None) -> Bare:
    static_shapes = StaticShapes(Shape().context, rank_buckets=(8,))
    backend = JaxBackend(
        str(model), name="b", tokenizer_id="b", static_shapes=static_shapes, remat=remat, room=room
    )
    return Bare(backend, learning_rate=1e-3)


def policies(model: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare the gradients of 8 datums under each policy."""
    sequences = random_tokens([TOKENS] * DATUMS, Shape().vocab, seed=1)

    def contender(remat: Remat) -> Callable[[], int]:
        bare = engine(model, remat)
        bare.create("t", CONFIG)
        work = [("t", training_data(sequences))]

        def run() -> int:
            bare.gradients(work)
            return DATUMS * TOKENS

        return run

    paces = take_turns({remat: contender(remat) for remat in POLICIES}, rounds=rounds)
    reference = paces["full"]
    return [
        row(f"remat {name}", pace.median, "remat full", ratio(pace, reference), reference.median)
        | {"ratio, CPU time": cpu_ratio(pace, reference)}
        for name, pace in paces.items()
        if name != "full"
    ]


def prefetch(model: Path, rounds: int) -> dict[str, Any]:
    """Compare steps of 16 adapters, 4 at a time, on a device with room for 8."""
    size = ROOM * adapter_bytes(target_shapes(read_config(model)), CONFIG.rank)
    bare = engine(model, room=AdapterRoom(device_bytes=size))
    sequences = random_tokens([128] * ACTIVE, Shape().vocab, seed=1)
    names = [f"t{number}" for number in range(REGISTERED)]
    for name in names:
        bare.create(name, CONFIG)
    groups = [names[i : i + ACTIVE] for i in range(0, REGISTERED, ACTIVE)]
    data = [training_data([sequence]) for sequence in sequences]

    def contender(is_told: bool) -> Callable[[], int]:
        turns = cycle(zip(groups, [*groups[1:], groups[0]], strict=True))

        def run() -> int:
            for _ in groups:
                group, following = next(turns)
                if is_told:
                    bare.backend.prefetch([*group, *following])
                bare.step(list(zip(group, data, strict=True)))
            return REGISTERED * 128

        return run

    paces = take_turns({"told": contender(True), "not told": contender(False)}, rounds=rounds)
    told, silent = paces["told"], paces["not told"]
    return row(
        "adapters loaded ahead", told.median, "not ahead", ratio(told, silent), silent.median
    ) | {"ratio, CPU time": cpu_ratio(told, silent)}


def row(of: str, pace: float, to: str, found: float, reference: float) -> dict[str, Any]:
    return {"this": of, "tokens/s": pace, "that": to, "that one's": reference, "ratio": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        write_model(folder / "bench")
        rows = policies(folder / "bench", arguments.rounds)
        print(rows, file=sys.stderr)
        rows.append(prefetch(folder / "bench", arguments.rounds))
    about = (
        f"`benchmarks/techniques.py --rounds {arguments.rounds}`: bench model, bare engine, rank "
        f"{CONFIG.rank}; {machine('jax', threads=threads)}. Medians of rounds in turns."
    )
    section = table(
        "Single techniques", about, list(rows[0]), [list(each.values()) for each in rows]
    )
    publish({"techniques": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
