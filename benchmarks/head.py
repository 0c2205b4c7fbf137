"""Compare the CPU time and memory of the chunked LM head with its two alternatives.

    python benchmarks/head.py
    python benchmarks/head.py --tokens 1024 --hidden 1024 --vocabulary 32768

All three compute logprobs, a clipped-ratio loss and its gradient with respect to the hidden
states. ``checkpoint`` is ``lax.map`` over the same chunks, each recomputed in the backward pass.
The CPU seconds are those of one thread on one core, the least of three. H3 is the id of the
acceptance figure in docs/performance.md.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from results import machine, publish, table
from side_by_side import limit_threads

from tuneserve_engine.backend.base import LOSS_NAMES
from tuneserve_engine.backend.jax.model.layers import rms_norm
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners
from tuneserve_engine.backend.jax.training.lm_head import HeadAdapters, LmHead, train_lm_head
from tuneserve_engine.backend.jax.training.losses import LossInputs

BLOCK, CHUNK = 64, 256
RANK = 8
EPS = 1e-6
LOW, HIGH = 0.8, 1.2
LIMIT = 0.85


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    args = parser.parse_args()
    limit_threads(1)

    case = _case(args.tokens, args.hidden, args.vocabulary)
    ours = _measured(_chunked, case)
    trained = _measured(_chunked, case | {"trained": jnp.ones(1, bool)})
    checkpoint = _measured(partial(_by_autodiff, chunk=CHUNK), case)
    full = _measured(partial(_by_autodiff, chunk=args.tokens), case)
    rows = [
        _row("H3", "head / checkpointed chunks", "cpu_ms", ours, checkpoint),
        _row("", "head, trained / checkpointed chunks", "cpu_ms", trained, checkpoint),
        _row("", "head / full logits", "cpu_ms", ours, full),
        _row("", "head / full logits", "temp_mb", ours, full),
    ]
    about = (
        f"`benchmarks/head.py --tokens {args.tokens} --hidden {args.hidden} --vocabulary "
        f"{args.vocabulary}`: chunks of {CHUNK}; {machine('jax', threads=1)}."
    )
    section = table("LmHead", about, list(rows[0]), [list(row.values()) for row in rows])
    publish({"head": rows}, section, dry_run=args.dry_run)


def _row(
    name: str, what: str, unit: str, this: dict[str, float], that: dict[str, float]
) -> dict[str, Any]:
    seen = this[unit] / that[unit]
    limit = {"limit": f"<= {LIMIT}", "kept": seen <= LIMIT} if name else {"limit": "", "kept": True}
    return {
        "id": name,
        "what": f"{what}, {'CPU time' if unit == 'cpu_ms' else 'temporary memory'}",
        "this": this[unit],
        "that": that[unit],
        "unit": unit.split("_")[1],
        "seen": seen,
        **limit,
    }


def _case(tokens: int, hidden: int, vocabulary: int) -> dict[str, Array]:
    random = np.random.default_rng(0)

    def normal(*shape: int, std: float = 1.0) -> Array:
        return jnp.asarray(std * random.standard_normal(shape), jnp.float32)

    return {
        "x": normal(tokens, hidden),
        "table": normal(vocabulary, hidden, std=0.02),
        "norm": jnp.ones(hidden),
        "targets": jnp.asarray(random.integers(0, vocabulary, tokens), jnp.int32),
        "old": -np.log(vocabulary) + normal(tokens, std=0.3),
        "advantages": normal(tokens),
        "a": normal(1, hidden, RANK),
        "b": normal(1, RANK, vocabulary, std=0.02),
        "trained": jnp.zeros(1, bool),
    }


def _chunked(case: dict[str, Array]) -> Any:
    """Run ``train_lm_head`` for one request."""
    tokens, hidden = case["x"].shape
    shape = (tokens // BLOCK, BLOCK)
    n = shape[0]

    def blocks(values: Any, dtype: Any = jnp.float32) -> Array:
        return jnp.broadcast_to(jnp.asarray(values, dtype), (tokens,)).reshape(shape)

    inputs = LossInputs(
        valid=blocks(True, bool),
        weights=blocks(0)[..., None],
        old_logprobs=blocks(case["old"]),
        advantages=blocks(case["advantages"]),
        clip_low=blocks(LOW),
        clip_high=blocks(HIGH),
        sequence_mask=blocks(0),
        beta=blocks(0),
        loss_id=blocks(LOSS_NAMES.index("ppo"), jnp.int32),
        segment_ids=blocks(0, jnp.int32),
    )
    owners = BlockOwners(jnp.zeros(n, jnp.int32), jnp.arange(n) == 0, jnp.ones(n, bool))
    a, b = case["a"], case["b"]
    return train_lm_head(
        LmHead(case["table"], case["norm"]),
        case["x"].reshape(*shape, hidden),
        case["targets"].reshape(*shape, 1),
        inputs,
        HeadAdapters(a, b, jnp.ones(1), case["trained"]),
        owners,
        jnp.int32(n),
        {"a": jnp.zeros_like(a)[None], "b": jnp.zeros_like(b)[None]},
        eps=EPS,
        chunk_blocks=CHUNK // BLOCK,
    )


def _by_autodiff(case: dict[str, Array], *, chunk: int) -> Any:
    return jax.value_and_grad(partial(_loss, case, chunk), has_aux=True)(case["x"])


def _loss(case: dict[str, Array], chunk: int, x: Array) -> tuple[Array, Array]:
    """Return the loss and the logprobs; if there is more than one chunk, they are recomputed."""

    def score(part: tuple[Array, Array]) -> Array:
        hidden, targets = part
        normed = rms_norm(hidden, case["norm"], eps=EPS)
        z = jax.lax.dot_general(normed, case["table"], (((1,), (1,)), ((), ())))
        chosen = jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(z, axis=1)

    if chunk == x.shape[0]:
        lp = score((x, case["targets"]))
    else:
        chunks = (x.reshape(-1, chunk, x.shape[1]), case["targets"].reshape(-1, chunk))
        lp = jax.lax.map(jax.checkpoint(score, prevent_cse=False), chunks).reshape(-1)
    ratio = jnp.exp(lp - case["old"])
    free, clipped = (r * case["advantages"] for r in (ratio, jnp.clip(ratio, LOW, HIGH)))
    return -jnp.minimum(free, clipped).sum(), lp


def _measured(
    function: Callable[[dict[str, Array]], Any], case: dict[str, Array]
) -> dict[str, float]:
    compiled = jax.jit(function).lower(case).compile()
    seconds = []
    for _ in range(4):  # the first one warms up
        start = time.process_time()
        jax.block_until_ready(compiled(case))
        seconds.append(time.process_time() - start)
    memory = compiled.memory_analysis()
    return {
        "cpu_ms": round(1e3 * min(seconds[1:]), 1),
        "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
    }


if __name__ == "__main__":
    main()
