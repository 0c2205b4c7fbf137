"""Measure cold and warm starts by turns, until every program is compiled.

A warm start finds the programs in the cache. The script also counts the programs that are compiled
after the start, over requests of all kinds.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from bare_engine import random_tokens
from bench_model import Shape, write_model
from contenders import PROMPT_FIGURES, Tenant, metric, wait_until_compiled
from results import machine, publish, table
from side_by_side import limit_threads
from tinker import types

from tuneserve_server.cli.local_server import LocalServer

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro")


def started_s(server: LocalServer) -> float:
    """Start the service, and return the time until everything was compiled."""
    began_s = time.perf_counter()
    server.start()
    wait_until_compiled(server)
    return time.perf_counter() - began_s


def cold_and_warm(folder: Path, model: Path, rounds: int) -> dict[str, list[float]]:
    """Start a service with a new data directory, stop it, and start it again."""
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for number in range(rounds):
        home = folder / f"round-{number}"
        home.mkdir()
        server = LocalServer(home, base_model=str(model), **PROMPT_FIGURES)
        for measured in times.values():
            try:
                measured.append(started_s(server))
            finally:
                server.stop()
    return times


def after_ready(folder: Path, model: Path, requests: int) -> int:
    """Return the number of compilations after ready, over a varied run."""
    with LocalServer(folder, base_model=str(model), **PROMPT_FIGURES) as server:
        wait_until_compiled(server)
        varied_run(server, requests)
        return int(metric(server, "compilations_after_ready_total"))


def varied_run(server: LocalServer, requests: int) -> None:
    """Vary lengths, numbers of datums, ranks, losses, hyper-parameters and sampling parameters.

    Each request also creates a new adapter.
    """
    random = np.random.default_rng(3)
    with tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as service:
        for number, rank in enumerate(
            itertools.islice(itertools.cycle((1, 3, 8, 20, 32)), requests)
        ):
            trainer = service.create_lora_training_client(server.base_model, rank=rank).result()
            lengths = random.integers(1, 600, random.integers(1, 17)).tolist()
            sequences = random_tokens(lengths, Shape().vocab, seed=number)
            trainer.forward_backward(Tenant.data(sequences), "cross_entropy").result()
            trainer.forward(Tenant.data(sequences[:1]), "cross_entropy").result()
            loss = POLICY_LOSSES[number % len(POLICY_LOSSES)]
            trainer.forward_backward([policy_datum(s) for s in sequences[:2]], loss).result()
            adam = types.AdamParams(
                learning_rate=float(random.uniform(0, 1e-3)), grad_clip_norm=1.0
            )
            trainer.optim_step(adam).result()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(
                max_tokens=int(random.integers(1, 20)),
                temperature=float(random.uniform(0, 1.5)),
                top_k=int(random.choice([-1, 5, 50])),
                top_p=float(random.choice([1.0, 0.9])),
            )
            prompt = types.ModelInput.from_ints(sequences[0].tolist())
            sampler.sample(prompt, int(random.integers(1, 5)), params).result()
            sampler.compute_logprobs(prompt).result()


def policy_datum(tokens: Any) -> types.Datum:
    n = len(tokens) - 1
    inputs = {"target_tokens": tokens[1:].tolist(), "logprobs": [-9.0] * n, "advantages": [0.5] * n}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20, help="models in the varied run")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        model = folder / "bench"
        write_model(model)
        times = cold_and_warm(folder, model, arguments.rounds)
        compilations = after_ready(folder / "round-0", model, arguments.requests)
    pairs = zip(times["warm"], times["cold"], strict=True)
    ratio = statistics.median(warm / cold for warm, cold in pairs)
    figures = {
        "cold_s": statistics.median(times["cold"]),
        "warm_s": statistics.median(times["warm"]),
        "warm / cold": ratio,
        "compilations after ready": compilations,
    }
    rows = [
        ["warm start / cold start", ratio, "<= 0.2", ratio <= 0.2],
        ["compilations after ready", compilations, 0, compilations == 0],
    ]
    about = (
        f"`benchmarks/compile.py --rounds {arguments.rounds} --requests {arguments.requests}`: "
        f"bench model; {machine('jax', threads=threads)}. Cold {figures['cold_s']:.1f} s, warm "
        f"{figures['warm_s']:.1f} s from the start of the processes until all is compiled."
    )
    section = table("Compilation", about, ["what", "seen", "limit", "kept"], rows)
    publish(figures, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
