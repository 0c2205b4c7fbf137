"""The thread of the synchronous client, and the methods that it waits for."""

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tuneserve_client import AsyncClient, AsyncModel, AsyncSampler, Client, NotFound
from tuneserve_client.sync import Future, LoopThread, Model, Sampler, _streams


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.stop()


async def fails() -> None:
    raise KeyError("why")


def test_a_coroutine_runs_in_the_thread_and_returns_or_raises_here(thread: LoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert thread.run_coroutine(name()) == "tuneserve-client"
    with pytest.raises(KeyError, match="why"):
        thread.run_coroutine(fails())


def test_a_stopped_thread_ends_its_tasks_and_takes_no_more(thread: LoopThread) -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        return task

    thread.run_coroutine(begin())
    thread.stop()
    thread.stop()
    assert thread.is_stopped and ended == ["cancelled"]
    with pytest.raises(RuntimeError, match="this client is closed"):
        thread.run_coroutine(fails())


def test_leaving_the_loop_over_a_stream_ends_its_generator(thread: LoopThread) -> None:
    ended: list[bool] = []

    class Counter:
        async def count(self, first: int) -> AsyncIterator[int]:
            try:
                while True:
                    yield first
                    first += 1
            finally:
                ended.append(True)

    class Synchronous:
        _inner, _thread = Counter(), thread
        count: Any = _streams(Counter.count)

    numbers = Synchronous().count(3)
    assert [next(numbers), next(numbers)] == [3, 4]
    numbers.close()
    assert ended == [True]


def answered(request: httpx.Request) -> httpx.Response:
    """The answers of a server that knows its sessions and one model."""
    route = request.url.path.rpartition("/")[2]
    answers: dict[str, dict[str, Any]] = {
        "create_session": {"session_id": "s"},
        "finish": {},
        "create_model": {"request_id": "req_model"},
        "optim_step": {"request_id": "req_step"},
    }
    results: dict[str, dict[str, Any]] = {
        "req_model": {"model_id": "s:train:0"},
        "req_step": {"metrics": {"grad_norm": 2.0}},
    }
    if route == "retrieve_future":
        return httpx.Response(200, json=results[json.loads(request.content)["request_id"]])
    if route not in answers:
        return httpx.Response(404, json={"detail": "none", "code": "not_found"})
    return httpx.Response(200, json=answers[route])


def test_every_kind_of_method_returns_the_result_of_the_asynchronous_one() -> None:
    with Client("http://server", "tml-a", transport=httpx.MockTransport(answered)) as client:
        with pytest.raises(NotFound):
            client.run("s:train:0")
        step: Future[Any] = client.future("req_step", "optim_step")
        assert step.result().metrics == {"grad_norm": 2.0}
        assert (step.request_id, step.done()) == ("req_step", True)


@pytest.mark.anyio
async def test_a_future_is_awaited_in_a_running_loop_which_goes_on_meanwhile() -> None:
    here = asyncio.get_running_loop()
    released = asyncio.Event()

    async def answer_late(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("retrieve_future"):  # in the client's thread
            waits = asyncio.run_coroutine_threadsafe(released.wait(), here)
            await asyncio.wrap_future(waits)
        return answered(request)

    with Client("http://server", "tml-a", transport=httpx.MockTransport(answer_late)) as client:
        step: Future[Any] = client.future("req_step", "optim_step")
        waiting = asyncio.ensure_future(step)
        await asyncio.sleep(0)
        assert not waiting.done()
        released.set()  # a blocked loop would never come here
        assert (await waiting).metrics == {"grad_norm": 2.0}
        assert (await step).metrics == {"grad_norm": 2.0}


@pytest.mark.anyio
async def test_closing_the_client_ends_an_await_with_the_reason(thread: LoopThread) -> None:
    waiting = asyncio.ensure_future(thread.join_coroutine(asyncio.sleep(3600)))
    await asyncio.sleep(0)
    thread.stop()
    with pytest.raises(RuntimeError, match="this client is closed"):
        await waiting


ASYNCHRONOUS = {"check_found", "close", "fetch", "only_base_model", "session_id"}
"""The methods that other parts of the client call, and ``close``, which has a thread to stop."""


@pytest.mark.parametrize(
    ("synchronous", "asynchronous"),
    [(Client, AsyncClient), (Model, AsyncModel), (Sampler, AsyncSampler)],
)
def test_every_public_method_exists_with_its_documentation(
    synchronous: type, asynchronous: type
) -> None:
    public = {
        name: each
        for name, each in inspect.getmembers(asynchronous, inspect.isfunction)
        if not name.startswith("_") and name not in ASYNCHRONOUS
    }
    assert len(public) > 3
    for name, method in public.items():
        assert "Async" not in str(inspect.signature(getattr(synchronous, name))), name
        assert "Async" not in str(getattr(synchronous, name).__doc__), name
        assert getattr(synchronous, name).__qualname__ == f"{synchronous.__name__}.{name}"
        assert getattr(synchronous, name).__doc__ == method.__doc__, name
