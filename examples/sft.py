"""Fine-tune an adapter on conversations, with our own client.

``make run``, then ``TUNESERVE_API_KEY=tml-local .venv/bin/python examples/sft.py``
"""

import json
import random
from pathlib import Path

from tuneserve_client import Client, chat_datum, progress

ROWS = Path(__file__).with_name("rows.jsonl")  # {"messages": […]}, one per line
HELD_OUT = [{"role": "user", "content": "What colour is the sky?"}]
STEPS, BATCH, RANK = 16, 8, 8
LEARNING_RATE = 5e-3  # for the embedded model; real ones: 2e-4 or less


def main() -> None:
    """Print the loss before and after, the path of a checkpoint, and a streamed answer."""
    with Client(name="sft") as client:
        model = client.create_model(rank=RANK, seed=0)
        tokenizer = client.tokenizer()  # from the server: no hub is needed
        rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
        data = [chat_datum(tokenizer, row["messages"]) for row in rows]
        chosen = random.Random(0)
        losses = []
        steps = progress(range(STEPS), "training")
        for step in steps:
            batch = chosen.sample(data, BATCH)
            gradient = model.forward_backward(batch)
            model.optim_step(LEARNING_RATE * (1 - step / STEPS))  # queued behind it
            learnt = sum(datum.inputs["weights"].sum() for datum in batch)
            losses.append(gradient.result().loss / learnt)  # a loss is a sum; this is a mean
            steps.show(loss=losses[-1])
        print(f"loss per token {losses[0]:.2f} → {losses[-1]:.2f}")
        print("saved as", model.save("sft").result())

        sampler = model.save_sampler()
        print(HELD_OUT[0]["content"], "→ ", end="")
        for piece in sampler.stream(HELD_OUT, max_tokens=32, temperature=0):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
