"""Compare ``stable_reinforce`` with ``importance_sampling`` on the embedded model's sums.

The task is that of ``examples/rl_tinker.py``: the reward of a right sum is 1. Each loss trains with
several seeds, on samples of the newest weights and on samples of weights that are some steps old,
as asynchronous training has them. All runs are on one server, through the official SDK.
"""

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from contenders import wait_until_compiled
from plots import Panel, page
from results import commit_name, publish, table
from tinker import types

from tuneserve_server.cli.local_server import LocalServer

ROOT = Path(__file__).parents[1]
PLOT = ROOT / "docs" / "images" / "reinforce.svg"
LOSSES = ("importance_sampling", "stable_reinforce")
STEPS = 12


def task() -> Any:
    """Return the example's module."""
    path = ROOT / "examples" / "rl_tinker.py"
    spec = importlib.util.spec_from_file_location("rl_tinker", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RL = task()


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Return the example's datum, with the origin of its tokens."""
    made, size, name = RL.datum(prompt, sequence, advantage), len(prompt), sequence.sequence_id
    drawn = len(sequence.tokens)
    read = types.PromptProvenanceSpan
    inputs = [read(sequence_id=name, offset=0, length=size)]
    if drawn > 1:
        inputs.append(types.SampledProvenanceSpan(sequence_id=name, length=drawn - 1))
    targets = [types.SampledProvenanceSpan(sequence_id=name, length=drawn)]
    if size > 1:
        targets.insert(0, read(sequence_id=name, offset=1, length=size - 1))
    return made.with_provenance(inputs, targets)


def rewards(url: str, loss: str, seed: int, lag: int) -> list[float]:
    """Return the mean reward before each step and after the last.

    The samples of a step come from the weights ``lag`` steps before it, or from the first.
    """
    rng, means = random.Random(seed), []
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        rest = tinker.RestClient(base_url=url, api_key="tml-local")
        base_model = rest.get_server_capabilities().result().supported_models[0].model_name
        trainer = service.create_lora_training_client(base_model, rank=RL.RANK, seed=seed).result()
        tokenizer = trainer.get_tokenizer()
        samplers: deque[tinker.SamplingClient] = deque(maxlen=lag + 1)
        for step in range(STEPS + 1):
            saved = trainer.save_weights_and_get_sampling_client(
                record_stability_info=True
            ).result()
            samplers.append(saved)
            is_last = step == STEPS
            sampler = saved if is_last else samplers[0]
            prompts, groups, got = RL.roll_out(tokenizer, sampler, rng)
            means.append(float(got.mean()))
            better = got - got.mean(axis=1, keepdims=True)
            data = [datum(prompts[p], groups[p][s], better[p, s]) for p, s in np.argwhere(better)]
            if data and not is_last:
                trainer.forward_backward(data, loss)
                rate = RL.LEARNING_RATE * (1 - step / STEPS)
                trainer.optim_step(types.AdamParams(learning_rate=rate))
    return means


def panel(lag: int, curves: dict[str, list[list[float]]]) -> Panel:
    """Return the plot of the mean reward over all seeds, and of the best and the worst seed."""
    shown = Panel(f"samples {lag} steps old" if lag else "fresh samples", "step", steps=False)
    for loss, runs in curves.items():
        shown.lines[loss] = list(enumerate(map(statistics.mean, zip(*runs, strict=True))))
    for loss, runs in curves.items():
        shown.lines[f"{loss}, worst seed"] = list(enumerate(map(min, zip(*runs, strict=True))))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--dry-run", action="store_true", help="Store neither table nor plot.")
    asked = parser.parse_args()
    curves: dict[int, dict[str, list[list[float]]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as folder,
        LocalServer(Path(folder)) as server,
    ):
        wait_until_compiled(server)
        for lag in asked.lags:
            curves[lag] = {
                loss: [rewards(server.url, loss, seed, lag) for seed in range(asked.seeds)]
                for loss in LOSSES
            }
    rows = []
    for lag, by_loss in curves.items():
        for loss, runs in by_loss.items():
            last = [each[-1] for each in runs]
            first = statistics.mean(each[0] for each in runs)
            rows.append([loss, lag, first, statistics.mean(last), min(last), max(last)])
    about = (
        f"`benchmarks/reinforce.py`: {asked.seeds} seeds, {STEPS} steps; the mean reward before "
        "training, and after it the mean, the worst and the best seed."
    )
    columns = ["loss", "steps that samples are old", "before", "after", "worst", "best"]
    shown = table("Reward by loss", about, columns, rows)
    if not asked.dry_run:
        PLOT.write_text(page([panel(lag, each) for lag, each in curves.items()]))
    publish({"commit": commit_name(), "curves": curves}, shown, dry_run=asked.dry_run)


if __name__ == "__main__":
    main()
