"""Every accepted request ends in an outcome, whatever happens around it."""

import asyncio
import random
import time
from typing import Any

import pytest

from tuneserve_engine.core.policies import SweepPolicy
from tuneserve_engine.core.records import ModelRecord, ModelStatus
from tuneserve_server.cleanup.unused_files import FEW

pytestmark = pytest.mark.anyio


class Tenant:
    """Sends what a client might send, in any order, and remembers the accepted requests."""

    def __init__(self, api: Any, bodies: Any, key: str, randomness: random.Random) -> None:
        self.api = api
        self.bodies = bodies
        self.key = key
        self.randomness = randomness
        self.accepted: list[str] = []
        self.sessions: list[str] = []
        self.models: dict[str, int] = {}  # the highest seq_id sent for each model
        self.samplers: list[str] = []
        self.paths: list[str] = ["tinker://nowhere/weights/x"]
        self.numbers = iter(range(10**6))

    async def send(self, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        if body is not None:
            options["json"] = body
        response = await self.api.call("POST", path, key=self.key, **options)
        assert response.status_code in (200, 404, 410), response.text  # 404: the model was refused
        answer: dict[str, Any] = response.json() if response.status_code == 200 else {}
        if "request_id" in answer:
            self.accepted.append(answer["request_id"])
        return answer

    async def act(self) -> None:
        if not self.sessions:
            self.sessions.append(await self.api.session(key=self.key))
        weights = {
            self.create: 4,
            self.load_new: 1,
            self.open_sampler: 1,
            self.train: 12 if self.models else 0,
            self.sample: 4 if self.samplers else 0,
            self.finish: 1,
        }
        (action,) = self.randomness.choices(list(weights), list(weights.values()))
        await action()

    async def create(self) -> None:
        session = self.randomness.choice(self.sessions)
        number = next(self.numbers)
        rank = self.randomness.choice([4, 4, 4, 999])
        body = self.bodies.create_model(session, number, lora_config={"rank": rank})
        if (await self.send("/create_model", body)).get("model_id"):
            self.models[f"{session}:train:{number}"] = 0

    async def load_new(self) -> None:
        session = self.randomness.choice(self.sessions)
        number = next(self.numbers)
        body = {"session_id": session, "model_seq_id": number, "optimizer": True}
        body["path"] = self.randomness.choice(self.paths)
        if (await self.send("/load_weights", body)).get("model_id"):
            self.models[f"{session}:train:{number}"] = 0

    async def open_sampler(self) -> None:
        body = {
            "session_id": self.randomness.choice(self.sessions),
            "sampling_session_seq_id": next(self.numbers),
            "base_model": "tuneserve/fake",
        }
        answer = await self.send("/create_sampling_session", body)
        if answer:
            self.samplers.append(answer["sampling_session_id"])

    async def train(self) -> None:
        """Send some requests in a random order, sometimes with one that never arrives."""
        model = self.randomness.choice(list(self.models))
        first = self.models[model] + 1
        seqs = list(range(first, first + self.randomness.randint(1, 5)))
        self.models[model] = seqs[-1]
        self.randomness.shuffle(seqs)
        if self.randomness.random() < 0.15:
            seqs.pop()
        for seq in seqs:
            await self.train_once(model, seq)

    async def train_once(self, model: str, seq: int) -> None:
        name = f"c{seq}"
        head = {"model_id": model, "seq_id": seq}
        session = model.partition(":")[0]
        number = next(self.numbers)
        choice = self.randomness.randrange(6)
        if choice < 2:
            tokens = self.randomness.choice([(1, 2, 3), (1, 99)])
            body = self.bodies.forward_backward(model, seq, tokens)
            await self.send("/forward_backward", content=body)
        elif choice == 2:
            await self.send("/optim_step", {**head, "adam_params": {}})
        elif choice == 3:
            await self.send("/save_weights", {**head, "path": name, "overwrite": True})
            self.paths.append(f"tinker://{model}/weights/{name}")
        elif choice == 4:
            await self.send(
                "/save_weights_for_sampler", {**head, "sampling_session_seq_id": number}
            )
            self.samplers.append(f"{session}:sample:{number}")
        else:
            path = self.randomness.choice(self.paths)
            await self.send("/load_weights", {**head, "path": path, "optimizer": False})

    async def sample(self) -> None:
        sampler = self.randomness.choice(self.samplers)
        await self.send("/asample", self.bodies.asample(sampler, next(self.numbers)))

    async def finish(self) -> None:
        session = self.sessions.pop(self.randomness.randrange(len(self.sessions)))
        await self.send(f"/sessions/{session}/finish", {"reason": {"type": "errored"}})


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_in_spite_of_dying_workers_ending_sessions_and_sweeps(
    api: Any, bodies: Any, seed: int
) -> None:
    """The run has gaps, bad data, ending sessions, dying workers with jobs in hand, and file
    sweeps.
    """
    randomness = random.Random(seed)
    await api.start_worker()
    tenants = [Tenant(api, bodies, f"tml-{name}", randomness) for name in "abc"]
    for turn in range(60):
        for tenant in tenants:
            await tenant.act()
        if turn % 7 == 3:
            await api.kill_worker()
        if turn % 7 == 4:
            await api.start_worker()
        if turn % 5 == 0:
            await api.services.unused.clean(older_than_s=0)
    await api.kill_workers()
    await api.start_worker()
    # Requests that are still held wait for one that will never arrive.
    await api.services.store.sweep(time.time() + 601, SweepPolicy(session_ttl_s=1e9))
    polls = [
        api.poll(request_id, key=tenant.key)
        for tenant in tenants
        for request_id in set(tenant.accepted)
    ]
    assert len(polls) > 200
    for response in await asyncio.gather(*polls):
        assert response.status_code == 200, response.text
    assert not await api.services.store._call(
        lambda tx: tx.execute("SELECT * FROM jobs WHERE state IN ('held', 'ready')").fetchall()
    )
    models = (await api.services.store.page_of_records(ModelRecord)).items
    assert ModelStatus.LOST not in {model.status for model in models}
    aside = api.services.files.set_aside_groups()
    # files of killed workers only, and none of routine work
    assert sum(map(len, aside.values())) <= FEW
    assert not any(model.diverged for model in models)
