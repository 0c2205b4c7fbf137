"""Direct preference optimization with our own client: of two answers, prefer the one in capitals.

This program computes the loss in NumPy: eq. 7 of Rafailov et al. 2023, arXiv:2305.18290.

``make run``, then ``TUNESERVE_API_KEY=tml-local .venv/bin/python examples/dpo.py``
"""

import json
import random
from pathlib import Path

import numpy as np

from tuneserve_client import Client, Datum, Model, chat_datum, progress

PAIRS = Path(__file__).with_name("pairs.jsonl")  # {"prompt", "chosen", "rejected"}, one per line
BETA, HELD_OUT = 0.1, 8
STEPS, BATCH, RANK = 16, 12, 8
LEARNING_RATE = 2e-3  # for the embedded model; real ones: 2e-4 or less


def read(tokenizer) -> list[list[Datum]]:
    """Return the chosen and the rejected answer of each row."""
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    asked = [{"role": "user", "content": row["prompt"]} for row in rows]
    return [
        [
            chat_datum(tokenizer, [question, {"role": "assistant", "content": row[which]}])
            for which in ("chosen", "rejected")
        ]
        for question, row in zip(asked, rows, strict=True)
    ]


def with_reference(model: Model, pairs: list[list[Datum]]) -> list[list[Datum]]:
    """Add the logprobs of the untrained adapter, which equals the base model, to the pairs."""
    data = [datum for pair in pairs for datum in pair]
    for datum, logprobs in zip(data, model.forward(data).result().logprobs, strict=True):
        datum.inputs["reference"] = logprobs
    return pairs


def dpo(data: list[Datum], logprobs: list[np.ndarray]):
    """Return the sum of -log(sigmoid(margin)); margin = beta * (chosen moved - rejected moved)."""
    weights = [datum.inputs["weights"] for datum in data]  # 1 on the answers
    moved = [
        float(((now - datum.inputs["reference"]) * w).sum())
        for datum, now, w in zip(data, logprobs, weights, strict=True)
    ]
    margins = BETA * (np.array(moved[0::2]) - np.array(moved[1::2]))
    slopes = BETA / (1 + np.exp(margins))  # of the loss by the logprobs of the rejected answer
    gradients = [
        (-slopes[n // 2] if n % 2 == 0 else slopes[n // 2]) * w for n, w in enumerate(weights)
    ]
    figures = {"margin": float(margins.mean()), "right": float((margins > 0).mean())}
    return float(np.log1p(np.exp(-margins)).sum()), gradients, figures


def main() -> None:
    """Print the margin of held-out pairs before and after training, and an answer."""
    with Client(name="dpo") as client:
        model = client.create_model(rank=RANK, seed=0)
        pairs = with_reference(model, read(client.tokenizer()))
        chosen = random.Random(0)
        steps = progress(range(STEPS), "training")
        for step in steps:
            batch = chosen.sample(pairs[HELD_OUT:], BATCH)
            output = model.forward_backward_custom([d for pair in batch for d in pair], dpo)
            model.optim_step(LEARNING_RATE * (1 - step / STEPS))
            steps.show(**output.result().metrics)
        unseen = [datum for pair in pairs[:HELD_OUT] for datum in pair]
        _, _, figures = dpo(unseen, model.forward(unseen).result().logprobs)
        print(f"margin 0.00 → {figures['margin']:.2f}, the right way in {figures['right']:.0%}")
        asked = [{"role": "user", "content": "What colour is the sky?"}]
        print(asked[0]["content"], "→", model.save_sampler().chat(asked, temperature=0))


if __name__ == "__main__":
    main()
