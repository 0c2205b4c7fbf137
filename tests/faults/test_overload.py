"""T12: three tenants, and for ten seconds five times the work that the device can do.

Memory stays bounded, refusals are only 429 and 408, accepted requests run, and shares follow the
weights, within one batch of each. A tenant that stays within its share, with requests as large as
the floods', waits up to three times as long (p99) as when it is alone (p50).
"""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import pytest

from tests.faults.processes import Service, running_service
from tests.faults.slow_worker import BATCHES, CHUNK, TOKEN_S
from tests.server.conftest import create_model
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_server.access.auth import open_tenant

DATUMS, LENGTH = 4, 63
"""Datums and length of every request: half a chunk, so two tenants' requests can share it."""
PAYLOAD_BYTES = 400_000
"""Payload of every request. Most of it is input that its loss does not read."""
BATCH_S = CHUNK * TOKEN_S
CAPACITY = 2 / BATCH_S  # requests per second
FLOOD_S, OVERLOAD = 10.0, 5
WEIGHTS = {"tml-gold": 2.0, "tml-plain": 1.0, "tml-light": 1.0}
QUEUED = 8  # of one tenant


@dataclass
class Tenant:
    """One client with a model, over HTTP. ``statuses`` counts its answers."""

    key: str
    http: httpx.AsyncClient
    statuses: Counter[int]
    model_id: str = ""
    seq: int = 1
    results: list["asyncio.Task[float]"] = field(default_factory=list)

    async def post(self, path: str, **content: Any) -> httpx.Response:
        headers = {"X-API-Key": self.key, **content.pop("headers", {})}
        answer = await self.http.post(f"/api/v1{path}", headers=headers, **content)
        self.statuses[answer.status_code] += 1
        return answer

    async def start(self) -> None:
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        session_id = (await self.post("/create_session", json=session)).json()["session_id"]
        answer = await self.post("/create_model", json=create_model(session_id))
        self.model_id = (await self.result(answer.json()["request_id"])).json()["model_id"]

    async def submit(self) -> str | None:
        """The accepted request's id. None if it was refused: the next call sends it again."""
        headers = {"Content-Type": "application/x-protobuf"}
        body = gradient(self.model_id, self.seq)
        answer = await self.post("/forward_backward", content=body, headers=headers)
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            return None
        assert answer.status_code == 200, answer.text
        self.seq += 1
        request_id: str = answer.json()["request_id"]
        return request_id

    async def result(self, request_id: str) -> httpx.Response:
        while True:
            asked = {"request_id": request_id, "allow_metadata_only": True}
            answer = await self.post("/retrieve_future", json=asked)
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer

    async def trained(self, request_id: str) -> float:
        """Wait for the result, and return its loss."""
        answer = await self.result(request_id)
        output = wire.ForwardBackwardOutput.FromString(answer.content)
        return output.metrics["loss:sum"]

    async def flood(self, per_s: float, until_s: float) -> None:
        """Send on time whether or not the last one was accepted, and poll for each accepted one."""
        at_s = time.monotonic()
        while at_s < until_s:
            await asyncio.sleep(at_s - time.monotonic())
            request_id = await self.submit()
            if request_id is not None:
                self.results.append(asyncio.create_task(self.trained(request_id)))
            at_s += 1 / per_s

    async def step_s(self) -> float:
        """The seconds of one request, from its submission to its result."""
        started_s = time.monotonic()
        request_id = await self.submit()
        assert request_id is not None, "a tenant within its share was refused"
        await self.trained(request_id)
        return time.monotonic() - started_s


