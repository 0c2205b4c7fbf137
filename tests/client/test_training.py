"""The order of a model's requests, against a server that the test holds back and releases."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from tuneserve_client import AsyncClient, AsyncModel, Client, Datum, errors
from tuneserve_client.wire.proto import wire_pb2 as wire

pytestmark = pytest.mark.anyio

DATA = [Datum([5, 6], [6, 7])]


class Server:
    """A server that accepts every request as ``req_<seq_id>``.

    ``open`` releases the answers to submissions. ``refuses`` maps a sequence number to the answer
    that replaces the acceptance.
    """

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.arrived: list[tuple[str, int]] = []
        self.gradients: list[wire.ForwardBackwardRequest] = []
        self.refuses: dict[int, httpx.Response] = {}
        self.reasons: list[str] = []
        self.polled: list[str] = []
        self.beats: list[str] = []
        self.answers_to_beats = [200]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.rpartition("/")[2]
        if route == "create_session":
            return httpx.Response(200, json={"session_id": "s"})
        if route == "finish":
            self.reasons.append(_json(request)["reason"]["type"])
            return httpx.Response(200, json={})
        if route == "session_heartbeat":
            self.beats.append(_json(request)["session_id"])
            status = self.answers_to_beats[min(len(self.beats), len(self.answers_to_beats)) - 1]
            code = "session_ended" if status == 410 else "internal"
            return httpx.Response(status, json={"detail": "why", "code": code})
        if route == "retrieve_future":
            self.polled.append(_json(request)["request_id"])
            return self._result(_json(request)["request_id"])
        return await self._submitted(route, request)

    async def _submitted(self, route: str, request: httpx.Request) -> httpx.Response:
        if route == "forward_backward":
            message = wire.ForwardBackwardRequest.FromString(request.content)
            self.gradients.append(message)
            seq_id = message.seq_id
        else:
            seq_id = _json(request)["seq_id"]
        self.arrived.append((route, seq_id))
        await self.open.wait()
        accepted = httpx.Response(200, json={"request_id": f"{route}-{seq_id}"})
        return self.refuses.get(seq_id, accepted)

    def _result(self, request_id: str) -> httpx.Response:
        route, _, seq_id = request_id.partition("-")
        if route != "forward_backward":
            return httpx.Response(200, json={"metrics": {"seq": int(seq_id)}, "path": "p"})
        count = next(len(g.data) for g in self.gradients if g.seq_id == int(seq_id))
        batched = wire.BatchedTensor(
            data=np.full(2 * count, -0.5, "<f4").tobytes(),
            offsets=np.arange(0, 8 * count + 1, 8, dtype="<i8").tobytes(),
            dtype=wire.DTYPE_FLOAT32,
        )
        record = wire.ArrayRecord(fields={"logprobs": batched}, num_datums=count)
        output = wire.ForwardBackwardOutput(
            loss_fn_outputs=[record], metrics={"loss:sum": float(count), "x:mean": float(seq_id)}
        )
        headers = {"Content-Type": "application/x-protobuf"}
        return httpx.Response(200, content=output.SerializeToString(), headers=headers)


def _json(request: httpx.Request) -> Any:
    return httpx.Response(200, content=request.content).json()


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    options: Any = {"deadline_s": 0.0, "transport": httpx.MockTransport(server)}
    async with AsyncClient("http://server", "tml-a", **options) as made:
        yield made


@pytest.fixture
def model(client: AsyncClient) -> AsyncModel:
    return AsyncModel(client._session, "s:train:0", "base", 8)


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_requests_are_in_flight_together_in_call_order(
    server: Server, model: AsyncModel
) -> None:
    server.open.clear()
    gradient = model.forward_backward(DATA)
    step = model.optim_step(1e-3)
    saved = model.save("a")
    await settled()
    assert server.arrived == [("forward_backward", 1), ("optim_step", 2), ("save_weights", 3)]
    server.open.set()
    assert await step.accepted() == "optim_step-2"
    assert (await gradient).loss == 1.0
    assert (await step).metrics == {"seq": 2}
    assert await saved == "p"


async def test_a_model_has_up_to_eight_requests_in_flight(
    server: Server, model: AsyncModel
) -> None:
    server.open.clear()
    steps = [model.optim_step() for _ in range(20)]
    await settled()
    assert [seq_id for _, seq_id in server.arrived] == list(range(1, 9))
    server.open.set()
    assert [(await step).metrics["seq"] for step in steps] == list(range(1, 21))


async def test_data_split_over_several_requests_keep_their_order(
    server: Server, model: AsyncModel
) -> None:
    """A request holds up to 1,024 datums. Losses are summed. Means are weighted by datums."""
    future = model.forward_backward(DATA * 2500)
    output = await future
    assert await future.accepted() == ",".join(f"forward_backward-{n}" for n in (1, 2, 3))
    assert [(g.seq_id, len(g.data)) for g in server.gradients] == [(1, 1024), (2, 1024), (3, 452)]
    assert len(output.logprobs) == 2500
    assert output.metrics["loss:sum"] == 2500.0
    assert output.metrics["x:mean"] == pytest.approx((1024 * 1 + 1024 * 2 + 452 * 3) / 2500)


async def test_data_changed_after_the_call_are_sent_unchanged(
    server: Server, model: AsyncModel
) -> None:
    weights = np.ones(2, np.float32)
    future = model.forward_backward([Datum([5, 6], [6, 7], weights)])
    weights[:] = 9.0
    await future
    sent = server.gradients[0].data[0].loss_fn_inputs["weights"].dense
    assert np.frombuffer(sent, "<f4").tolist() == [1.0, 1.0]


async def test_a_request_that_cannot_be_sent_stops_all_later_ones(
    server: Server, model: AsyncModel
) -> None:
    """The server would make all later requests wait for the missing one."""
    server.refuses[1] = httpx.Response(404, json={"detail": "gone", "code": "not_found"})
    with pytest.raises(errors.NotFound, match="gone"):
        await model.optim_step()
    with pytest.raises(errors.ModelInterrupted, match=r"gone.*new model") as caught:
        await model.optim_step()
    assert isinstance(caught.value.__cause__, errors.NotFound)
    assert server.arrived == [("optim_step", 1)]


async def test_a_request_that_the_server_finds_too_large_leaves_no_gap(
    server: Server, model: AsyncModel
) -> None:
    """The server records its position, because it could read the key."""
    large = {"detail": "too large", "code": "body_too_large"}
    server.refuses[1] = httpx.Response(413, json=large)
    with pytest.raises(errors.InvalidRequest, match="too large"):
        await model.forward_backward(DATA)
    assert (await model.optim_step()).metrics == {"seq": 2}


async def test_a_request_refused_as_overloaded_leaves_no_gap(
    server: Server, model: AsyncModel
) -> None:
    server.refuses[1] = httpx.Response(429, json={"detail": "full", "code": "overloaded"})
    with pytest.raises(errors.Overloaded, match="full"):
        await model.optim_step()
    del server.refuses[1]
    assert (await model.optim_step()).metrics == {"seq": 1}


async def test_a_request_that_a_proxy_finds_too_large_leaves_a_gap(
    server: Server, model: AsyncModel
) -> None:
    server.refuses[1] = httpx.Response(413, text="<html>")
    with pytest.raises(errors.InvalidRequest):
        await model.forward_backward(DATA)
    with pytest.raises(errors.ModelInterrupted):
        await model.optim_step()


async def test_a_loss_option_that_cannot_be_encoded_takes_no_number(
    server: Server, model: AsyncModel
) -> None:
    bad: Any = {"clip": [0.1]}
    with pytest.raises(TypeError):
        model.forward_backward(DATA, "ppo", **bad)
    assert (await model.optim_step()).metrics == {"seq": 1}


async def test_a_result_can_be_awaited_again_when_the_server_is_back(
    server: Server, client: AsyncClient, model: AsyncModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = model.optim_step()
    await step.accepted()
    kept = server._result
    monkeypatch.setattr(server, "_result", lambda _: httpx.Response(503, json={}))
    with pytest.raises(errors.ServerFault):
        await step
    monkeypatch.setattr(server, "_result", kept)
    assert (await step).metrics == {"seq": 1}


def half(data: Any, logprobs: list[Any]) -> Any:
    """Half of the sum of squares, whose derivative is the logprobs themselves."""
    return 0.5 * sum(float((lp**2).sum()) for lp in logprobs), logprobs, {"squares:sum": 7.0}


async def test_a_custom_loss_is_sent_as_weights_before_later_requests(
    server: Server, model: AsyncModel
) -> None:
    gradient = model.forward_backward_custom(DATA, half)
    step = model.optim_step()
    output = await gradient
    await step
    assert server.arrived == [("forward_backward", 1), ("forward_backward", 2), ("optim_step", 3)]
    scored, trained = server.gradients
    assert (scored.forward_only, trained.forward_only) == (True, False)
    weights = trained.data[0].loss_fn_inputs["weights"].dense
    assert np.frombuffer(weights, "<f4").tolist() == [0.5, 0.5]
    assert output.metrics == {
        "squares:sum": 7.0,
        "loss:sum": 0.25,
        "surrogate_loss:sum": 1.0,
    }


async def test_a_failing_custom_loss_trains_nothing_and_later_requests_run(
    server: Server, model: AsyncModel
) -> None:
    failed = model.forward_backward_custom(DATA, lambda data, logprobs: 1 / 0)
    misshapen = model.forward_backward_custom(DATA, lambda data, logprobs: (0.0, [[1.0]]))
    step = model.optim_step()
    with pytest.raises(errors.LossFailed, match="ZeroDivisionError") as caught:
        await failed
    assert caught.value.category == "user"
    with pytest.raises(errors.LossFailed, match=r"\(1,\).*\(2,\)"):
        await misshapen
    assert (await step).metrics == {"seq": 3}
    assert all(gradient.forward_only for gradient in server.gradients)


async def test_a_custom_loss_that_calls_its_own_model_fails_instead_of_waiting_forever(
    model: AsyncModel,
) -> None:
    loop = asyncio.get_running_loop()

    async def step() -> Any:
        return await model.optim_step()

    def loss(data: Any, logprobs: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(step(), loop).result()

    with pytest.raises(errors.LossFailed, match="its own model") as caught:
        await asyncio.wait_for(model.forward_backward_custom(DATA, loss).result(), 10)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (await model.optim_step()).metrics == {"seq": 2}


async def test_a_custom_loss_that_calls_its_own_model_through_another_fails_too(
    client: AsyncClient, model: AsyncModel
) -> None:
    loop = asyncio.get_running_loop()
    other = AsyncModel(client._session, "s:train:1", "base", 8)

    def waited(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def step() -> Any:
        return await model.optim_step()

    async def train_other() -> Any:
        return await other.forward_backward_custom(DATA, lambda data, logprobs: waited(step()))

    nested = model.forward_backward_custom(DATA, lambda data, logprobs: waited(train_other()))
    with pytest.raises(errors.LossFailed, match="its own model s:train:0"):
        await asyncio.wait_for(nested.result(), 10)


async def test_a_call_with_a_failed_part_says_that_the_others_succeeded(
    server: Server, model: AsyncModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = server._result
    failed = httpx.Response(200, json={"error": "no memory", "category": "server"})
    monkeypatch.setattr(
        server, "_result", lambda request: failed if request.endswith("-2") else kept(request)
    )
    with pytest.raises(
        errors.RequestFailed, match=r"no memory; .* 3 parts, of which 1 failed"
    ) as e:
        await model.forward_backward(DATA * 2500)
    assert (e.value.category, e.value.request_id) == ("server", "forward_backward-2")


async def test_a_result_is_fetched_only_when_it_is_awaited(
    server: Server, model: AsyncModel
) -> None:
    first, second = model.optim_step(), model.optim_step()
    assert await second.accepted() == "optim_step-2"
    assert not first.done()  # the first done() starts the fetch
    for _ in range(2):
        assert (await first).metrics == {"seq": 1}
    assert first.done()
    assert server.polled == ["optim_step-1"]


async def beating(server: Server, answers: list[int]) -> None:
    """Open a client with a session for the time of several heartbeats."""
    server.answers_to_beats = answers
    options: Any = {"transport": httpx.MockTransport(server), "heartbeat_s": 0.01}
    async with AsyncClient("http://server", "tml-a", **options) as client:
        await client.session_id()
        async with asyncio.timeout(10):
            while len(server.beats) < len(answers):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)


async def test_heartbeats_continue_through_faults(server: Server) -> None:
    await beating(server, [200, 503, 429, 500, 200])
    assert set(server.beats) == {"s"}
    at_the_end = len(server.beats)
    assert at_the_end > 5
    await asyncio.sleep(0.05)
    assert len(server.beats) == at_the_end


async def test_heartbeats_stop_once_the_session_has_ended(server: Server) -> None:
    await beating(server, [200, 410])
    assert len(server.beats) == 2


async def test_closing_waits_until_pending_requests_are_accepted(server: Server) -> None:
    options: Any = {"transport": httpx.MockTransport(server)}
    client = AsyncClient("http://server", "tml-a", **options)
    await client.session_id()
    server.open.clear()
    AsyncModel(client._session, "s:train:0", "base", 8).optim_step()
    closing = asyncio.create_task(client.close())
    await settled()
    assert not closing.done() and server.reasons == []
    server.open.set()
    await closing
    assert server.reasons == ["success"]


async def test_closing_after_an_error_waits_for_nothing(server: Server) -> None:
    options: Any = {"transport": httpx.MockTransport(server)}
    with pytest.raises(KeyError):
        async with AsyncClient("http://server", "tml-a", **options) as client:
            await client.session_id()
            server.open.clear()
            step = AsyncModel(client._session, "s:train:0", "base", 8).optim_step()
            await settled()
            assert repr(step) == "AsyncFuture(being sent)"
            raise KeyError
    assert server.reasons == ["errored"]


async def test_a_timeout_leaves_the_request_running(server: Server, model: AsyncModel) -> None:
    server.open.clear()
    step = model.optim_step()
    with pytest.raises(TimeoutError):
        await step.result(timeout=0.01)
    server.open.set()
    assert (await step).metrics == {"seq": 1}


async def test_the_client_refuses_an_empty_batch(model: AsyncModel) -> None:
    with pytest.raises(ValueError, match="data is empty"):
        model.forward_backward([])


def key_of(client: AsyncClient) -> str:
    return client.transport._calls.headers["X-API-Key"]


def test_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TUNESERVE_URL", "TUNESERVE_API_KEY", "TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert key_of(AsyncClient()) == "tml-local"
    monkeypatch.setenv("TINKER_BASE_URL", "http://tinker")
    monkeypatch.setenv("TINKER_API_KEY", "tml-t")
    assert AsyncClient().base_url == "http://tinker"
    assert key_of(AsyncClient()) == "tml-t"
    monkeypatch.setenv("TUNESERVE_URL", "http://tuneserve")
    assert AsyncClient().base_url == "http://tuneserve"
    assert AsyncClient("http://given").base_url == "http://given"


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("nmae", "name"), ("base_ur", "base_url"), ("deadline", "deadline_s"), ("x", "it takes")],
)
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_misspelt_option_is_an_error_that_suggests_the_right_name(
    kind: Any, misspelt: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=meant):
        kind("http://server", "tml-a", **{misspelt: "1"})
