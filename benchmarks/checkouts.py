"""Compare the servers of this checkout and of another: training, round trips and samples, by turns.

    git worktree add ../before COMMIT && make -C ../before setup
    python benchmarks/checkouts.py ../before

One client drives both through the SDK with equal data. The ratio is this checkout's pace over the
other's, the median over rounds.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from bare_engine import random_tokens
from bench_model import Shape, write_model
from contenders import Tenant, tenants, train, wait_until_compiled
from results import machine, publish, table
from sample import CONFIG, PROMPT, served
from side_by_side import compared, limit_threads, take_turns
from train import CASES, LEARNING_RATE, RANK, Case

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_server.cli.local_server import LocalServer

LEAST = 0.97
SAMPLES = 16
ROUND_TRIPS, ROUND_TRIP_TOKENS = 40, 32
DTYPES = ("float32", "bfloat16")


class Checkout(LocalServer):
    """The service of another checkout, run with its own virtual environment."""

    def __init__(self, folder: Path, checkout: Path, **settings: str) -> None:
        super().__init__(folder, **settings)
        self.program = checkout.resolve() / ".venv/bin/tuneserve"
        if not self.program.exists():
            raise SystemExit(f"{self.program} does not exist; run make setup in {checkout}")


def training(tenant: Tenant, case: Case, losses: list[float]) -> Callable[[], int]:
    """Return a turn of ``case.steps`` steps, which appends their losses to ``losses``."""
    data = tenant.data(random_tokens(case.lengths, Shape().vocab, seed=1))

    def run() -> int:
        losses.extend(loss for (loss,) in train([[(tenant, data)]] * case.steps))
        return sum(case.lengths) * case.steps

    return run


def compare_training(servers: Sequence[LocalServer], case: Case, rounds: int) -> dict[str, Any]:
    config = AdapterConfig(rank=RANK, alpha=32, seed=7, train_unembed=case.head)
    losses: tuple[list[float], list[float]] = ([], [])
    turns = [
        training(tenants(server, 1, config, LEARNING_RATE)[0], case, kept)
        for server, kept in zip(servers, losses, strict=True)
    ]
    row = compare(f"steps of {case.name}{', head' if case.head else ''}", servers, turns, rounds)
    # Later losses may part: training amplifies the last bits, above all those of bfloat16.
    first = [kept[0] for kept in losses]
    np.testing.assert_allclose(*first, rtol=1e-3, err_msg="the checkouts did different things")
    np.testing.assert_allclose(*losses, rtol=0.1, err_msg="the checkouts did different things")
    return row


def round_trips(tenant: Tenant) -> Callable[[], int]:
    """Return a turn of gradients of one datum, each sent when the one before has ended.

    Its pace is the inverse of the latency.
    """
    data = tenant.data(random_tokens([ROUND_TRIP_TOKENS], Shape().vocab, seed=3))

    def run() -> int:
        for _ in range(ROUND_TRIPS):
            tenant.submit(data, steps=False).loss()
        return ROUND_TRIPS

    return run


def compare_round_trips(servers: Sequence[LocalServer], rounds: int) -> dict[str, Any]:
    turns = [round_trips(tenants(each, 1, CONFIG, 0.0)[0]) for each in servers]
    return compare("round trips of one datum", servers, turns, rounds)


def compare_sampling(servers: Sequence[LocalServer], rounds: int) -> dict[str, Any]:
    sequences = random_tokens([PROMPT] * SAMPLES, Shape().vocab, seed=2)
    prompts = [tokens[:-1] for tokens in sequences]
    turns = [served(tenants(each, 1, CONFIG, 0.0)[0].sampler(), prompts) for each in servers]
    return compare(f"{SAMPLES} samples at once", servers, turns, rounds)


def compare(
    what: str, servers: Sequence[LocalServer], turns: Sequence[Callable[[], int]], rounds: int
) -> dict[str, Any]:
    names = ("this checkout", "the other")
    pids = tuple(server.pid for server in servers)
    paces = take_turns(dict(zip(names, turns, strict=True)), rounds=rounds, pids=pids)
    return compared(what, paces, LEAST)


def measure(other: Path, rounds: int, dtype: str) -> list[dict[str, Any]]:
    """Return the rows of one dtype."""
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        model = folder / "bench"
        write_model(model)
        settings = {"base_model": str(model), "dtype": dtype}
        for each in ("this", "other"):
            (folder / each).mkdir()
        with ExitStack() as stack:
            servers = (
                stack.enter_context(LocalServer(folder / "this", **settings)),
                stack.enter_context(Checkout(folder / "other", other, **settings)),
            )
            for server in servers:
                wait_until_compiled(server)
            rows = [compare_training(servers, case, rounds) for case in CASES]
            rows.append(compare_round_trips(servers, rounds))
            rows.append(compare_sampling(servers, rounds))
    return [{"dtype": dtype, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="directory of the other checkout, set up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, help="default: both, one after the other")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    dtypes = (arguments.dtype,) if arguments.dtype else DTYPES
    rows = [row for each in dtypes for row in measure(arguments.other, arguments.rounds, each)]
    about = (
        f"`benchmarks/checkouts.py {arguments.other} --rounds {arguments.rounds}`: bench model, "
        f"tokens/s through the SDK; {machine('jax', threads=threads)}. Medians of rounds in turns."
    )
    section = table("Two checkouts", about, list(rows[0]), [list(row.values()) for row in rows])
    publish({"checkouts": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
