"""Resume a training run whose process is killed in the middle, with the official SDK.

The SDK cannot fetch the results of another process; ``resume.py`` does that with our own client.

``make run``, then, with TINKER_BASE_URL=http://127.0.0.1:8410 TINKER_API_KEY=tml-local:
``.venv/bin/python examples/resume_tinker.py``
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import tinker
from tinker import types

ROWS = Path(__file__).with_name("rows.jsonl")
STEPS, SAVED_AT, BATCH = 8, 4, 8
LEARNING_RATE = 5e-3  # for the embedded model; real ones: 2e-4 or less


def batch(trainer: tinker.TrainingClient, step: int) -> list[types.Datum]:
    """Return the batch of a step; the number alone chooses it, so all processes agree."""
    tokenizer = trainer.get_tokenizer()
    rows = [json.loads(line)["messages"] for line in ROWS.read_text().splitlines()]
    chosen = [
        tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
        for messages in random.Random(step).sample(rows, BATCH)
    ]
    inputs = [types.ModelInput.from_ints(tokens[:-1]) for tokens in chosen]
    targets = [{"target_tokens": tokens[1:]} for tokens in chosen]  # for brevity, all is learnt
    return [
        types.Datum(model_input=i, loss_fn_inputs=t) for i, t in zip(inputs, targets, strict=True)
    ]


def train(trainer: tinker.TrainingClient, steps: range) -> list[float]:
    """Train for some steps and return their losses."""
    futures = []
    for step in steps:
        futures.append(trainer.forward_backward(batch(trainer, step), "cross_entropy"))
        trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE * (1 - step / STEPS)))
    return [future.result().metrics["loss:sum"] for future in futures]


def create(service: tinker.ServiceClient) -> tinker.TrainingClient:
    name = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    return service.create_lora_training_client(name, rank=8, seed=0).result()


def begin(notes: Path) -> None:
    """Run the first process. Only its notes and the state on the server survive it."""
    trainer = create(tinker.ServiceClient())
    losses = train(trainer, range(SAVED_AT))
    notes.write_text(json.dumps([losses, trainer.save_state("half-way").result().path]))
    trainer.forward_backward(batch(trainer, SAVED_AT), "cross_entropy")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Compare the run with one that was not killed."""
    with tempfile.TemporaryDirectory() as folder, tinker.ServiceClient() as service:
        notes = Path(folder, "notes.json")
        first = subprocess.run([sys.executable, __file__, str(notes)])
        print(f"the first process ended with status {first.returncode}")
        losses, path = json.loads(notes.read_text())
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        losses += train(resumed, range(SAVED_AT, STEPS))
        undisturbed = train(create(service), range(STEPS))
    print("losses", *(f"{loss:.3f}" for loss in losses))
    print("the same bits as without the kill:", losses == undisturbed)


if __name__ == "__main__":
    begin(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
