"""The connection of a client: its server, its key, its end, and its use from other loops."""

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.client.conftest import DATA, KEY, LR, losses
from tuneserve_client import (
    AsyncClient,
    Client,
    errors,
    torch_loss,
)
from tuneserve_server.cli.local_server import LocalServer


def test_health_names_the_base_model(client: Client, server: LocalServer) -> None:
    assert client.health().base_model == server.base_model == client.base_models()[0].model_name


def test_an_invalid_key_is_unauthorized(server: LocalServer) -> None:
    with Client(server.url, "no-key") as client, pytest.raises(errors.Unauthorized) as caught:
        client.runs()
    assert server.url in str(caught.value)
    assert (caught.value.status, caught.value.code) == (401, "unauthorized")


@pytest.mark.anyio
async def test_the_asynchronous_client_does_the_same(server: LocalServer, client: Client) -> None:
    expected = losses(client.create_model(rank=4, seed=7), 3)
    async with AsyncClient(server.url, KEY, heartbeat_s=0.05) as asked:
        model = await asked.create_model(rank=4, seed=7)
        gradients = []
        for _ in range(3):
            gradients.append(model.forward_backward(DATA))
            model.optim_step(LR)
        assert [output.loss for output in await asyncio.gather(*gradients)] == expected
        sampler = await model.save_sampler()
        output = await sampler.sample("The sky", max_tokens=20, temperature=0)
        streamed = [each async for each in sampler.stream("The sky", max_tokens=20, temperature=0)]
        assert "".join(streamed) == output.text
        kept = await gradients[0].accepted()
        session = model.id.partition(":")[0]
    async with AsyncClient(server.url, KEY) as another:
        found = await another.future(kept, "forward_backward")
        assert found.loss == expected[0]
        with pytest.raises(errors.SessionEnded):
            await another.transport.call(
                "POST",
                "/api/v1/session_heartbeat",
                body=json.dumps({"session_id": session}).encode(),
            )


def test_leaving_a_stream_ends_it_and_a_closed_client_says_so(server: LocalServer) -> None:
    client = Client(server.url, KEY)
    sampler = client.sampler()
    stream = sampler.stream("The", max_tokens=500, temperature=0, stop=[])
    assert next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    left = sampler.stream("The", max_tokens=500, temperature=0)
    assert next(iter(left))
    client.close()
    del left
    client.close()
    with pytest.raises(RuntimeError, match="closed; create another"):
        client.runs()


def test_closing_the_client_ends_a_waiting_call(server: LocalServer) -> None:
    client = Client(server.url, KEY)
    future = client.future("req_" + "a" * 26, "sample")
    asked = threading.Event()

    async def never(_: str) -> Any:
        asked.set()
        await asyncio.Event().wait()

    client._inner.transport.result = never  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(future.result)
        assert asked.wait(10)
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(10)


def test_a_client_used_after_a_fork_raises(server: LocalServer) -> None:
    """The fork happens in a child process: this one has threads that would not survive it."""
    script = """
import os, sys, warnings
warnings.simplefilter("ignore")
from tuneserve_client import Client
client = Client(sys.argv[1], "tml-fork")
client.health()
pid = os.fork()
if pid == 0:
    try:
        client.health()
    except RuntimeError as error:
        os._exit(0 if "another process" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
client.close()
"""
    subprocess.run([sys.executable, "-c", script, server.url], check=True, timeout=60)


def test_torch_is_optional_and_its_losses_may_have_metrics() -> None:
    loss = torch_loss(lambda data, lp: (lp[0].sum() + 0 * lp[0].sum(), {"n:sum": 1.0}))
    value, (gradient,), metrics = loss([], [np.array([1.0, 2.0], np.float32)])  # type: ignore[misc]
    assert (value, gradient.tolist(), metrics) == (3.0, [1.0, 1.0], {"n:sum": 1.0})
    assert torch.is_grad_enabled()