def gradient(model_id: str, seq: int) -> bytes:
    body = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn="cross_entropy")
    for _ in range(DATUMS):
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(LENGTH, "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense = np.ones(LENGTH, "<i8").tobytes()
        targets.dtype = wire.DTYPE_INT64
        datum.loss_fn_inputs["padding"].dense = bytes(PAYLOAD_BYTES // DATUMS)
    return body.SerializeToString()


@dataclass(frozen=True)
class Measured:
    idle_s: list[float]
    beside_s: list[float]
    statuses: Counter[int]
    offered: int
    accepted: int
    results: list[float]
    memory_bytes: list[int]


async def overload(service: Service) -> Measured:
    statuses: Counter[int] = Counter()
    limits = httpx.Limits(max_connections=None)
    base = f"http://127.0.0.1:{service.port}"
    async with httpx.AsyncClient(base_url=base, limits=limits, timeout=60, trust_env=False) as http:
        gold, plain, light = tenants = [Tenant(key, http, statuses) for key in WEIGHTS]
        for tenant in tenants:
            await tenant.start()
        idle_s = [await light.step_s() for _ in range(7)][1:]
        memory = [service.api_memory_bytes()]
        until_s = time.monotonic() + FLOOD_S
        rate = OVERLOAD * CAPACITY / 2
        floods = [asyncio.create_task(each.flood(rate, until_s)) for each in (gold, plain)]
        beside_s = []
        await asyncio.sleep(1)
        while time.monotonic() < until_s:
            beside_s.append(await light.step_s())
            memory.append(service.api_memory_bytes())
            await asyncio.sleep(BATCH_S * 1.5)  # so that it uses less than its share
        await asyncio.gather(*floods)
        results = await asyncio.gather(*gold.results, *plain.results)
        accepted = len(results)
        return Measured(
            idle_s, beside_s, statuses, int(2 * rate * FLOOD_S), accepted, results, memory
        )


@pytest.mark.alone
def test_five_times_the_work_affects_neither_memory_nor_shares_nor_a_light_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = json.dumps({open_tenant(key): weight for key, weight in WEIGHTS.items()})
    monkeypatch.setenv("TUNESERVE_TENANT_WEIGHTS", weights)
    with running_service(tmp_path, worker=False, max_tenant_jobs=QUEUED) as service:
        service.start_worker(Path(__file__).with_name("slow_worker.py"))
        measured = asyncio.run(overload(service))
    report(measured)
    assert measured.statuses.keys() <= {200, 408, 429}
    assert measured.statuses[429] > 0.5 * measured.offered
    # Every accepted request ran: the loss of one datum is the same in all of them.
    assert measured.accepted >= 0.7 * CAPACITY * FLOOD_S
    assert set(measured.results) == {measured.results[0]}
    grown = max(measured.memory_bytes) - measured.memory_bytes[0]
    assert grown < 32 * 2**20 < 0.2 * measured.offered * PAYLOAD_BYTES
    assert np.percentile(measured.beside_s, 99) <= 3 * median(measured.idle_s)
    check_shares(tmp_path / BATCHES)


def report(measured: Measured) -> None:
    grown = max(measured.memory_bytes) - measured.memory_bytes[0]
    beside_s, idle_s = measured.beside_s, measured.idle_s
    print(
        f"\n{measured.offered} offered, {measured.accepted} accepted, {dict(measured.statuses)}; "
        f"the API grew by {grown / 2**20:.0f} MiB\nlight tenant idle: p50 {median(idle_s):.3f} s; "
        f"beside the flood: p50 {median(beside_s):.3f} s, p99 {np.percentile(beside_s, 99):.3f} s "
        f"of {len(beside_s)}"
    )


def check_shares(path: Path) -> None:
    """While both floods had work, device seconds over weight stayed within a batch of each.

    Every batch has two requests of equal size, so each had half of the batch's seconds. A request
    alone takes as long as two, so the distance that the scheduler allows is a whole batch.
    """
    gold, plain = (open_tenant(key) for key in ("tml-gold", "tml-plain"))
    served: Counter[str] = Counter()
    longest_s, ahead_s = 0.0, [0.0]
    for line in path.read_text().splitlines():
        batch = json.loads(line)
        if batch["kind"] != "forward_backward" or not {gold, plain} <= set(batch["waiting"]):
            continue
        requests: dict[str, int] = batch["requests"]
        assert sum(requests.values()) == 2, batch
        served.update(requests)
        longest_s = max(longest_s, batch["seconds"])
        gold_s = requests.get(gold, 0) / 2 * batch["seconds"] / WEIGHTS["tml-gold"]
        plain_s = requests.get(plain, 0) / 2 * batch["seconds"] / WEIGHTS["tml-plain"]
        ahead_s.append(ahead_s[-1] + gold_s - plain_s)
    apart_s = max(ahead_s) - min(ahead_s)
    allowed_s = longest_s / WEIGHTS["tml-gold"] + longest_s / WEIGHTS["tml-plain"]
    print(
        f"{served[gold]} requests of gold were served, and {served[plain]} of plain; their device "
        f"seconds over weight were at most {apart_s:.3f} apart, of {allowed_s:.3f} allowed"
    )
    assert len(ahead_s) > 30
    assert apart_s <= allowed_s
