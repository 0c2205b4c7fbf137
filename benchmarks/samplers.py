"""Measure how soon a new snapshot is served by every worker that only samples, under load.

One worker trains, and others only sample. One tenant keeps the samplers busy. Another trains, saves
for sampling, and asks at once for more samples than stay together on one worker, so that each of
them has to read the new snapshot. The time is from the save's answer to the last of these samples.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import tinker
from results import machine, publish, table
from tinker import types

from tuneserve_engine.store.sqlite.placement import SEQUENCES_TOGETHER
from tuneserve_server.cli.local_server import LocalServer

SAMPLERS, SAVES, LOADS = 4, 100, 8
SAMPLES = SEQUENCES_TOGETHER + 2 * (SAMPLERS - 1)
TOKENS = 8
FAST = {"chunk_tokens": "64", "lease_ttl_s": "6"}
PROMPT = types.ModelInput.from_ints(list(range(5, 37)))
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(list(range(5, 69))),
    loss_fn_inputs={"target_tokens": list(range(6, 70)), "weights": [1.0] * 64},
)


@contextmanager
def samplers(server: LocalServer) -> Iterator[None]:
    """Run workers that only sample, all of them ready."""
    started = []
    for number in range(SAMPLERS):
        settings = FAST | {"data_dir": str(server.data_dir), "sample_only": "true"}
        settings["worker_name"] = f"sampler-{number}"
        variables = {f"TUNESERVE_{name.upper()}": value for name, value in settings.items()}
        with server.log.with_name(f"sampler-{number}.log").open("wb") as log:
            command = [sys.executable, "-m", "tuneserve_engine.worker"]
            started.append(subprocess.Popen(command, env=os.environ | variables, stderr=log))
    try:
        while len(_ready(server)) < SAMPLERS + 1:
            assert all(each.poll() is None for each in started), "a worker has ended"
            time.sleep(0.5)
        yield
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


def _ready(server: LocalServer) -> list[str]:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return [line for line in lines if line.startswith("tuneserve_ready{") and line.endswith(" 1.0")]


def sampled(server: LocalServer) -> list[float]:
    """Return the tokens that each sampler has drawn, once all have reported them."""
    time.sleep(float(FAST["lease_ttl_s"]))
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    told = [line for line in lines if line.startswith("tuneserve_tokens_sampled_total{")]
    return [float(line.split()[-1]) for line in sorted(told) if 'worker="sampler-' in line]


@contextmanager
def load(client: tinker.ServiceClient, base_model: str) -> Iterator[list[int]]:
    """Keep samples of one tenant running; yields the number of those that have ended."""
    sampler = client.create_sampling_client(base_model=base_model).result()
    ended, stopping = [0], threading.Event()

    def keep() -> None:
        params = types.SamplingParams(max_tokens=64, temperature=1.0)
        while not stopping.is_set():
            sampler.sample(PROMPT, num_samples=1, sampling_params=params).result()
            ended[0] += 1

    threads = [threading.Thread(target=keep) for _ in range(LOADS)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def reach(trainer: tinker.TrainingClient) -> float:
    """Train a step and save it; return the seconds until every sampler has served it."""
    trainer.forward_backward([DATUM], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    started_s = time.perf_counter()
    futures = [
        sampler.sample(
            PROMPT,
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=TOKENS, seed=number),
        )
        for number in range(SAMPLES)
    ]
    for future in futures:
        future.result()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="Do not store the table.")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name,
        LocalServer(Path(name), **FAST) as server,
        samplers(server),
    ):
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-reach")
        busy = tinker.ServiceClient(base_url=server.url, api_key="tml-busy")
        trainer = client.create_lora_training_client(base_model=server.base_model, rank=32).result()
        reach(trainer)
        before = sampled(server)
        idle = sorted(reach(trainer) for _ in range(SAVES))
        shares = [now - then for then, now in zip(before, sampled(server), strict=True)]
        with load(busy, server.base_model) as ended:
            loaded = sorted(reach(trainer) for _ in range(SAVES))
    least = min(shares) / TOKENS / SAVES
    figures = {"idle_s": idle, "loaded_s": loaded, "samples_beside": ended[0], "least": least}
    rows = [
        [name, statistics.median(found), found[int(0.99 * SAVES) - 1], found[-1]]
        for name, found in (("idle", idle), (f"{LOADS} samples running", loaded))
    ]
    setup = machine("jax", "tinker", threads=os.cpu_count() or 1)
    about = (
        f"`benchmarks/samplers.py`: seconds from a save's answer to the last of {SAMPLES} "
        f"samples of {TOKENS} tokens by {SAMPLERS} workers that only sample, beside one that "
        f"trains, all on one machine; {SAVES} saves, the embedded model, rank 32. The sampler with "
        f"the fewest of these samples drew {least:.1f} of each save; {setup}."
    )
    columns = ["samplers", "median", "p99", "slowest"]
    publish(
        figures,
        table("Snapshots that reach samplers", about, columns, rows),
        dry_run=arguments.dry_run,
    )


if __name__ == "__main__":
    main()
