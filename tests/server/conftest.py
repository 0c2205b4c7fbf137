"""The API in this process, over a real store, with a real worker on the fake backend."""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.server.openai.openai_case import LETTERS, TEMPLATE
from tests.server.openai.scripted import QWEN, Talk
from tests.support.fake_backend import FAKE_INFO, FakeBackend
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.store.base import Queue
from tuneserve_engine.store.open import open_store
from tuneserve_engine.worker.execution.executor import JobExecutor
from tuneserve_engine.worker.worker import Worker
from tuneserve_server.app import create_app
from tuneserve_server.base_models import BaseModels
from tuneserve_server.dependencies import Services
from tuneserve_server.settings import ApiSettings

JSON = {"Content-Type": "application/json"}
PROTOBUF = "application/x-protobuf"


class Api:
    """The API as a tenant sees it. ``backend`` is the backend of its newest worker."""

    def __init__(self, app: FastAPI, http: httpx.AsyncClient) -> None:
        self.app = app
        self.http = http
        self.services: Services = app.state.services
        self.backend = FakeBackend()
        self._workers: dict[str, tuple[Worker, asyncio.Task[None]]] = {}

    async def start_worker(
        self,
        name: str = "worker",
        info: BaseModelInfo = FAKE_INFO,
        backend: Callable[[BaseModelInfo], FakeBackend] = FakeBackend,
    ) -> None:
        """Start a worker without models in memory. A used name makes it the successor of that
        worker.
        """

        async def connect() -> Queue:
            return self.services.store

        self.backend = backend(info)
        executor = JobExecutor(self.backend, self.services.files)
        worker = Worker(connect, executor, info, name=name)
        running = asyncio.create_task(worker.run_until_stopped())
        self._workers[name] = worker, running
        while not worker.session.is_up:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.005)

    async def kill_worker(self, name: str = "worker") -> None:
        """End the worker as its death would: the store does not learn of it."""
        _, running = self._workers.pop(name)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    async def stop_worker(self, name: str = "worker") -> None:
        worker, running = self._workers.pop(name)
        worker.stop()
        await running

    async def kill_workers(self) -> None:
        for name in list(self._workers):
            await self.kill_worker(name)

    async def call(
        self, method: str, path: str, *, key: str | None = "tml-a", **options: Any
    ) -> httpx.Response:
        headers = {**JSON, **options.pop("headers", {})}
        if key is not None:
            headers["X-API-Key"] = key
        return await self.http.request(method, f"/api/v1{path}", headers=headers, **options)

    async def ok(self, method: str, path: str, json: Any = None, **options: Any) -> Any:
        """The body of an answer, whose status must be 200."""
        if json is not None:
            options["json"] = json
        response = await self.call(method, path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def post(self, path: str, json: Any = None, **options: Any) -> Any:
        return await self.ok("POST", path, json, **options)

    async def get(self, path: str, **options: Any) -> Any:
        return await self.ok("GET", path, **options)

    async def session(self, **options: Any) -> str:
        request = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        session_id: str = (await self.post("/create_session", request, **options))["session_id"]
        return session_id

    async def poll(self, request_id: str, **options: Any) -> httpx.Response:
        """Poll for the result and return the first answer that is not a 408."""
        body = {"request_id": request_id, "allow_metadata_only": True}
        async with asyncio.timeout(10):
            while True:
                response = await self.call("POST", "/retrieve_future", json=body, **options)
                if response.status_code != 408:
                    return response

    async def result(self, answer: dict[str, Any], **options: Any) -> Any:
        """The JSON result of an accepted request."""
        response = await self.poll(answer["request_id"], **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, answer: dict[str, Any], **options: Any) -> str:
        """The error message of an accepted request that must have failed by the user's fault."""
        result = await self.result(answer, **options)
        assert result["category"] == "user", result
        message: str = result["error"]
        return message

    async def model(self, session_id: str, number: int = 0, **options: Any) -> str:
        request = create_model(session_id, number)
        result = await self.result(await self.post("/create_model", request, **options), **options)
        model_id: str = result["model_id"]
        return model_id

    async def forward_backward(
        self, model_id: str, seq_id: int, tokens: Sequence[int] = (1, 2, 3), **options: Any
    ) -> Any:
        headers = {"Content-Type": PROTOBUF, **options.pop("headers", {})}
        body = options.pop("content", None) or forward_backward(model_id, seq_id, tokens)
        return await self.post("/forward_backward", content=body, headers=headers, **options)

    async def output(self, answer: dict[str, Any]) -> wire.ForwardBackwardOutput:
        response = await self.poll(answer["request_id"])
        assert response.headers["content-type"] == PROTOBUF, response.text
        return wire.ForwardBackwardOutput.FromString(response.content)

    async def sampler(self, session_id: str, number: int = 0, **options: Any) -> str:
        request = {
            "session_id": session_id,
            "sampling_session_seq_id": number,
            "base_model": "tuneserve/fake",
        }
        answer = await self.post("/create_sampling_session", request, **options)
        sampler_id: str = answer["sampling_session_id"]
        return sampler_id


def create_model(session_id: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": "tuneserve/fake",
        "lora_config": {"rank": 4, "seed": 1},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
        **fields,
    }


def forward_backward(model_id: str, seq_id: int, tokens: Sequence[int] = (1, 2, 3)) -> bytes:
    """A cross-entropy request of one datum: predict each token from the one before."""
    inputs, targets = tokens[:-1], tokens[1:]
    text = wire.EncodedTextChunk(tokens=struct.pack(f"<{len(inputs)}i", *inputs))
    tensor = wire.Tensor(
        dense=struct.pack(f"<{len(targets)}q", *targets),
        dtype=wire.DTYPE_INT64,
        shape=[len(targets)],
    )
    datum = wire.Datum(
        model_input=[wire.Chunk(encoded_text=text)], loss_fn_inputs={"target_tokens": tensor}
    )
    request = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy"
    )
    return request.SerializeToString()


