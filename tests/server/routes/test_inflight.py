"""Inflight sampling sessions: all of a model sample its newest inflight save."""

import time
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import asample
from tests.server.routes.test_checkpoints import saved
from tests.server.test_errors import assert_failure
from tests.server.transfer.test_peft_upload import left
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.policies import SweepPolicy

pytestmark = pytest.mark.anyio


class Run:
    """A model with its training steps, which change every logprob of the fake backend."""

    def __init__(self, service: Any, session: str, model: str) -> None:
        self.service, self.session, self.model = service, session, model
        self.seq, self.number = 0, 0

    @classmethod
    async def made(cls, service: Any) -> "Run":
        session = await service.session()
        return cls(service, session, await service.model(session))

    async def step(self) -> None:
        await self.service.output(await self.service.forward_backward(self.model, self.seq + 1))
        step = {"model_id": self.model, "adam_params": {"learning_rate": 0.1}}
        await self.service.result(
            await self.service.post("/optim_step", {**step, "seq_id": self.seq + 2})
        )
        self.seq += 2

    async def save(self, kind: str = "inflight") -> str:
        """The sampling session of an unnamed save."""
        result = await self.service.result(await self.send(kind))
        session: str = result["sampling_session_id"]
        return session

    async def send(self, kind: str = "inflight", **fields: Any) -> Any:
        self.seq, self.number = self.seq + 1, self.number + 1
        body = {"model_id": self.model, "seq_id": self.seq, "kind": kind}
        numbered = {"sampling_session_seq_id": self.number}
        return await self.service.post("/save_weights_for_sampler", {**body, **numbered, **fields})


async def asked(service: Any, sampler: str, seq: int) -> str:
    body = asample(sampler, seq, prompt_logprobs=True)
    request: str = (await service.post("/asample", body))["request_id"]
    return request


async def result(service: Any, request: str) -> wire.SampleResponse:
    response = await service.poll(request)
    assert response.headers["content-type"] == "application/x-protobuf", response.text
    return wire.SampleResponse.FromString(response.content)


def logprob(response: wire.SampleResponse) -> float:
    return float(np.frombuffer(response.prompt_logprobs, np.float32)[1])


async def drawn(service: Any, sampler: str, seq: int) -> float:
    return logprob(await result(service, await asked(service, sampler, seq)))


async def test_older_inflight_clients_move_to_newer_weights_and_snapshots_do_not(
    service: Any,
) -> None:
    run = await Run.made(service)
    await run.step()
    frozen, first = await run.save("snapshot"), await run.save()
    before = await drawn(service, frozen, 0)
    assert await drawn(service, first, 0) == before
    await run.step()
    second = await run.save()
    after = await drawn(service, second, 0)
    assert after != before
    assert await drawn(service, first, 1) == after
    assert await drawn(service, frozen, 1) == before
    await run.step()
    assert await drawn(service, first, 2) == after, "only a save moves the weights"
    newest = await run.save("snapshot")
    assert await drawn(service, first, 3) == after != await drawn(service, newest, 0)


async def test_a_sample_keeps_the_weights_of_the_time_of_its_request(api: Any) -> None:
    """It waits while the weights move, and runs on a worker that never had the older ones."""
    await api.start_worker()
    run = await Run.made(api)
    await run.step()
    sampler = await run.save()
    old = await result(api, await asked(api, sampler, 0))
    await api.stop_worker()
    waiting = await asked(api, sampler, 1)
    await api.start_worker("other")
    await run.step()
    await run.save()
    await api.services.unused.clean(older_than_s=0)
    assert (await result(api, waiting)).SerializeToString() == old.SerializeToString()
    assert await drawn(api, sampler, 2) != logprob(old)


