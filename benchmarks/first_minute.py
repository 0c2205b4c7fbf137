"""Measure the steps of a tenant in the first minute of a worker without a cache, and later ones.

The worker compiles its programs ahead meanwhile. The tenant's first step waits for its own programs
and is listed apart; the later steps are those after all programs are compiled. ``--dry-run`` leaves
results.md as it is.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from bare_engine import random_tokens
from bench_model import Shape, write_model
from contenders import Tenant, tenants, wait_until_compiled
from results import machine, publish, table

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_server.cli.local_server import LocalServer

CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
DATUMS, TOKENS = 8, 128
DATA = Tenant.data(random_tokens([TOKENS] * DATUMS, Shape().vocab, seed=1))
MINUTE_S, LATER = 60.0, 20


def step(tenant: Tenant) -> float:
    """Return the seconds of one ``forward_backward`` and ``optim_step``."""
    started_s = time.perf_counter()
    tenant.submit(DATA, steps=True).loss()
    return time.perf_counter() - started_s


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds of the first step, and the medians of the first minute and later on."""
    write_model(folder / "model")
    with LocalServer(folder, base_model=str(folder / "model")) as server:
        (tenant,) = tenants(server, 1, CONFIG, 1e-3)
        ends_s = time.perf_counter() + MINUTE_S
        first_s = step(tenant)
        minute = []
        while time.perf_counter() < ends_s:
            minute.append(step(tenant))
        wait_until_compiled(server)
        later = [step(tenant) for _ in range(LATER)]
    return {
        "first_s": first_s,
        "steps": len(minute),
        "minute_s": statistics.median(minute),
        "slowest_s": max(minute),
        "later_s": statistics.median(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="Do not store the table.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        figures = measure(Path(name))
    rows = [
        ["first step, s", figures["first_s"]],
        [f"median of the first minute's {figures['steps']} steps, s", figures["minute_s"]],
        ["slowest of them, s", figures["slowest_s"]],
        [f"median of {LATER} later steps, s", figures["later_s"]],
        ["first minute / later", figures["minute_s"] / figures["later_s"]],
    ]
    setup = machine("jax", "tinker", threads=os.cpu_count() or 1)
    about = (
        f"`benchmarks/first_minute.py`: steps of {DATUMS} x {TOKENS} tokens, rank {CONFIG.rank}, "
        f"one tenant, a worker with an empty cache; {setup}."
    )
    publish(
        figures, table("The first minute", about, ["what", "seen"], rows), dry_run=arguments.dry_run
    )


if __name__ == "__main__":
    main()
