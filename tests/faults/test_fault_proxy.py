"""The official SDK over a line that loses answers and repeats requests: every effect happens once.

The same tenants train twice, over a good line and over ``FaultProxy``. Every effect of a request on
a model's weights, moments or step count shows in its checkpoints, so these must have the same bits,
like every result. Each created object must exist once.
"""

import asyncio
import gc
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.faults.fault_proxy import FaultProxy
from tests.integration.test_sdk_wire import running_server
from tests.sdk import service_client
from tuneserve_engine.adapters import checkpoint
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.records import CheckpointRecord, ModelRecord, SessionRecord
from tuneserve_engine.store.sqlite.store import SqliteStore

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BASE = "tuneserve/fake"
TENANTS, ROUNDS, CHUNKS = 12, 3, 3
EFFECTS = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "asample")


@dataclass
class Run:
    """A tenant's results, and the paths of its checkpoints."""

    results: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def datum(*tokens: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": list(tokens[1:]),
            "weights": [0.1 * token for token in tokens[1:]],
        },
    )


class Tenant:
    """A client with one model. Its number decides everything that it does."""

    def __init__(self, url: str, key: str, number: int) -> None:
        self.number = number
        self.run = Run()
        self.url, self.key = url, key

    def train(self) -> Run:
        with service_client(self.url, self.key) as client:
            holder = client.holder
            config = holder.get_client_config().model_copy(update={"fwdbwd_max_chunk_len": 2})
            holder._client_config = config
            self.trainer = client.create_lora_training_client(
                BASE, rank=4, seed=self.number
            ).result()
            for turn in range(ROUNDS):
                self.step(turn)
                if turn % 2:
                    self.save_and_sample(turn)
        return self.run

    def step(self, turn: int) -> None:
        """Several requests in flight at once, in which the gradient's chunks cross."""
        data = [datum(self.number, turn, n, n + turn) for n in range(2 * CHUNKS)]
        gradient = self.trainer.forward_backward(data, "cross_entropy")
        step = self.trainer.optim_step(types.AdamParams(learning_rate=0.01 * (turn + 1)))
        saved = self.trainer.save_state(f"turn{turn}")
        output = gradient.result()
        logprobs = [each["logprobs"].tolist() for each in output.loss_fn_outputs]
        self.run.results += [logprobs, output.metrics, step.result().metrics]
        self.run.paths.append(saved.result().path)

    def save_and_sample(self, turn: int) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([self.number, turn])
        futures = [
            sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=seed))
            for seed in range(4)
        ]
        for future in futures:
            sequences = future.result().sequences
            self.run.results.append([(s.tokens, s.logprobs) for s in sequences])


def trained(url: str, name: str) -> list[Run]:
    """All tenants at once. ``name`` separates them from those of another run."""
    keys = [f"tml-{name}-{number}" for number in range(TENANTS)]
    with ThreadPoolExecutor(TENANTS) as pool:
        return list(pool.map(lambda at: Tenant(url, keys[at], at).train(), range(TENANTS)))


async def stored(data_dir: Path, run: Run) -> tuple[list[Any], dict[str, int]]:
    """The states that the tenant saved, to the bit, and the number of its records by kind."""
    store = await SqliteStore.open(data_dir / "store.db")
    try:
        records = [await store.get_record(CheckpointRecord, path) for path in run.paths]
        tenant = records[0].tenant
        states = [
            checkpoint.read_checkpoint(data_dir / "files" / record.file_id, BASE)
            for record in records
        ]
        counts = {
            kind.__name__: (await store.page_of_records(kind, tenant=tenant)).total
            for kind in (SessionRecord, ModelRecord, CheckpointRecord)
        }
    finally:
        await store.close()
    return [bits(state) for state in states], counts


def bits(state: AdapterState) -> Any:
    groups = (state.weights, state.first_moment, state.second_moment)
    arrays = [{name: tensor.tobytes() for name, tensor in group.items()} for group in groups]
    return state.config, state.step, arrays


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.mark.anyio
async def test_over_a_bad_line_each_request_has_one_effect_in_order(
    quiet: None, tmp_path: Path
) -> None:
    with contextmanager(running_server)(tmp_path) as server:
        good = await asyncio.to_thread(trained, server.url, "good")
        with FaultProxy(int(server.url.rsplit(":", 1)[1]), seed=0) as proxy:
            bad = await asyncio.to_thread(trained, proxy.url, "bad")
    for number in range(TENANTS):
        assert bad[number].results == good[number].results
        expected = await stored(tmp_path, good[number])
        assert await stored(tmp_path, bad[number]) == expected
        assert expected[1] == {"SessionRecord": 1, "ModelRecord": 1, "CheckpointRecord": ROUNDS}
        assert len({str(state) for state in expected[0]}) == ROUNDS  # each turn changed something
    check_line(proxy)


def check_line(proxy: FaultProxy) -> None:
    """Check that the line was as bad as intended."""
    sent = sum(proxy.counts[f"/api/v1/{path}"] for path in EFFECTS)
    assert sent > 200, proxy.counts
    assert proxy.disagreements == []
    for kind in ("dropped", "repeated", "delayed"):
        assert proxy.counts[kind] > 25, proxy.counts
    for model in {model for model, _ in proxy.arrivals}:
        first_seen = list(dict.fromkeys(seq for name, seq in proxy.arrivals if name == model))
        # Three chunks, a step and a save per turn, a sampler after every other turn.
        calls = [first_seen[at : at + CHUNKS] for at in range(0, len(first_seen), CHUNKS)]
        assert len(calls) == ROUNDS
        assert all(call[-1] == min(call) for call in calls), calls
