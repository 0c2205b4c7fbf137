"""Measure the loss on two old tasks after a third: OSFT and LoRA beside full training.

A small Qwen3 learns to copy and to reverse (torch). It is then adapted to a third task until its
loss on a fresh batch is 0.05. Torch's AdamW trains all weights, and the real engine trains
adapters, on the same batches in the same order, with the same betas and clip norm and no decay.
Each contender runs at every learning rate of its grid.

The limit is for OSFT and full training at the same rate. Two more comparisons say something else,
because full training at a low rate forgets little: ``fastest`` takes each contender at the rate
that needs the fewest steps, and ``kindest`` at the rate that forgets least. Rates that do not reach
0.05 within the limit of steps do not count.
"""

import argparse
import copy
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from results import machine, publish, table
from side_by_side import limit_threads

from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

LENGTH, SYMBOLS, LEARNT, LIMIT = 8, 16, 0.05, 0.6
TASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[:, ::-1],
    "shift": lambda x: (x + 1) % SYMBOLS,
    "swap": lambda x: x.reshape(-1, LENGTH // 2, 2)[:, :, ::-1].reshape(-1, LENGTH),
}
OLD, NEW = ("copy", "reverse"), ("shift", "swap")
RATES = {
    "full": (1e-4, 3e-4, 1e-3, 3e-3),
    "osft": (1e-3, 3e-3, 1e-2),
    "lora": (1e-3, 3e-3, 1e-2),
}


class Run(NamedTuple):
    """One adaptation that reached the loss."""

    rate: float
    steps: int
    forgotten: float  # mean loss on the old tasks


def drawn(task: str, count: int, *seed: int) -> np.ndarray:
    """Return sequences: the number of the task, symbols, and the task's answer to them."""
    number = list(TASKS).index(task)
    x = np.random.default_rng((number, *seed)).integers(0, SYMBOLS, (count, LENGTH))
    first = np.full((count, 1), SYMBOLS + number)
    return np.concatenate([first, x, TASKS[task](x)], axis=1)


def held_out(seed: int) -> np.ndarray:
    return np.concatenate([drawn(task, 64, seed, 2) for task in OLD])


def torch_loss(model: Any, sequences: np.ndarray) -> torch.Tensor:
    """Return the mean loss over the answers."""
    tokens = torch.from_numpy(sequences)
    logits = model(tokens[:, :-1]).logits[:, LENGTH:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -LENGTH:].flatten())


class Full:
    """A trainer of all weights of the model, with torch."""

    def __init__(self, model: Any, rate: float) -> None:
        self.model = copy.deepcopy(model)
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def gradients(self, sequences: np.ndarray) -> float:
        self.optimizer.zero_grad()
        loss = torch_loss(self.model, sequences)
        loss.backward()
        return loss.item()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def loss(self, sequences: np.ndarray) -> float:
        with torch.no_grad():
            return torch_loss(self.model, sequences).item()


class Ours:
    """A trainer of an adapter, with the engine."""

    def __init__(self, backend: JaxBackend, name: str, config: AdapterConfig, rate: float) -> None:
        self.backend, self.name, self.rank = backend, name, config.rank
        self.params = AdamwParams(rate, eps=1e-8, grad_clip_norm=1.0)
        backend.create_adapter(name, config)

    def gradients(self, sequences: np.ndarray) -> float:
        return self._run(sequences, forward_only=False)

    def step(self) -> None:
        (metrics,) = self.backend.optim_steps([(self.name, self.params)])
        if isinstance(metrics, Exception):
            raise metrics

    def loss(self, sequences: np.ndarray) -> float:
        return self._run(sequences, forward_only=True)

    def _run(self, sequences: np.ndarray, *, forward_only: bool) -> float:
        weights = np.zeros((2 * LENGTH, 1), np.float32)
        weights[LENGTH:] = 1 / (len(sequences) * LENGTH)
        tokens = sequences.astype(np.int32)
        data = [DecodedDatum(row[:-1], row[1:, None], weights, flat=True) for row in tokens]
        request = TrainingData("cross_entropy", {}, forward_only, data)
        (packed,) = pack(
            [PackingRequest(self.name, self.rank, request)], self.backend.static_shapes
        )
        result = self.backend.forward_backward(packed.batch)
        return unpack(packed, result.outputs, 0, request)[1]


def adapted(trainer: Full | Ours, task: str, seed: int, rate: float, most: int) -> Run | None:
    """Train until the loss is reached. Every batch is fresh, so its loss is on unseen data."""
    for step in range(most):
        if trainer.gradients(drawn(task, 32, seed, 1, step)) <= LEARNT:
            return Run(rate, step, trainer.loss(held_out(seed)))
        trainer.step()
    return None


