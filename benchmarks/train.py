"""Train through the server, in the bare engine, and in HF + PEFT on torch, by turns.

All three train the same adapter on the same batches of the bench model with the same number of
threads, and must report the same losses. A step is a gradient and an AdamW step.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from bare_engine import Bare, Tokens, random_tokens, training_data
from bench_model import Shape, write_model
from contenders import PROMPT_FIGURES, metric, tenants, train, wait_until_compiled
from peft_peer import Peer, padded_tokens
from results import machine, publish, table
from side_by_side import Pace, cpu_ratio, limit_threads, ratio, take_turns

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_server.cli.local_server import LocalServer

RANK, LEARNING_RATE = 8, 2e-3
PRODUCTS = ((1024, 512, 1536), (256, 512, 1536))
MICRO_BATCH = 8
"""The rows of the peer's micro-batches for mixed lengths."""
SECONDS = ("device_seconds_total", "host_seconds_total")


@dataclass(frozen=True)
class Case:
    """A batch, and the number of steps that a contender takes on it in one turn."""

    name: str
    lengths: tuple[int, ...]
    steps: int
    head: bool = False

    @property
    def is_mixed(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def rows(self) -> int:
        return MICRO_BATCH if self.is_mixed else len(self.lengths)


def mixed_lengths(count: int, low: int, high: int) -> tuple[int, ...]:
    """Return log-uniform lengths."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(low), np.log(high), count)).round()
    return tuple(int(length) for length in lengths)


CASES = (
    Case("8 x 128", (128,) * 8, steps=4),
    Case("8 x 128", (128,) * 8, steps=4, head=True),
    Case("8 x 512", (512,) * 8, steps=2),
    Case("64 x 16 to 1,024", mixed_lengths(64, 16, 1024), steps=1),
)


@dataclass
class Setup:
    """The model's directory, the server and the bare engine."""

    folder: Path
    server: LocalServer
    bare: Bare


def measure(setup: Setup, case: Case, rounds: int) -> dict[str, Any]:
    """Return the paces of the contenders on one batch, and their losses."""
    sequences = random_tokens(case.lengths, Shape().vocab, seed=1)
    config = AdapterConfig(rank=RANK, alpha=32, seed=7, train_unembed=case.head)
    losses: dict[str, list[float]] = {"server": [], "bare engine": [], "HF + PEFT": []}
    steps = {
        "server": _served(setup.server, config, sequences, case.steps),
        "bare engine": _bare(setup.bare, config, sequences, case.steps),
        "HF + PEFT": _peer(setup, config, sequences, case),
    }

    def turn(name: str) -> Callable[[], int]:
        def run() -> int:
            losses[name] += steps[name]()
            return sum(case.lengths) * case.steps

        return run

    before = {name: metric(setup.server, name) for name in SECONDS}
    paces = take_turns(
        {name: turn(name) for name in steps}, rounds=rounds, pids=(setup.server.pid,)
    )
    device_s, host_s = (metric(setup.server, name) - before[name] for name in SECONDS)
    assert_same(losses)
    figures = {
        "batch": case.name,
        "head": case.head,
        **paddings(setup.bare, config, sequences, case),
        **{name: pace.median for name, pace in paces.items()},
        **ratios(paces),
        "host / device time": host_s / device_s,
        "loss per token, first and last": [
            losses["server"][i] / sum(case.lengths) for i in (0, -1)
        ],
    }
    print(figures, file=sys.stderr)
    return figures


def _served(
    server: LocalServer, config: AdapterConfig, sequences: list[Tokens], steps: int
) -> Callable[[], list[float]]:
    (tenant,) = tenants(server, 1, config, LEARNING_RATE)
    data = tenant.data(sequences)
    return lambda: [loss for (loss,) in train([[(tenant, data)]] * steps)]


def _bare(
    bare: Bare, config: AdapterConfig, sequences: list[Tokens], steps: int
) -> Callable[[], list[float]]:
    bare.create("train", config)
    data = training_data(sequences)
    return lambda: [bare.step([("train", data)])[0] for _ in range(steps)]


def _peer(
    setup: Setup, config: AdapterConfig, sequences: list[Tokens], case: Case
) -> Callable[[], list[float]]:
    setup.bare.create("start", config)
    start = setup.bare.backend.adapter_state("start", optimizer=False)
    peer = Peer(setup.folder, start, learning_rate=LEARNING_RATE)
    return lambda: [peer.step(sequences, rows=case.rows) for _ in range(case.steps)]


def assert_same(losses: dict[str, list[float]]) -> None:
    """Check that the contenders did the same work: their losses are equal and fall."""
    reference = np.array(losses["HF + PEFT"])
    for name, of_contender in losses.items():
        np.testing.assert_allclose(of_contender, reference, rtol=1e-3, err_msg=name)
    assert reference[-1] < 0.99 * reference[0], "nothing was learnt: any losses would agree"


def paddings(
    bare: Bare, config: AdapterConfig, sequences: list[Tokens], case: Case
) -> dict[str, Any]:
    """Return the tokens of the batch, and the positions that each side computes for them."""
    batches = [packed.batch for packed in bare.packed([("train", training_data(sequences))])]
    computed = bare.computed_tokens(batches)
    tokens = sum(case.lengths)
    padded = padded_tokens(sequences, case.rows)
    return {
        "tokens": tokens,
        "computed": computed,
        "computed / tokens": computed / tokens,
        "HF + PEFT, computed / tokens": padded / tokens,
    }


def ratios(paces: dict[str, Pace]) -> dict[str, float]:
    server, bare, peer = (paces[name] for name in ("server", "bare engine", "HF + PEFT"))
    return {
        "server / HF + PEFT": ratio(server, peer),
        "bare engine / HF + PEFT": ratio(bare, peer),
        "server / bare engine": ratio(server, bare),
        "server / HF + PEFT, CPU time": cpu_ratio(server, peer),
    }


def product_rates(rounds: int) -> list[dict[str, Any]]:
    """Return the speed of both libraries' matrix products alone in GFLOP/s: the ceilings."""
    return [_product_rate(*shape, rounds) for shape in PRODUCTS]


def _product_rate(m: int, k: int, n: int, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(s, np.float32) for s in ((m, k), (k, n)))
    torch_x, torch_y, xla_x, xla_y = (
        torch.from_numpy(x),
        torch.from_numpy(y),
        *map(jax.device_put, (x, y)),
    )
    times = max(200 * 1024 // m, 1)
    multiply = jax.jit(lambda x, y: x @ y)
    work = times * 2 * m * k * n

    def xla() -> int:
        for _ in range(times):
            multiply(xla_x, xla_y).block_until_ready()
        return work

    def by_torch() -> int:
        for _ in range(times):
            torch.mm(torch_x, torch_y)
        return work

    paces = take_turns({"XLA": xla, "torch": by_torch}, rounds=rounds)
    rates = {name: pace.median / 1e9 for name, pace in paces.items()}
    return {
        "product": f"[{m}, {k}] x [{k}, {n}]",
        **rates,
        "XLA / torch": rates["XLA"] / rates["torch"],
    }


def run(rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        model = folder / "bench"
        write_model(model)
        with LocalServer(folder, base_model=str(model), **PROMPT_FIGURES) as server:
            wait_until_compiled(server)
            bare = Bare.beside(folder, model, server.data_dir / "compiled", LEARNING_RATE)
            setup = Setup(model, server, bare)
            return {
                "threads": threads,
                "products": product_rates(rounds),
                "batches": [measure(setup, case, rounds) for case in CASES],
            }


def tables(figures: dict[str, Any], rounds: int) -> str:
    libraries = machine("jax", "torch", "transformers", "peft", threads=figures["threads"])
    about = (
        f"`benchmarks/train.py --rounds {rounds} --threads {figures['threads']}`: bench model, "
        f"rank {RANK} on all projections; {libraries}. Tokens/s; medians of rounds in turns."
    )
    columns = ["batch", "head", "server", "bare engine", "HF + PEFT"]
    shares = [
        "server / HF + PEFT",
        "server / HF + PEFT, CPU time",
        "server / bare engine",
        "host / device time",
    ]
    paddings = ["computed / tokens", "HF + PEFT, computed / tokens"]
    rows = [
        [row["batch"], "trained" if row["head"] else "frozen"]
        + [row[c] for c in (*columns[2:], *shares, *paddings)]
        for row in figures["batches"]
    ]
    paces = table("Training", about, [*columns, *shares, *paddings], rows)
    products = [list(product.values()) for product in figures["products"]]
    ceilings = table(
        "Matrix products alone",
        f"float32, GFLOP/s; {libraries}.",
        list(figures["products"][0]),
        products,
    )
    return paces + ceilings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of each contender; default: all cores")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(arguments.threads)
    figures = run(arguments.rounds, threads)
    publish(figures, tables(figures, arguments.rounds), dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
