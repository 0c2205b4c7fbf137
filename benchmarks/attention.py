"""Compare blockwise with dense masked attention of the same micro-batch; prints JSON.

    python benchmarks/attention.py

Both run forward and backward. ``of_dense`` is the processor time relative to dense attention, the
median over rounds in which both take turns. ``of_products`` is the share of its time that the
matrix products of the block pairs would take alone, at the pace of one large product. Temporary
memory is the memory that the compiled programs ask for.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from side_by_side import Pace, cpu_ratio, take_turns

from tuneserve_engine.backend.jax.attention.base import Attended, AttentionGradient, Visibility
from tuneserve_engine.backend.jax.attention.packed import attend_blocks, attend_blocks_backward

BLOCK, HEADS, KEY_HEADS, HEAD_DIM = 64, 8, 4, 64
PRODUCTS = 7  # of a pair of blocks: two forward, five backward
LEAST_TURN = 0.4  # seconds; the clock of processor time ticks every 0.01


class Case(NamedTuple):
    q: Array
    k: Array
    v: Array
    gradient: Array
    seen: Visibility


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures: dict[str, Any] = vars(args) | {"heads": f"{HEADS}/{KEY_HEADS} of {HEAD_DIM}"}
    for name, mean in {"one datum": args.tokens, "mean 200": 200, "mean 60": 60}.items():
        figures[name] = measured(case(args.tokens, mean), args.rounds)
    print(json.dumps(figures))


def case(tokens: int, mean: int) -> Case:
    """Return packed datums of half to one and a half times the mean length."""
    random = np.random.default_rng(mean)
    ends = np.minimum(np.cumsum(random.integers(mean // 2, mean * 3 // 2, tokens)), tokens)
    ends = np.unique(ends) if mean < tokens else np.array([tokens])
    begins = np.concatenate([[0], ends[:-1]])
    datum = np.repeat(np.arange(len(ends)), ends - begins)
    position = np.arange(tokens) - begins[datum]
    blocks = tokens // BLOCK
    seen = Visibility(
        jnp.asarray(datum.reshape(blocks, BLOCK), jnp.int32),
        jnp.asarray(position.reshape(blocks, BLOCK), jnp.int32),
        jnp.asarray(begins[datum[::BLOCK]] // BLOCK, jnp.int32),
        jnp.int32(blocks),
    )
    rows = HEADS // KEY_HEADS * BLOCK

    def draw(size: int) -> Array:
        shape = (blocks, KEY_HEADS, size, HEAD_DIM)
        return jnp.asarray(random.standard_normal(shape, np.float32))

    return Case(draw(rows), draw(BLOCK), draw(BLOCK), draw(rows), seen)


def blockwise(at: Case) -> tuple[Attended, AttentionGradient]:
    inputs = at.q, at.k, at.v
    into = Attended(jnp.zeros_like(at.q), jnp.zeros(at.q.shape[:3]))
    attended = attend_blocks(*inputs, at.seen, into)
    gradients = AttentionGradient(*map(jnp.zeros_like, inputs))
    return attended, attend_blocks_backward(*inputs, attended, at.gradient, at.seen, gradients)


def dense(at: Case) -> tuple[Array, tuple[Array, Array, Array]]:
    """Attend with one matrix of scores per head."""
    datum, position = at.seen.segment_ids.reshape(-1), at.seen.position.reshape(-1)
    sees = (datum[:, None] == datum) & (position[:, None] >= position)

    def attend(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("KGTH,KSH->KGTS", q, k) * HEAD_DIM**-0.5
        weights = jax.nn.softmax(jnp.where(sees, scores, -1e30))
        return jnp.einsum("KGTS,KSH->KGTH", weights, v)

    def by_head(x: Array) -> Array:
        split = x.reshape(x.shape[0], KEY_HEADS, -1, BLOCK, HEAD_DIM).transpose(1, 2, 0, 3, 4)
        return split.reshape(KEY_HEADS, x.shape[2] // BLOCK, -1, HEAD_DIM)

    q, k, v, gradient = (
        by_head(at.q),
        by_head(at.k)[:, 0],
        by_head(at.v)[:, 0],
        by_head(at.gradient),
    )
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(gradient)


def measured(at: Case, rounds: int) -> dict[str, Any]:
    programs = {"blocks": blockwise, "dense": dense}
    compiled = {name: jax.jit(run).lower(at).compile() for name, run in programs.items()}
    contenders = {name: repeated(run, at) for name, run in compiled.items()}
    square = jnp.ones((1024, 1024))
    product = jax.jit(jnp.matmul).lower(square, square).compile()
    contenders["product"] = repeated(product, square, square)
    paces = take_turns(contenders, rounds=rounds)
    start = np.asarray(at.seen.start)
    pairs = int((np.arange(len(start)) + 1 - start).sum())
    work = pairs * PRODUCTS * HEADS * BLOCK * BLOCK * HEAD_DIM / 1024**3
    temporary = {
        name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()
    }
    return {
        "of_dense": round(cpu_ratio(paces["dense"], paces["blocks"]), 3),
        "of_products": round(work * cpu_ratio(paces["blocks"], paces["product"]), 2),
        "block_pairs": pairs,
        "cpu_ms": {name: milliseconds(paces[name]) for name in compiled},
        "temporary_bytes": temporary,
    }


def repeated(run: Callable[..., Any], *inputs: Any) -> Callable[[], int]:
    """Return a turn of so many calls that it is long compared with the tick of the clock."""
    jax.block_until_ready(run(*inputs))
    started_s = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    calls = max(round(LEAST_TURN / (time.perf_counter() - started_s)), 1)

    def turn() -> int:
        for _ in range(calls):
            jax.block_until_ready(run(*inputs))
        return calls

    return turn


def milliseconds(pace: Pace) -> float:
    return round(1000 / statistics.median(pace.per_cpu_s), 1)


if __name__ == "__main__":
    main()
