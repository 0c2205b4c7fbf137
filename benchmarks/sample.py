"""Sample from an adapter through the server, in the bare engine and with Hugging Face, by turns.

Hugging Face's ``generate`` runs on torch.
"""

import argparse
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare_engine import Bare, Tokens, random_tokens
from bench_model import Shape, write_model
from contenders import tenants, wait_until_compiled
from peft_peer import Peer
from results import machine, publish, table
from side_by_side import cpu_ratio, limit_threads, ratio, take_turns
from tinker import SamplingClient, types

from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_server.cli.local_server import LocalServer

CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
PROMPT, NEW = 128, 64
SEEDS = count(1)


def served(sampler: SamplingClient, prompts: list[Tokens]) -> Callable[[], int]:
    """Return a turn that sends one request per prompt, all at once."""
    inputs = [types.ModelInput.from_ints(prompt.tolist()) for prompt in prompts]

    def run() -> int:
        futures = [
            sampler.sample(each, 1, types.SamplingParams(max_tokens=NEW, seed=next(SEEDS), stop=[]))
            for each in inputs
        ]
        return sum(len(s.tokens) for future in futures for s in future.result().sequences)

    return run


def bare(engine: Bare, prompts: list[Tokens]) -> Callable[[], int]:
    def run() -> int:
        requests = [SamplingRequest(prompt, "bench", next(SEEDS), 1, NEW) for prompt in prompts]
        return sum(len(s.tokens) for r in engine.backend.sample(requests) for s in r.sequences)

    return run


def peer(model: Any, prompts: list[Tokens]) -> Callable[[], int]:
    inputs = torch.from_numpy(np.stack(prompts).astype(np.int64))

    def run() -> int:
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                top_k=0,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
            )
        return int(output[:, PROMPT:].numel())

    return run


def measure(folder: Path, rounds: int, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    model = folder / "bench"
    write_model(model)
    rows = []
    with LocalServer(folder, base_model=str(model)) as server:
        wait_until_compiled(server)
        engine = Bare.beside(folder, model, server.data_dir / "compiled")
        engine.create("bench", CONFIG)
        state = engine.backend.adapter_state("bench", optimizer=False)
        engine.backend.load_snapshot("bench", state)
        (tenant,) = tenants(server, 1, CONFIG, 0.0)
        sampler = tenant.sampler()
        generator = Peer(model, state, learning_rate=0.0).model.eval()
        for samples in (8, 16):
            prompts = [s[:-1] for s in random_tokens([PROMPT] * samples, Shape().vocab, seed=2)]
            contenders = {
                "server": served(sampler, prompts),
                "bare engine": bare(engine, prompts),
                "HF generate": peer(generator, prompts),
            }
            paces = take_turns(contenders, rounds=rounds, pids=(server.pid,))
            of, reference = paces["server"], paces["HF generate"]
            rows.append(
                {
                    "samples at once": samples,
                    **{name: pace.median for name, pace in paces.items()},
                    "server / HF": ratio(of, reference),
                    "server / HF, CPU time": cpu_ratio(of, reference),
                    "server / bare engine": ratio(of, paces["bare engine"]),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of each contender; default: all cores")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        rows = measure(Path(name), arguments.rounds, threads)
    about = (
        f"`benchmarks/sample.py --rounds {arguments.rounds}`: bench model with an adapter of rank "
        f"{CONFIG.rank}, prompts of {PROMPT} tokens, {NEW} new ones at temperature 1; "
        f"{machine('jax', 'torch', 'transformers', threads=threads)}. New tokens/s; medians."
    )
    section = table("Sampling", about, list(rows[0]), [list(row.values()) for row in rows])
    publish({"sampling": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
