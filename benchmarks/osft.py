"""Compare OSFT's projections with one by a whole matrix (Gram): operations, memory, time.

Ids are those of the acceptance figures in docs/performance.md. The contenders take turns on one
thread. A weight has 1,024 directions, of which a quarter is trained. One weight is square, the
other has twice as many inputs. ``complement`` (shorter side) and ``masked`` (longer side) are the
engine's own formulas. ``factored`` is ``masked`` without the mask that lets one program serve every
rank.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from results import machine, publish, table
from side_by_side import Pace, limit_threads, take_turns

from tuneserve_engine.adapters.kinds.base import SvdFactors
from tuneserve_engine.adapters.kinds.osft import right

LAYERS, DIRECTIONS, RANK = 2, 1024, 256
SQUARE, WIDE = DIRECTIONS, 2 * DIRECTIONS


def gram(x: jax.Array, strong: jax.Array) -> jax.Array:
    return x - x @ (strong.mT @ strong)


def factored(x: jax.Array, strong: jax.Array) -> jax.Array:
    return x - (x @ strong.mT) @ strong


def case(inputs: int) -> dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]]:
    """Return the projections of V [L, r, M] by name, for a weight with ``inputs`` inputs M."""
    random = np.random.default_rng(0)
    drawn = random.standard_normal((inputs, DIRECTIONS))
    basis = np.linalg.qr(drawn)[0].T.astype(np.float32)
    v = jnp.asarray(np.broadcast_to(basis, (LAYERS, *basis.shape)))
    x = jnp.asarray(random.standard_normal((LAYERS, RANK, inputs)), jnp.float32)
    strong = v[:, RANK:]
    kept = (jnp.arange(DIRECTIONS) < RANK).astype(jnp.float32)
    on_device = v[:, :RANK] if inputs == SQUARE else v
    u = jnp.zeros((LAYERS, DIRECTIONS, RANK))
    ours = SvdFactors(u, jnp.zeros((LAYERS, RANK)), on_device, kept)
    return {
        "gram": (gram, (x, strong)),
        "factored": (factored, (x, strong)),
        "complement" if inputs == SQUARE else "masked": (right, (x, ours)),
    }


def figures(inputs: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the operations, temporary bytes and CPU time of each contender."""
    programs, turns = {}, {}
    for name, (project, given) in case(inputs).items():
        programs[name] = jax.jit(project).lower(*given).compile()
        turns[name] = partial(run, programs[name], given)
    paces = take_turns(turns, rounds=rounds)
    return {name: figures_of(program, paces[name]) for name, program in programs.items()}


def run(program: Any, given: tuple[Any, ...]) -> int:
    """Run long enough for the clock of processor time, which ticks a hundred times a second."""
    times = 4
    for _ in range(times):
        jax.block_until_ready(program(*given))
    return times


def figures_of(program: Any, pace: Pace) -> dict[str, float]:
    return {
        "operations": program.cost_analysis()["flops"],
        "temporary bytes": program.memory_analysis().temp_size_in_bytes,
        "CPU time": 1 / statistics.median(pace.per_cpu_s),
    }


def rows_of(shape: str, found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the rows of every contender, relative to the whole matrix."""
    rows = []
    for name in list(found)[1:]:
        limits = {
            "operations": ("O6", 0.14 if name == "complement" else 0.40),
            "temporary bytes": ("O7", 0.25),
        }
        for what, amount in found[name].items():
            seen = amount / found["gram"][what]
            line, limit = limits.get(what, ("", None))
            rows.append(
                {
                    "id": line,
                    "what": f"{shape}: {what}, {name} / gram",
                    "seen": f"{seen:.3f}",
                    "limit": "" if limit is None else f"<= {limit}",
                    "kept": limit is None or seen <= limit,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(1)
    rows = [
        *rows_of("1024 x 1024", figures(SQUARE, arguments.rounds)),
        *rows_of("1024 x 2048", figures(WIDE, arguments.rounds)),
    ]
    about = (
        f"`benchmarks/osft.py --rounds {arguments.rounds}`: {LAYERS} layers, {DIRECTIONS:,} "
        f"directions, {RANK} trained; {machine('jax', threads=threads)}. Medians in turns."
    )
    section = table("OSFT's projections", about, list(rows[0]), [list(r.values()) for r in rows])
    publish({"osft": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
