"""Measure decoding in the bare engine: the gain from continuous batching and from shared prefill.

Decoding is also compared with its matrix products and the memory that they read, alone.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bare_engine import random_tokens
from bench_model import Shape, write_model
from results import machine, publish, table
from side_by_side import compared, limit_threads, take_turns

from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.model.weights import read_config
from tuneserve_engine.backend.jax.sampling.programs import STEPS_PER_DISPATCH
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

CONTEXT = 1024
CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
REQUESTS, MIXED_LANES = 64, 16
PROMPTS, NEW = (16, 512), (8, 256)
"""The shortest and longest prompts and numbers of new tokens of the mixed requests, log-uniform."""
LONG_PROMPT, SAMPLES, FEW = 512, 16, 16
WRITTEN, LIMIT_PROMPT = 64, 257
SEEDS = count(1)
CALLS = count()


def engine(model: Path, slots: int) -> JaxBackend:
    """Return the bare engine with a snapshot and all programs that it needs."""
    static_shapes = StaticShapes(CONTEXT, rank_buckets=(CONFIG.rank,))
    backend = JaxBackend(
        str(model),
        name="bench",
        tokenizer_id="bench",
        static_shapes=static_shapes,
        sample_rows=slots,
        compile_cache_dir=model.parent / "compiled",
    )
    backend.create_adapter("bench", CONFIG)
    backend.load_snapshot("bench", backend.adapter_state("bench", optimizer=False))
    return backend


def written(backend: JaxBackend, requests: Sequence[SamplingRequest]) -> int:
    """Sample the requests together, and return the number of new tokens."""
    results = backend.sample(requests)
    return sum(len(sequence.tokens) for result in results for sequence in result.sequences)


def request(prompt: Any, new: int, owner: str, samples: int = 1) -> SamplingRequest:
    """Return a request that shares prefilled prompts only with requests of its owner."""
    return SamplingRequest(prompt, "bench", next(SEEDS), samples, new, owner=owner)


def log_uniform(shortest: int, longest: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    drawn = np.exp(random.uniform(np.log(shortest), np.log(longest), REQUESTS))
    return [round(each) for each in drawn.tolist()]


def mixed(model: Path, rounds: int) -> dict[str, Any]:
    """Compare continuous with static batching.

    Continuous: all requests at once, so the next one takes each free decode slot. Static: batches
    of as many requests as decode slots. A batch pads its prompts to the longest, and waits for its
    longest sequence.
    """
    backend = engine(model, MIXED_LANES)
    lengths = [max(length - 1, 1) for length in log_uniform(*PROMPTS, seed=1)]
    prompts = random_tokens(lengths, Shape().vocab, seed=2)
    limits = log_uniform(*NEW, seed=3)

    def asked(prompts: Sequence[Any], limits: Sequence[int]) -> list[SamplingRequest]:
        owner = f"call {next(CALLS)}"
        return [request(p, new, owner) for p, new in zip(prompts, limits, strict=True)]

    def static() -> int:
        tokens = 0
        for first in range(0, REQUESTS, MIXED_LANES):
            batch = slice(first, first + MIXED_LANES)
            longest = max(map(len, prompts[batch]))
            padded = [np.resize(each, longest) for each in prompts[batch]]
            tokens += written(backend, asked(padded, limits[batch]))
        return tokens

    def continuous() -> int:
        return written(backend, asked(prompts, limits))

    paces = take_turns({"continuous": continuous, "static": static}, rounds=rounds)
    what = f"{REQUESTS} mixed requests, {MIXED_LANES} decode slots, new tokens/s"
    return compared(what, paces, 2.5)


def one_prefill(model: Path, rounds: int) -> dict[str, Any]:
    """Compare the samples of one request with as many requests of owners that share nothing."""
    backend = engine(model, SAMPLES)
    (prompt,) = random_tokens([LONG_PROMPT - 1], Shape().vocab, seed=4)

    def together() -> int:
        return written(backend, [request(prompt, FEW, f"call {next(CALLS)}", SAMPLES)])

    def apart() -> int:
        owners = [f"call {next(CALLS)}" for _ in range(SAMPLES)]
        return written(backend, [request(prompt, FEW, owner) for owner in owners])

    paces = take_turns({"one request": together, "16 that share nothing": apart}, rounds=rounds)
    what = f"{SAMPLES} samples of a prompt of {LONG_PROMPT}, {FEW} new each, new tokens/s"
    return compared(what, paces, 2.0)


def beside_the_limit(model: Path, slots: int, rounds: int) -> dict[str, Any]:
    """Compare decoding alone, after prefill, with its limit.

    The limit computes every product of a step, with an adapter for each decode slot, and reads the
    keys and values. It does nothing else.
    """
    backend = engine(model, slots)
    prompts = random_tokens([LIMIT_PROMPT - 1] * slots, Shape().vocab, seed=5)

    def decode() -> int:
        return written(backend, [request(each, WRITTEN, "reader") for each in prompts])

    contenders = {"decoding": decode, "its products": products(model, slots)}
    paces = take_turns(contenders, rounds=rounds)
    what = f"{slots} decode slots behind prompts of {LIMIT_PROMPT} tokens, new tokens/s"
    return compared(what, paces, 0.6)


def products(model: Path, slots: int) -> Callable[[], int]:
    """Return a turn with the products of as many steps as ``decode`` takes, for as many slots."""
    config = read_config(model)
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    random = np.random.default_rng(6)

    def array(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape, np.float32) * 0.02)

    cached = LIMIT_PROMPT + WRITTEN // 2
    layers = []
    for _ in range(config.layers):
        shapes = {name: s[1:] for name, s in target_shapes(config).items() if len(s) == 3}
        weights = {name: array(*shape) for name, shape in shapes.items()}
        a = {name: array(slots, shape[0], CONFIG.rank) for name, shape in shapes.items()}
        b = {name: array(slots, CONFIG.rank, shape[1]) for name, shape in shapes.items()}
        keys, values = (array(slots, kv_heads, cached, width) for _ in range(2))
        layers.append((weights, a, b, keys, values))
    head = array(config.hidden, config.vocab_size)

    def dense(x: Any, layer: Any, name: str) -> Any:
        weights, a, b, *_ = layer
        low = jnp.einsum("bd,bdr->br", x, a[name])
        return x @ weights[name] + jnp.einsum("br,brf->bf", low, b[name])

    def attended(q: Any, layer: Any) -> Any:
        grouped = q.reshape(slots, kv_heads, heads // kv_heads, width)
        scores = jnp.einsum("bkgh,bksh->bkgs", grouped, layer[3])
        return jnp.einsum("bkgs,bksh->bkgh", scores, layer[4]).reshape(slots, heads * width)

    def step(x: Any, layers: Any, head: Any) -> Any:
        for layer in layers:
            q, k, v = (dense(x, layer, name) for name in ("q_proj", "k_proj", "v_proj"))
            x = x + dense(attended(q + jnp.tile(k + v, heads // kv_heads), layer), layer, "o_proj")
            inner = dense(x, layer, "gate_proj") * dense(x, layer, "up_proj")
            x = x + dense(inner, layer, "down_proj")
        return x + (x @ head)[:, : x.shape[1]]

    @jax.jit
    def dispatch(x: Any, layers: Any, head: Any) -> Any:
        steps = jnp.arange(STEPS_PER_DISPATCH)
        return jax.lax.scan(lambda x, _: (step(x, layers, head), None), x, steps)[0]

    x = array(slots, config.hidden)

    def run() -> int:
        done = x
        for _ in range(WRITTEN // STEPS_PER_DISPATCH):
            done = jax.block_until_ready(dispatch(x, layers, head))
        del done
        return WRITTEN * slots

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        model = Path(name) / "bench"
        write_model(model)
        rows = [
            mixed(model, arguments.rounds),
            one_prefill(model, arguments.rounds),
            *(beside_the_limit(model, slots, arguments.rounds) for slots in (16, 64)),
        ]
    about = (
        f"`benchmarks/decode.py --rounds {arguments.rounds}`: bench model with an adapter of rank "
        f"{CONFIG.rank}, bare engine; {machine('jax', threads=threads)}. Prompts of "
        f"{PROMPTS[0]} to {PROMPTS[1]} tokens and {NEW[0]} to {NEW[1]} new ones, log-uniform, are "
        "mixed. A static batch pads its prompts to the longest and waits for the longest. Medians "
        "of rounds in turns."
    )
    section = table("Decoding", about, list(rows[0]), [list(each.values()) for each in rows])
    publish({"decoding": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
