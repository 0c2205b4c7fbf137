"""Connections of slow, silent and excessive clients, over real sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from tuneserve_server.http import connection as protocol
from tuneserve_server.http.connection import MAX_HEAD_BYTES, bounded

pytestmark = pytest.mark.anyio

TIMES = {"header_timeout_s": 0.25, "linger_s": 0.25}
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Seen:
    """Records the requests that reach the application behind the protocol, and answers them."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.pause_s = 0.0
        self.reads_body = True
        self.answer = b"ok"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body = b""
        more = self.reads_body
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await asyncio.sleep(self.pause_s)
        length = str(len(self.answer)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.answer})


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def port(seen: Seen) -> AsyncIterator[int]:
    config = uvicorn.Config(
        seen, http=bounded(**TIMES), ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


@pytest.fixture
async def stream(port: int) -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()


async def answered(reader: asyncio.StreamReader) -> bytes:
    """One whole answer with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return head + await reader.readexactly(length)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server closes the connection, which it must do within two seconds."""
    async with asyncio.timeout(2):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def drip(writer: asyncio.StreamWriter, data: bytes, pause_s: float = 0.02) -> None:
    """Send one byte at a time, as long as the server listens."""
    for byte in data:
        if writer.is_closing():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(pause_s)


def assert_failure(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-length: %d\r\n" % len(body) in head
    assert json.loads(body)["code"] == code
    assert set(json.loads(body)) == {"code", "detail"}


async def test_slow_headers_are_answered_408(stream: Stream, seen: Seen) -> None:
    reader, writer = stream
    dripping = asyncio.create_task(drip(writer, b"GET / HTTP/1.1\r\nX: " + b"a" * 200))
    assert_failure(await ended(reader), 408, "headers_too_slow")
    assert seen.scopes == []
    await dripping


async def test_a_silent_client_is_disconnected(stream: Stream) -> None:
    assert await ended(stream[0]) == b""


async def test_a_pause_between_requests_is_allowed(stream: Stream) -> None:
    reader, writer = stream
    for _ in range(2):
        writer.write(GET)
        assert (await answered(reader)).endswith(b"ok")
        await asyncio.sleep(2 * TIMES["header_timeout_s"])


async def test_an_answer_may_take_longer_than_the_headers(stream: Stream, seen: Seen) -> None:
    seen.pause_s = 2 * TIMES["header_timeout_s"]
    reader, writer = stream
    writer.write(GET)
    assert (await answered(reader)).endswith(b"ok")


async def test_line_ends_between_requests_do_not_extend_the_connection(stream: Stream) -> None:
    reader, writer = stream
    writer.write(GET)
    await answered(reader)
    dripping = asyncio.create_task(drip(writer, b"\r\n" * 100))
    assert_failure(await ended(reader), 408, "headers_too_slow")
    await dripping


@pytest.mark.parametrize("piece", [1000, 10**6], ids=["in pieces", "at once"])
@pytest.mark.parametrize("filler", [b"X-%d: a", b"X: %d"], ids=["many headers", "a long header"])
async def test_too_many_headers_are_answered_431(
    stream: Stream, seen: Seen, piece: int, filler: bytes
) -> None:
    reader, writer = stream
    separator = b"\r\n" if b"-" in filler else b","
    head = GET[:-2] + separator.join(filler % i for i in range(MAX_HEAD_BYTES // 4)) + b"\r\n\r\n"
    for start in range(0, len(head), piece):
        writer.write(head[start : start + piece])
        await asyncio.sleep(0)
    assert_failure(await answered(reader), 431, "headers_too_large")
    assert seen.scopes == []


async def test_a_long_address_is_answered_431(stream: Stream, seen: Seen) -> None:
    stream[1].write(b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert_failure(await answered(stream[0]), 431, "headers_too_large")


async def test_bytes_that_are_not_http_get_the_usual_error(stream: Stream) -> None:
    stream[1].write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 secret")
    answer = await ended(stream[0])
    assert_failure(answer, 400, "invalid_request")
    assert b"secret" not in answer


@pytest.mark.parametrize(
    "after", [b"\x16\x03\x01", b"GET / HTTP/1.1\r\nX: "], ids=["noise", "half"]
)
async def test_an_answer_in_progress_is_completed_before_an_error(
    stream: Stream, seen: Seen, after: bytes
) -> None:
    seen.pause_s = 2 * TIMES["header_timeout_s"]
    reader, writer = stream
    writer.write(GET)
    await asyncio.sleep(0.05)
    writer.write(after)
    assert (await ended(reader)).endswith(b"\r\n\r\nok")


async def test_a_client_that_closes_its_side_is_disconnected(
    stream: Stream, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = stream
    writer.write(GET)
    writer.write_eof()
    assert await ended(reader) == b""
    assert not caplog.records


async def test_trailers_are_read_and_dropped(stream: Stream, seen: Seen) -> None:
    reader, writer = stream
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    writer.write(chunked + b"X: 1\r\nY: 2\r\n\r\n" + GET)
    for _ in range(2):
        assert (await answered(reader)).endswith(b"ok")
    assert seen.bodies == [b"abc", b""]
    assert [name for name, _ in seen.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


async def test_endless_trailers_end_the_connection(stream: Stream) -> None:
    reader, writer = stream
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
    for _ in range(100):
        writer.write(b"a" * 1000)
        await asyncio.sleep(0)
    assert_failure(await answered(reader), 431, "headers_too_large")


async def test_a_malformed_chunked_body_is_answered_400(stream: Stream) -> None:
    reader, writer = stream
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    assert_failure(await ended(reader), 400, "invalid_request")


async def test_the_rest_of_a_body_after_the_answer_is_not_awaited_for_long(
    stream: Stream, seen: Seen
) -> None:
    seen.reads_body = False
    reader, writer = stream
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    assert (await answered(reader)).endswith(b"ok")
    dripping = asyncio.create_task(drip(writer, b"a" * 200))
    assert await ended(reader) == b""
    await dripping


async def test_the_rest_of_a_body_after_the_answer_may_arrive_in_time(
    stream: Stream, seen: Seen
) -> None:
    seen.reads_body = False
    reader, writer = stream
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
    await answered(reader)
    writer.write(b"a" * 100 + GET)
    assert (await answered(reader)).endswith(b"ok")
    await asyncio.sleep(2 * TIMES["linger_s"])
    writer.write(GET)
    assert (await answered(reader)).endswith(b"ok")


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"], ids=["kept", "to be closed"])
async def test_an_answer_that_is_not_read_is_abandoned(
    port: int, seen: Seen, monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    monkeypatch.setattr(protocol, "_STALLED_S", 0.1)
    seen.answer = b"a" * 2**24
    connection = socket.create_connection(("127.0.0.1", port))
    with connection:
        connection.sendall(GET[:-2] + ending + b"\r\n")
        await asyncio.sleep(1.5)  # 15 times as long, for a busy machine
        received = await asyncio.to_thread(_all_of, connection)
    assert received < len(seen.answer)


async def test_an_answer_that_is_read_slowly_arrives_whole(
    port: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_STALLED_S", 1.0)
    seen.answer = b"a" * 2**24
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    received = 0
    async with asyncio.timeout(10):
        while received < len(seen.answer):
            received += len(await reader.read(2**20))
            await asyncio.sleep(0.1)
    writer.close()


def _all_of(connection: socket.socket) -> int:
    received = 0
    try:
        while piece := connection.recv(2**20):
            received += len(piece)
    except ConnectionResetError:
        pass
    return received
