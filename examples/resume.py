"""Resume a training run whose process is killed in the middle, with our own client.

The first process trains, saves, sends one more gradient, and is killed before it sees the result.
The second process gets that result by its request id, and continues from the checkpoint.

``make run``, then ``TUNESERVE_API_KEY=tml-local .venv/bin/python examples/resume.py``
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tuneserve_client import Client, Datum, Model, chat_datum

ROWS = Path(__file__).with_name("rows.jsonl")
STEPS, SAVED_AT, BATCH = 8, 4, 8
LEARNING_RATE = 5e-3  # for the embedded model; real ones: 2e-4 or less


def batch(client: Client, step: int) -> list[Datum]:
    """Return the batch of a step; the number alone chooses it, so all processes agree."""
    rows = [json.loads(line)["messages"] for line in ROWS.read_text().splitlines()]
    chosen = random.Random(step).sample(rows, BATCH)
    return [chat_datum(client.tokenizer(), messages) for messages in chosen]


def train(client: Client, model: Model, steps: range) -> list[float]:
    """Train for some steps and return their losses."""
    futures = []
    for step in steps:
        futures.append(model.forward_backward(batch(client, step)))
        model.optim_step(LEARNING_RATE * (1 - step / STEPS))
    return [future.result().loss for future in futures]


def begin(notes: Path) -> None:
    """Run the first process. Only its notes and the state on the server survive it."""
    client = Client(name="resume")
    model = client.create_model(rank=8, seed=0)
    losses = train(client, model, range(SAVED_AT))
    path = model.save("half-way").result()
    under_way = model.forward_backward(batch(client, SAVED_AT))
    notes.write_text(json.dumps([losses, path, under_way.request_id]))
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(notes: Path) -> list[float]:
    """Run the second process, on another day, and return the losses of the whole run."""
    losses, path, request_id = json.loads(notes.read_text())
    with Client(name="resumed") as client:
        answer = client.future(request_id, "forward_backward").result()
        print(f"the result that the first process did not live to see: loss {answer.loss:.3f}")
        model = client.load_model(path)  # weights, moments and step count
        return losses + train(client, model, range(SAVED_AT, STEPS))


def main() -> None:
    """Compare the run with one that was not killed."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.json")
        first = subprocess.run([sys.executable, __file__, str(notes)])
        print(f"the first process ended with status {first.returncode}")
        losses = go_on(notes)
    with Client(name="undisturbed") as client:
        model = client.create_model(rank=8, seed=0)
        undisturbed = train(client, model, range(STEPS))
    print("losses", *(f"{loss:.3f}" for loss in losses))
    print("the same bits as without the kill:", losses == undisturbed)


if __name__ == "__main__":
    begin(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