def asample(sampler_id: str, seq_id: int, **fields: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 3, "seed": 7, "temperature": 1.0},
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "type": "sample",
        **fields,
    }


class Bodies:
    """Request bodies as the SDK makes them."""

    create_model = staticmethod(create_model)
    forward_backward = staticmethod(forward_backward)
    asample = staticmethod(asample)


@pytest.fixture
def bodies() -> Bodies:
    return Bodies()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    return ApiSettings(
        data_dir=tmp_path, base_model_name="tuneserve/fake", poll_s=0.2, store_check_s=0
    )


@pytest.fixture
async def api(settings: ApiSettings, anyio_backend: str) -> AsyncIterator[Api]:
    """The API without a worker: accepted requests wait."""
    store = await open_store(settings)
    app = create_app(settings, store)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        services = app.state.services
        # Tests cannot wait for the cache: half a second is too old for them.
        served = BaseModels(store, settings.served_name, fresh_s=0.0)
        app.state.services = replace(services, served=served)
        api = Api(app, http)
        yield api
        await api.kill_workers()
    await store.close()


@pytest.fixture
async def service(api: Api) -> Api:
    """The API with a worker."""
    await api.start_worker()
    return api


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<eos>": 63}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<eos>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def speaking(api: Any, tokenizer: Path) -> Any:
    """The API with a worker whose base model has a tokenizer."""
    await api.start_worker(info=replace(FAKE_INFO, tokenizer_id=str(tokenizer)))
    return api


@pytest.fixture
async def talk(api: Any, tmp_path: Path, request: Any) -> Talk:
    """The API with a model that says what a test wants; the parameter is its chat template."""
    return await Talk.begun(api, tmp_path / "scripted", getattr(request, "param", None) or QWEN)
