"""Three tenants train three LoRA adapters at once on one shared base model: ``make demo``.

Everything is real: the service runs in separate processes, and each tenant is a thread with a
separate API key that drives the official ``tinker`` SDK over HTTP.
"""

import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import demo_view
import tinker
from tasks import HELD_OUT, TASKS, Task, prompt
from tinker import types

from tuneserve_server.cli.local_server import LocalServer
from tuneserve_server.cli.readiness import health_of

STEPS, BATCH, RANK, LEARNING_RATE = 48, 4, 16, 2e-3


def sample(client: tinker.SamplingClient, tokenizer, question: str) -> str:
    """Return the greedy answer to one question."""
    tokens = types.ModelInput.from_ints(tokenizer.encode(prompt(question)))
    params = types.SamplingParams(max_tokens=32, temperature=0.0)
    sequence = client.sample(tokens, 1, params).result().sequences[0]
    return tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()


def datum(tokenizer, question: str, answer: str) -> types.Datum:
    """Return one example with loss on the answer only. The targets are shifted by one here."""
    asked, answered = tokenizer.encode(question), tokenizer.encode(answer)
    tokens = asked + answered
    weights = [0.0] * (len(asked) - 1) + [1.0] * len(answered)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def train(url: str, base_model: str, task: Task, view: demo_view.View) -> None:
    """Run one tenant from start to finish."""
    with tinker.ServiceClient(base_url=url, api_key=f"tml-{task.name}") as service:
        trainer = service.create_lora_training_client(base_model, rank=RANK, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        view.say(task.name, "asking the base model")
        before = service.create_sampling_client(base_model=base_model).result()
        view.before(task.name, [sample(before, tokenizer, q) for q in HELD_OUT])
        examples = task.examples(seed=0)
        for _ in range(STEPS):
            data = [datum(tokenizer, *pair) for pair in islice(examples, BATCH)]
            gradient = trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
            weight = sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
            view.step(task.name, gradient.result().metrics["loss:sum"] / weight)
        after = trainer.save_weights_and_get_sampling_client().result()
        view.after(task.name, [sample(after, tokenizer, q) for q in HELD_OUT])


def tell_compilation(url: str, view: demo_view.View, ended: threading.Event) -> None:
    """Show how far the worker's compilation is, until it or the demo has ended."""
    while not ended.wait(0.5):
        models = health_of(url).get("base_models", [])
        warming = models[0].get("warming", "") if models else ""
        view.compiling(warming)
        if models and not warming:
            return


def shared_passes(log: Path) -> tuple[int, int]:
    """Return the number of training passes for several tenants, and of all training passes."""
    tenants = re.findall(r"forward_backward of (\d+) tenants", log.read_text())
    return sum(int(n) > 1 for n in tenants), len(tenants)


def main() -> None:
    """Run the demo; raise if any tenant fails."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tuneserve-demo-") as folder:
        view = demo_view.View([(task.name, task.description) for task in TASKS], STEPS)
        # Only the debug log has a line for every pass.
        served = LocalServer(Path(folder), log_level="debug")
        ended = threading.Event()
        print("starting the service: an API process, and a worker that loads the model ...")
        with served as server, view, ThreadPoolExecutor() as pool:
            pool.submit(tell_compilation, server.url, view, ended)
            tenants = [pool.submit(train, server.url, server.base_model, t, view) for t in TASKS]
            try:
                for tenant in as_completed(tenants):
                    tenant.result()
            finally:
                ended.set()
        view.summary(HELD_OUT, shared_passes(server.log), time.monotonic() - started_s)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at exit, the SDK's thread (0.38.0) aborts one process in forty
