"""The service as a contender of the benchmarks, through the official SDK.

The other contender is ``bare_engine``, which takes the same datums.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import tinker
from bare_engine import Tokens
from tinker import types

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_server.cli.local_server import LocalServer

IN_FLIGHT = 2
"""The steps that are submitted before the first is awaited, as the SDK's guide advises: the next
request is at the server when the device becomes free."""

OWNERS = 8
"""The number of API keys, each with its own session."""


LONGEST_START_S = 1800
PROMPT_FIGURES = {"lease_ttl_s": "2"}
"""Settings with which a worker reports its metrics three times in two seconds."""


def metric(server: LocalServer, name: str) -> float:
    """Return a metric of the service's worker, once the worker has had the time to report it."""
    time.sleep(float(PROMPT_FIGURES["lease_ttl_s"]))
    return _told(server, name)


def wait_until_compiled(server: LocalServer) -> None:
    """Wait until the worker has compiled its programs, which would slow everything else."""
    deadline_s = time.monotonic() + LONGEST_START_S
    while not _told(server, "ready"):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not compiled after {LONGEST_START_S} s; see {server.log}")
        time.sleep(0.05)


def _told(server: LocalServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    values = (line.split()[-1] for line in lines if line.startswith(f"tuneserve_{name}{{"))
    return float(next(values, 0.0))


class Tenant:
    """One model on a running service, trained through the SDK."""

    def __init__(self, trainer: tinker.TrainingClient, learning_rate: float) -> None:
        self._trainer = trainer
        self._adam = types.AdamParams(learning_rate=learning_rate)

    @staticmethod
    def data(sequences: Sequence[Tokens]) -> list[types.Datum]:
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": tokens[1:].tolist(),
                    "weights": [1.0] * (len(tokens) - 1),
                },
            )
            for tokens in sequences
        ]

    def submit(self, data: list[types.Datum], *, steps: bool) -> "Pending":
        """Submit a gradient and, with ``steps``, an optimizer step on it, without waiting."""
        gradient = self._trainer.forward_backward(data, "cross_entropy")
        return Pending(gradient, self._trainer.optim_step(self._adam) if steps else None)

    def sampler(self) -> tinker.SamplingClient:
        """Return a sampler of the model as it is now."""
        return self._trainer.save_weights_and_get_sampling_client().result()


class Pending:
    """The submitted requests of a tenant."""

    def __init__(self, gradient: object, step: object) -> None:
        self._gradient, self._step = gradient, step

    def loss(self) -> float:
        """Return the sum of -logprob over all targets, once everything is done."""
        if self._step is not None:
            self._step.result()
        return self._gradient.result().metrics["loss:sum"]


Work = Sequence[tuple[Tenant, list[types.Datum]]]
"""Tenants that submit at once, each a gradient of its datums."""


def train(rounds: Iterable[Work], *, steps: bool = True) -> list[list[float]]:
    """Run the rounds one after the other, ``IN_FLIGHT`` at a time; return the losses of each."""
    waiting: deque[list[Pending]] = deque()
    losses = []
    for work in rounds:
        waiting.append([tenant.submit(data, steps=steps) for tenant, data in work])
        if len(waiting) > IN_FLIGHT:
            losses.append([pending.loss() for pending in waiting.popleft()])
    return [*losses, *([pending.loss() for pending in each] for each in waiting)]


def tenants(
    server: LocalServer, count: int, config: AdapterConfig, learning_rate: float
) -> list[Tenant]:
    """Create models that start alike. Neighbours in the list have different owners, of eight."""
    services = [
        tinker.ServiceClient(base_url=server.url, api_key=f"tml-{owner}")
        for owner in range(min(count, OWNERS))
    ]
    found: list[Tenant] = []
    while len(found) < count:
        creating = [
            service.create_lora_training_client(
                base_model=server.base_model,
                rank=config.rank,
                seed=config.seed,
                train_unembed=config.train_unembed,
                user_metadata={"adapter": config.kind, **config.options},
            )
            for service in services[: count - len(found)]
        ]
        found += [Tenant(trainer.result(), learning_rate) for trainer in creating]
    return found