async def test_a_sample_that_lost_its_worker_gives_the_same_bits(api: Any) -> None:
    await api.start_worker()
    run = await Run.made(api)
    await run.step()
    sampler = await run.save()
    old = await result(api, await asked(api, sampler, 0))
    waiting = await asked(api, sampler, 1)
    await api.kill_worker()
    await api.start_worker()
    assert (await result(api, waiting)).SerializeToString() == old.SerializeToString()
    await run.step()
    moved = await drawn(api, await run.save(), 0)
    assert moved != logprob(old)
    assert await drawn(api, sampler, 2) == moved


async def test_a_save_that_is_sent_again_makes_no_second_one(service: Any) -> None:
    run = await Run.made(service)
    await run.step()
    answer = await run.send()
    run.seq -= 1
    again = await run.send()  # the same seq_id with another session, as the SDK sends it
    assert answer["request_id"] == again["request_id"]
    first = (await service.result(answer))["sampling_session_id"]
    assert first == f"{run.session}:sample:1"
    assert (await service.get(f"/sessions/{run.session}"))["sampler_ids"] == [first]


async def test_one_file_is_kept_for_all_inflight_clients(service: Any) -> None:
    run = await Run.made(service)
    for _ in range(3):
        await run.step()
        await run.save()
    services = service.services
    await services.store.sweep(time.time(), SweepPolicy())
    await services.unused.clean(older_than_s=0)
    points = {point for point in left(service)}
    tenant = (await service.get("/usage"))["tenant"]
    (kept,) = await services.store.unnamed_saves(tenant)
    assert kept.file_id in points
    assert kept.size_bytes > 0
    usage = await services.store.checkpoint_usage(tenant)
    assert (usage.count, usage.size_bytes) == (1, kept.size_bytes)


async def test_inflight_clients_are_listed_and_their_target_is_not(service: Any) -> None:
    run = await Run.made(service)
    samplers = [await run.save(), await run.save()]
    listed = await service.get(f"/sessions/{run.session}")
    assert listed["sampler_ids"] == samplers[::-1]
    answer = await service.get(f"/samplers/{samplers[0]}")
    assert answer == {"sampler_id": samplers[0], "base_model": "tuneserve/fake"}
    target = f"{run.model}:inflight"
    answer = await service.call("POST", "/asample", json=asample(target, 0))
    assert_failure(answer, 404)


async def test_a_named_inflight_save_is_refused_and_the_model_goes_on(service: Any) -> None:
    run = await Run.made(service)
    answer = await run.send(path="name")
    assert "leave path out, or save a snapshot" in await service.error(answer)
    assert await drawn(service, await run.save(), 0) < 0


async def test_another_tenant_cannot_sample_it(service: Any) -> None:
    run = await Run.made(service)
    sampler = await run.save()
    refused = []
    for key in (sampler, sampler.replace(":sample:", ":sample:9"), f"{run.model}:inflight"):
        answer = await service.call("POST", "/asample", json=asample(key, 0), key="tml-b")
        assert_failure(answer, 404)
        refused.append(answer.json()["detail"].replace(key, "X"))
    assert len(set(refused)) == 1


async def test_a_client_of_deleted_weights_is_told_why(service: Any) -> None:
    run = await Run.made(service)
    sampler = await run.save()
    tenant = (await service.get("/usage"))["tenant"]
    (kept,) = await service.services.store.unnamed_saves(tenant)
    await service.services.store.delete_record(type(kept), kept.key)
    answer = await service.call("POST", "/asample", json=asample(sampler, 0))
    assert_failure(answer, 404)
    assert "save the model again" in answer.json()["detail"]
    assert await drawn(service, await run.save(), 0) == await drawn(service, sampler, 1)


async def test_the_end_of_the_session_ends_them(service: Any) -> None:
    run = await Run.made(service)
    sampler = await run.save()
    path = await saved(service, run.model, run.seq + 1)
    finish = {"reason": {"type": "success"}}
    await service.ok("POST", f"/sessions/{run.session}/finish", finish)
    answer = await service.call("POST", "/asample", json=asample(sampler, 0))
    assert_failure(answer, 410)
    tenant = (await service.get("/usage"))["tenant"]
    assert await service.services.store.unnamed_saves(tenant) == []
    assert path
