"""Streams are read as they arrive, and their errors are raised."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tuneserve_client import AsyncClient, AsyncSampler, RequestFailed, errors

pytestmark = pytest.mark.anyio

DONE = b"data: [DONE]\n\n"


class Events(httpx.AsyncByteStream):
    """Sends each event when the test supplies it."""

    def __init__(self) -> None:
        self.given: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.is_closed = False

    def say(self, event: Any) -> None:
        self.given.put_nowait(f"data: {json.dumps(event)}\n\n".encode())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (data := await self.given.get()) is not None:
            if isinstance(data, Exception):
                raise data
            yield data

    async def aclose(self) -> None:
        self.is_closed = True


class Server:
    def __init__(self) -> None:
        self.events = Events()
        self.bodies: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, stream=self.events)


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def sampler(server: Server) -> AsyncIterator[AsyncSampler]:
    transport = httpx.MockTransport(server)
    async with AsyncClient("http://server", "tml-a", transport=transport) as client:
        yield AsyncSampler(client._session, "s-1:sample:0", "base", None)


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}]}


async def test_a_piece_arrives_before_the_next_is_decoded(
    server: Server, sampler: AsyncSampler
) -> None:
    pieces = sampler.stream("Hi", max_tokens=5, seed=3, stop="x")
    for piece in ("one", " two"):
        server.events.given.put_nowait(b": waiting\n\n")
        server.events.say(text(""))
        server.events.say(text(piece))
        assert await anext(pieces) == piece
    server.events.given.put_nowait(DONE)
    assert [piece async for piece in pieces] == []
    (asked,) = server.bodies
    assert asked == (
        "/v1/completions",
        {
            "model": "s-1:sample:0",
            "stream": True,
            "prompt": "Hi",
            "max_tokens": 5,
            "seed": 3,
            "stop": "x",
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
        },
    )


async def test_a_conversation_is_sent_as_a_chat(server: Server, sampler: AsyncSampler) -> None:
    server.events.say({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    server.events.say({"choices": [{"index": 0, "delta": {"content": "Yes"}}]})
    server.events.given.put_nowait(DONE)
    messages = [{"role": "user", "content": "Hi"}]
    assert await sampler.chat(messages, enable_thinking=False) == "Yes"
    path, body = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == messages
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["separate_reasoning"] is False, "the text is that which was drawn"


async def test_leaving_a_stream_ends_it_at_the_server(
    server: Server, sampler: AsyncSampler
) -> None:
    pieces: Any = sampler.stream("Hi")
    server.events.say(text("one"))
    await anext(pieces)
    await pieces.aclose()
    assert server.events.is_closed


async def test_an_error_in_a_stream_is_raised_with_its_code(
    server: Server, sampler: AsyncSampler
) -> None:
    error = {"message": "it was cancelled", "type": "server_error", "code": "internal"}
    server.events.say(text("one"))
    server.events.say({"error": error})
    pieces = sampler.stream([5, 6])
    assert await anext(pieces) == "one"
    with pytest.raises(RequestFailed, match="cancelled") as caught:
        await anext(pieces)
    assert (caught.value.category, caught.value.code) == ("server", "internal")
    assert server.bodies[0][1]["prompt"] == [5, 6]


@pytest.mark.parametrize(
    ("end", "told"), [(httpx.ReadError("reset"), "broke off: reset"), (None, "before it was done")]
)
async def test_a_stream_that_breaks_off_raises(
    server: Server, sampler: AsyncSampler, end: Exception | None, told: str
) -> None:
    server.events.say(text("one"))
    server.events.given.put_nowait(end)
    pieces = sampler.stream("Hi")
    assert await anext(pieces) == "one"
    with pytest.raises(errors.Unreachable, match=told):
        await anext(pieces)
    assert len(server.bodies) == 1