def pretrained(seed: int, hidden: int) -> Any:
    """Return a model that has learnt the old tasks."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=SYMBOLS + len(TASKS),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        intermediate_size=2 * hidden,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    trainer = Full(transformers.Qwen3ForCausalLM(config), 3e-3)
    for step in range(2000):
        if trainer.gradients(np.concatenate([drawn(t, 32, seed, 0, step) for t in OLD])) < 0.005:
            return trainer.model
        trainer.step()
    raise RuntimeError("the old tasks are not learnt after 2,000 steps; try another --hidden")


def found(seed: int, hidden: int, task: str, most: int) -> dict[str, list[Run]]:
    """Return the runs that reached the loss, by contender."""
    model = pretrained(seed, hidden)
    print(f"seed {seed}: before, {torch_loss(model, held_out(seed)).item():.4f} on the old tasks")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        static_shapes = StaticShapes(64, block=16, chunk=128, requested_tokens=512)
        backend = JaxBackend(folder, name="tiny", tokenizer_id="none", static_shapes=static_shapes)
    rank = round(0.25 * hidden)
    configs = {
        "osft": AdapterConfig(
            rank, 0.0, 0, train_unembed=False, kind="osft", options={"unfreeze_ratio": "0.25"}
        ),
        "lora": AdapterConfig(8, 32.0, 0, train_unembed=False),
    }
    runs: dict[str, list[Run]] = {}
    for name, rates in RATES.items():
        for rate in rates:
            if name == "full":
                trainer: Full | Ours = Full(model, rate)
            else:
                trainer = Ours(backend, f"{name}-{rate}", configs[name], rate)
            run = adapted(trainer, task, seed, rate, most)
            print(f"seed {seed}, {task}, {name} at {rate}: {run}", flush=True)
            runs.setdefault(name, []).extend([run] if run else [])
    return runs


def at_rate(rate: float, runs: list[Run]) -> Run | None:
    return next((run for run in runs if run.rate == rate), None)


CHOICES: dict[str, Callable[[list[Run]], Run | None]] = {
    "each at its fastest rate": lambda runs: min(runs, key=lambda run: run.steps, default=None),
    "each at its kindest rate": lambda runs: min(runs, key=lambda run: run.forgotten, default=None),
    "both at 0.001": partial(at_rate, 1e-3),
    "both at 0.003": partial(at_rate, 3e-3),
}
JUDGED = {("osft", "both at 0.001"), ("osft", "both at 0.003")}


def rows_of(task: str, seeds: dict[int, dict[str, list[Run]]]) -> list[dict[str, Any]]:
    """Return the rows of every kind of adapter, relative to full training."""
    rows = []
    for how, choose in CHOICES.items():
        for name in ("osft", "lora"):
            both = [(choose(runs[name]), choose(runs["full"])) for runs in seeds.values()]
            pairs = [(ours, full) for ours, full in both if ours and full]
            ratios = [ours.forgotten / full.forgotten for ours, full in pairs]
            is_judged = (name, how) in JUDGED
            is_within = len(ratios) == len(seeds) and statistics.mean(ratios) <= LIMIT
            rows.append(
                {
                    "id": "O14" if is_judged else "",
                    "what": f"{task}: loss on the old tasks, {name} / full, {how}",
                    "by seed": ", ".join(f"{x:.2f}" for x in ratios) or "not learnt",
                    "rates": ", ".join(f"{ours.rate:g} / {full.rate:g}" for ours, full in pairs),
                    "steps": ", ".join(f"{ours.steps} / {full.steps}" for ours, full in pairs),
                    "limit": f"<= {LIMIT}" if is_judged else "",
                    "kept": not is_judged or is_within,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--new", choices=NEW, default=NEW[0], help="the third task")
    parser.add_argument("--most-steps", type=int, default=1000)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    given = parser.parse_args()
    threads = limit_threads(1)
    torch.set_num_threads(1)
    seeds = {
        seed: found(seed, given.hidden, given.new, given.most_steps) for seed in range(given.seeds)
    }
    rows = rows_of(given.new, seeds)
    about = (
        f"`benchmarks/forgetting.py --seeds {given.seeds} --hidden {given.hidden} --new "
        f"{given.new}`: two layers, {', '.join(OLD)}, then {given.new}; OSFT with an unfreeze "
        f"ratio of 0.25, LoRA of rank 8; {machine('jax', 'torch', threads=threads)}. {LIMIT} is "
        "for the mean over seeds."
    )
    section = table("Forgetting", about, list(rows[0]), [list(r.values()) for r in rows])
    publish({"forgetting": rows}, section, dry_run=given.dry_run)


if __name__ == "__main__":
    main()
