"""Sample under a JSON schema and freely, by turns, in the bare engine.

The tiny base model was never trained on JSON, so the schema rejects most of what it draws. An
adapter is trained on answers of the schema first, as a model that is asked for JSON would be.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from bare_engine import Bare, training_data
from results import machine, publish, table
from side_by_side import cpu_ratio, limit_threads, ratio, take_turns
from tokenizers import Tokenizer

from tuneserve_engine.backend.base import SampleResult, SamplingRequest
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.grammar import Grammar
from tuneserve_engine.core.hub import resolve_base_model
from tuneserve_engine.settings.common import TINY_MODEL

CONFIG = AdapterConfig(rank=32, alpha=32, seed=7, train_unembed=True)
NAMES = ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1800, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "year", "tags"],
    "additionalProperties": False,
}
FORM = Grammar("json_schema", json.dumps(SCHEMA))
UNLIKE = Grammar("regex", "[a-z]{1000}")
"""A form that takes hardly anything that either model draws: the worst neighbour."""
PROMPT, NEW = "Answer in JSON: ", 200
SEEDS = count(1)


def answer(choose: random.Random) -> str:
    tags = choose.sample(("logic", "music", "ships", "bugs", "graphs"), choose.randint(0, 3))
    return json.dumps(
        {"name": choose.choice(NAMES), "year": choose.randint(1800, 1999), "tags": tags}
    )


def train(engine: Bare, tokenizer: Tokenizer, steps: int) -> None:
    """Train the adapter "trained" on answers of the schema, each with its end."""
    choose, end = random.Random(0), engine.backend.info.eos_token_ids[0]
    engine.create("trained", CONFIG)
    for step in range(steps):
        texts = [[*tokenizer.encode(PROMPT + answer(choose)).ids, end] for _ in range(32)]
        data = training_data([np.array(each, np.int32) for each in texts])
        (loss,) = engine.step([("trained", data)])
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    state = engine.backend.adapter_state("trained", optimizer=False)
    engine.backend.load_snapshot("trained", engine.backend.exported(state))


def sampling(engine: Bare, request: SamplingRequest) -> Callable[[], int]:
    """Return a turn that samples the request."""

    def run() -> int:
        (result,) = engine.backend.sample([replace(request, seed=next(SEEDS))])
        return sum(len(drawn.tokens) for drawn in result.sequences)

    return run


def beside(engine: Bare, free: SamplingRequest, other: SamplingRequest) -> Callable[[], int]:
    """Return a turn that samples the first request until it ends, while the other one runs."""

    def run() -> int:
        asked = {"free": free, "other": other}
        asked = {name: replace(each, seed=next(SEEDS)) for name, each in asked.items()}
        while True:
            finished = engine.backend.sample_until(asked, lambda: True).finished
            if "free" in finished:
                result = finished["free"]
                assert isinstance(result, SampleResult)
                return sum(len(drawn.tokens) for drawn in result.sequences)
            asked = {name: each for name, each in asked.items() if name not in finished}

    return run


def measure(folder: Path, rounds: int, steps: int) -> list[dict[str, Any]]:
    model = resolve_base_model(TINY_MODEL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engine = Bare.beside(folder, model, folder / "compiled", learning_rate=3e-3)
    train(engine, tokenizer, steps)
    prompt = np.array(tokenizer.encode(PROMPT).ids, np.int32)
    ends = frozenset(engine.backend.info.eos_token_ids)
    rows = []
    for snapshot, name in (("trained", "trained on the form"), (None, "never trained on it")):
        free = SamplingRequest(prompt, snapshot, 0, 32, NEW, stop_tokens=ends)
        formed = replace(free, grammar=FORM)
        long = replace(free, num_samples=4, stop_tokens=frozenset())
        unlike = replace(long, grammar=UNLIKE)
        contenders = {
            "free": sampling(engine, free),
            "form": sampling(engine, formed),
            "free beside free": beside(engine, long, long),
            "free beside forms": beside(engine, long, unlike),
        }
        paces = take_turns(contenders, rounds=rounds)
        rows.append(
            {
                "model": name,
                **{each: pace.median for each, pace in paces.items()},
                "form / free": ratio(paces["form"], paces["free"]),
                "form / free, CPU time": cpu_ratio(paces["form"], paces["free"]),
                "beside forms / beside free": ratio(
                    paces["free beside forms"], paces["free beside free"]
                ),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of the adapter")
    parser.add_argument("--threads", type=int, help="threads of each contender; default: all cores")
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        rows = measure(Path(name), arguments.rounds, arguments.steps)
    about = (
        f"`benchmarks/forms.py --rounds {arguments.rounds} --steps {arguments.steps}`: the tiny "
        f"base model under a schema and freely; {machine('jax', 'llguidance', threads=threads)}. "
        "New tokens/s; medians."
    )
    section = table("Answers in a form", about, list(rows[0]), [list(row.values()) for row in rows])
    publish({"forms": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
