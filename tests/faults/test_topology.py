"""The services of the compose file, two APIs and two workers, under one script of the official SDK.

Requests go to one API and their polls to the other, and one worker is killed in between. The script
ends with the numbers that it gets from one server with SQLite, bit for bit.
"""

import gc
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.faults.fault_proxy import FaultProxy, Message, named
from tests.faults.topology import Topology
from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.cli.local_server import LocalServer
from tuneserve_server.cli.readiness import health_of

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BASE_MODEL = "tuneserve/tiny"
MODELS, TURNS, FATAL_TURN = 2, 6, 3
ADAM = types.AdamParams(learning_rate=1e-2)
PROMPT = types.ModelInput.from_ints(list(range(5, 15)))


class Front(FaultProxy):
    """A proxy in front of several API processes, as operators have one.

    Requests go to them in turn, and a poll goes to another API than its request. ``crossed`` counts
    the results fetched from each API by the API that had accepted the request.
    """

    def __init__(self, urls: list[str]) -> None:
        self._ports = [int(url.rsplit(":", 1)[1]) for url in urls]
        super().__init__(self._ports[0], seed=0)
        self.crossed: Counter[tuple[int, int]] = Counter()
        self._takers: dict[str, int] = {}
        self._turn = 0

    async def _carry(self, request: Message) -> tuple[bytes, bool]:
        taker = self._taker(request)
        self._turn += 1
        at = (self._turn if taker is None else taker + 1) % len(self._ports)
        answer = await self._deliver(request, self._ports[at])
        if taker is None and "request_id" in named(answer):
            self._takers.setdefault(named(answer)["request_id"], at)
        elif taker is not None and " 200 " in answer.start:
            self.crossed[taker, at] += 1
        return answer.encode(), True

    def _taker(self, request: Message) -> int | None:
        """The API that accepted the polled request. None for everything but polls."""
        if not request.path.endswith("/retrieve_future"):
            return None
        return self._takers[json.loads(request.body)["request_id"]]


def workers_at(url: str) -> int:
    """The number of living workers of the base model that the API knows."""
    (served,) = health_of(url)["base_models"]
    return int(served["workers"])


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 0], "weights": [1.0] * len(tokens)},
    )


def train(trainer: Any, number: int) -> Callable[[], list[Any]]:
    """Send one step, and return a call that waits for its results."""
    data = [datum(list(range(5 + number, 25))), datum(list(range(40, 52 + number)))]
    gradient = trainer.forward_backward(data, "cross_entropy")
    step = trainer.optim_step(ADAM)

    def wait() -> list[Any]:
        output = gradient.result()
        logprobs = [each["logprobs"].tolist() for each in output.loss_fn_outputs]
        return [logprobs, output.metrics, step.result().metrics]

    return wait


def sample(trainer: Any) -> list[Any]:
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=11)
    drawn = sampler.sample(PROMPT, 2, params).result().sequences
    scores = sampler.compute_logprobs(PROMPT).result()
    return [[(each.tokens, each.logprobs) for each in drawn], scores]


def script(url: str, key: str, disturb: Callable[[], None]) -> list[Any]:
    """All answers of the service at ``url`` to a tenant that trains, samples, saves and resumes.

    ``disturb`` is called while requests are in flight.
    """
    told: list[Any] = []
    with service_client(url, key) as client:
        trainers = [
            client.create_lora_training_client(BASE_MODEL, rank=4, seed=number).result()
            for number in range(MODELS)
        ]
        for turn in range(TURNS):
            running_samples = [train(trainer, number) for number, trainer in enumerate(trainers)]
            if turn == FATAL_TURN:
                disturb()
            told += [wait() for wait in running_samples]
        told += [sample(trainer) for trainer in trainers]
        saved = trainers[0].save_state("kept").result().path
        resumed = client.create_training_client_from_state_with_optimizer(saved).result()
        told += [train(resumed, 0)(), train(trainers[0], 0)()]
        assert told[-1] == told[-2]
    return told


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def test_two_apis_and_two_workers_equal_one_server_even_if_a_worker_dies(
    quiet: None, tmp_path: Path, compiled: Path
) -> None:
    quick = {"compile_cache": str(compiled), **QUICK}
    with LocalServer(tmp_path, **quick) as server:
        expected = script(server.url, "tml-any", lambda: None)
    folder = tmp_path / "topology"
    folder.mkdir()
    variables = {f"TUNESERVE_{name.upper()}": value for name, value in quick.items()}
    running = Topology(folder, apis=2, workers=2, **variables)
    with running as topology, Front(topology.urls) as front:
        for url in topology.urls:
            assert workers_at(url) == 2
        key = topology.apis[0].output_of("tuneserve", "keys", "create", "--tenant", "you")
        told = script(front.url, key, topology.workers[0].kill)
        assert told == expected
        assert not topology.workers[0].is_healthy()
        assert " is restored: " in topology.workers[1].log
        for url in topology.urls:
            assert workers_at(url) == 1
        assert [each.stop() for each in (topology.workers[1], *topology.apis)] == [0, 0, 0]
    assert set(front.crossed) == {(0, 1), (1, 0)}
    assert front.disagreements == []
