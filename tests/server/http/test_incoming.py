"""Request bodies stay within their memory, and every path releases it."""

import asyncio
import gc
import json
import os
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import zstandard

from tests.server.conftest import PROTOBUF, forward_backward
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.http import incoming
from tuneserve_server.http.incoming import FREE_TO_ARRIVE_BYTES
from tuneserve_server.settings import MIB, ApiSettings

pytestmark = pytest.mark.anyio

ZSTD = {"Content-Encoding": "zstd", "Content-Type": PROTOBUF}


@pytest.fixture
def settings(settings: ApiSettings) -> ApiSettings:
    """Small limits keep the tests small: bodies of 1 MiB, 3 MiB decompressed, 16 MiB per tenant."""
    small = {
        "max_body_bytes": MIB,
        "max_decompressed_bytes": 3 * MIB,
        "tenant_body_memory_bytes": 16 * MIB,
        "body_memory_bytes": 32 * MIB,
        "body_timeout_s": 0.3,
    }
    return settings.model_copy(update=small)


def held(api: Any) -> int:
    return int(api.services.body_memory.used)


def padded(model: str, seq: int, size: int) -> bytes:
    """A message of about ``size`` random bytes, most of them in an unknown field."""
    head = forward_backward(model, seq)
    return head + field(os.urandom(size - len(head)))


def field(value: bytes) -> bytes:
    """The encoded field 15 of a message."""
    size, length = b"", len(value)
    while length >= 128:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([15 << 3 | 2]) + size + bytes([length]) + value


async def send(api: Any, content: bytes, **headers: str) -> Any:
    return await api.call("POST", "/forward_backward", content=content, headers=headers)


def undeclared(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


async def test_frames_with_and_without_a_declared_size_are_read(service: Any) -> None:
    model = await service.model(await service.session())
    for seq, size in enumerate((200, FREE_TO_ARRIVE_BYTES + 1, 900_000), start=1):
        plain = padded(model, seq, size)
        compress = undeclared if seq % 2 else zstandard.compress
        answer = await service.forward_backward(model, seq, content=compress(plain), headers=ZSTD)
        await service.output(answer)
    assert held(service) == 0


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, 20), slice(0, 5)])
async def test_a_frame_without_a_declared_size_is_read_to_its_end(service: Any, cut: slice) -> None:
    model = await service.model(await service.session())
    whole = undeclared(padded(model, 1, 300_000))
    bodies = (whole[cut], whole + b"x", whole + whole, whole + whole[cut], undeclared(b"") + whole)
    for body in bodies:
        response = await send(service, body, **ZSTD)
        assert (response.status_code, response.json()["code"]) == (422, "malformed")
        assert "not one complete zstd frame" in response.json()["detail"]
    assert (await send(service, whole, **ZSTD)).status_code == 200
    assert held(service) == 0


@pytest.mark.parametrize("compress", [zstandard.compress, undeclared])
async def test_a_bomb_is_413_by_its_size_and_uses_its_position(service: Any, compress: Any) -> None:
    model = await service.model(await service.session())
    plain = forward_backward(model, 1) + field(bytes(4 * MIB))
    response = await send(service, compress(plain), **ZSTD)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert "3145728 bytes after decompression" in response.json()["detail"]
    await service.output(await service.forward_backward(model, 2))
    assert held(service) == 0


@pytest.mark.parametrize("compress", [zstandard.compress, undeclared])
async def test_a_bomb_is_413_by_its_ratio(
    service: Any, monkeypatch: pytest.MonkeyPatch, compress: Any
) -> None:
    monkeypatch.setattr(incoming, "FREE_OF_RATIO_BYTES", MIB)
    model = await service.model(await service.session())
    for seq, size in ((1, MIB - 1000), (2, 2 * MIB)):
        bomb = compress(forward_backward(model, seq) + field(bytes(size)))
        response = await send(service, bomb, **ZSTD)
        assert response.status_code == (200 if seq == 1 else 413), response.text
    assert f"has {len(bomb)} bytes and" in response.json()["detail"]
    assert "the limit is 1000 times the size sent" in response.json()["detail"]
    assert held(service) == 0


async def test_a_wrong_declared_size_is_malformed_and_takes_no_more_memory(service: Any) -> None:
    """The frame declares 70,000 bytes and has 100,000."""
    frame = bytearray(zstandard.compress(bytes(100_000)))
    told = (100_000).to_bytes(4, "little")
    at = frame.index(told)
    frame[at : at + 4] = (70_000).to_bytes(4, "little")
    response = await send(service, bytes(frame), **ZSTD)
    assert (response.status_code, response.json()["code"]) == (422, "malformed")
    assert held(service) == 0


async def test_bodies_wait_for_their_memory_and_all_are_accepted(service: Any) -> None:
    """Forty bodies of 3 MB at once, from a tenant that has room for four."""
    model = await service.model(await service.session())
    half = os.urandom(400_000)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, held(service))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    bodies = [
        zstandard.compress(forward_backward(model, seq) + field(half * 7)) for seq in range(1, 41)
    ]
    answers = await asyncio.gather(*(send(service, body, **ZSTD) for body in bodies))
    watching.cancel()
    assert [each.status_code for each in answers] == [200] * 40
    for each in answers:
        await service.output(each.json())
    assert 8 * MIB < most <= 16 * MIB
    assert held(service) == 0


async def test_a_request_without_memory_is_429_and_loses_nothing(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = service.services.body_memory
    monkeypatch.setattr(memory.held, "_wait_s", 0.05)
    model = await service.model(await service.session())
    body = padded(model, 1, 900_000)
    async with memory.held.taken(open_tenant("tml-a"), 12 * MIB):
        response = await send(service, body)
        assert (response.status_code, response.json()["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "2"
        assert "(tenant_body_memory_bytes)" in response.json()["detail"]
        assert held(service) == 12 * MIB
        await service.session()  # small bodies never wait
        other = await service.model(await service.session(key="tml-b"), key="tml-b")
        await service.forward_backward(other, 1, content=padded(other, 1, 900_000), key="tml-b")
    await service.output(await service.forward_backward(model, 1, content=body))
    assert held(service) == 0


async def test_the_metrics_show_the_memory_in_use(api: Any) -> None:
    memory = api.services
    async with memory.body_memory.held.taken("a", 1000), memory.body_memory.arriving.taken("b", 7):
        async with memory.tokenizers.memory.taken("a", 500):
            told = (await api.http.get("/metrics")).text
    assert "\ntuneserve_body_memory_used_bytes 1007.0\n" in told
    assert "\ntuneserve_text_memory_used_bytes 500.0\n" in told


async def test_json_counts_by_the_size_of_its_parsed_form(
    service: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = service.services.body_memory.held
    sampler = await service.sampler(await service.session())
    most = 0
    add = memory._add

    def watched(share: Any, size: int) -> None:
        nonlocal most
        add(share, size)
        most = max(most, memory.held)

    monkeypatch.setattr(memory, "_add", watched)
    long = bodies.asample(sampler, 1, prompt=tokens([7] * 40_000))
    error = await service.error(await service.post("/asample", long))
    assert "40000 tokens" in error
    size = len(json.dumps(long, separators=(",", ":")).encode())  # encoded as by httpx
    assert 6 * size + 48 * 40_000 < most < 6 * size + 48 * 40_200
    assert held(service) == 0
    longer = bodies.asample(sampler, 2, prompt=tokens([7] * 300_000))
    response = await service.call("POST", "/asample", json=longer)
    assert response.status_code == 413
    assert "(tenant_body_memory_bytes); send less at once" in response.json()["detail"]


async def test_large_json_bodies_take_turns_and_small_ones_do_not_wait(
    service: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bodies take 0.2 s each at this rate, and other requests run in between."""
    sampler = await service.sampler(await service.session())
    large = [bodies.asample(sampler, seq, prompt=tokens([7] * 40_000)) for seq in (1, 2, 3)]
    each = incoming.body.parsed_bytes([json.dumps(large[0], separators=(",", ":")).encode()])
    monkeypatch.setattr(incoming, "_PARSED_BYTES_S", each / 0.2)
    started_s = time.monotonic()
    ends_s: list[float] = []

    async def send(body: Any) -> None:
        await service.post("/asample", body)
        ends_s.append(time.monotonic() - started_s)

    sending = [asyncio.create_task(send(body)) for body in large]
    await asyncio.sleep(0.05)
    await service.session()
    assert not ends_s
    await asyncio.gather(*sending)
    assert [end_s > 0.19 * number for number, end_s in enumerate(ends_s, start=1)] == [True] * 3
    assert held(service) == 0


async def test_a_flood_of_large_json_bodies_does_not_hold_up_another_tenant(
    service: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns once went to all bodies in order of arrival."""
    samplers = {
        key: await service.sampler(await service.session(key=key), key=key)
        for key in ("tml-a", "tml-b")
    }
    ended: list[str] = []

    async def send(key: str, seq: int) -> None:
        large = bodies.asample(samplers[key], seq, prompt=tokens([7] * 10_000))
        await service.post("/asample", large, key=key)
        ended.append(key)

    monkeypatch.setattr(incoming, "_PARSED_BYTES_S", 40 * MIB)  # about 20 ms each
    flood = [asyncio.create_task(send("tml-a", seq)) for seq in range(1, 9)]
    await asyncio.sleep(0.02)
    await send("tml-b", 1)
    assert ended.count("tml-a") <= 4
    await asyncio.gather(*flood)


async def test_polls_release_their_bodies(service: Any) -> None:
    """A poll of 56 KiB once held 1.6 MB, which were not counted, for 25 s."""
    sampler = await service.sampler(await service.session())
    services = service.services
    patient = services.settings.model_copy(update={"poll_s": 20.0})
    service.app.state.services = replace(services, settings=patient)
    asked = json.dumps({"target": {"sampling_session_id": sampler}})
    raw = (asked[:-1] + ', "x": [' + '{"":0},' * 8000 + "1]}").encode()
    gc.collect()
    tracemalloc.start()
    polls = [
        asyncio.create_task(service.call("POST", "/retrieve_futures", content=raw))
        for _ in range(20)
    ]
    while services.polls._of_tenant[open_tenant("tml-a")] < 20:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held(service) == 0
    services.polls.release()
    assert [(await each).status_code for each in polls] == [200] * 20
    assert kept < 20 * 100_000


@pytest.mark.parametrize("path", ["/retrieve_future", "/cancel_future", "/session_heartbeat"])
async def test_polls_and_heartbeats_have_a_small_limit(service: Any, path: str) -> None:
    """The longest valid id fits, however it is encoded."""
    name = "session_id" if path == "/session_heartbeat" else "request_id"
    longest = b'{"%s": "%s"}' % (name.encode(), b"\\ud83d\\ude00" * 256)
    assert (await service.call("POST", path, content=longest)).status_code == 404
    long = b'{"%s": "x", "y": "%s"}' % (name.encode(), b"a" * 4096)
    response = await service.call("POST", path, content=long)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert "larger than 4096 bytes, the limit of this route" in response.json()["detail"]


async def test_all_but_short_bodies_count(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of up to 64 KiB once did not count; as JSON they may take 2.8 MB."""
    memory = service.services.body_memory.held
    monkeypatch.setattr(memory, "_wait_s", 0.05)
    async with memory.taken(open_tenant("tml-a"), memory.most):
        for size, status in ((3000, 200), (5000, 429)):
            response = await service.call("POST", "/telemetry", json={"x": "a" * size})
            assert response.status_code == status, response.text


def tokens(ids: list[int]) -> Any:
    return {"chunks": [{"type": "encoded_text", "tokens": ids}]}


# --- every end of a body -------------------------------------------------------------------------


class Sender:
    """A client that sends ``pieces`` to the application, and then falls silent or disconnects."""

    def __init__(self, api: Any, pieces: list[bytes], *headers: tuple[str, str], path: str) -> None:
        self.api, self.pieces, self.asked = api, pieces, 0
        self.is_gone = asyncio.Event()
        self.answer: dict[str, Any] = {}
        known = [("host", "localhost"), ("x-api-key", "tml-a"), *headers]
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": f"/api/v1{path}",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in known],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(self.api.app(self.scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        if self.pieces:
            return {"type": "http.request", "body": self.pieces.pop(0), "more_body": True}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.answer.setdefault("status", message.get("status"))


@pytest.mark.parametrize("path", ["/forward_backward", "/asample", "/optim_step"])
@pytest.mark.parametrize("end", ["gone", "cancelled", "stalled", "stopped"])
async def test_memory_is_released_when_a_body_does_not_end(
    service: Any, path: str, end: str
) -> None:
    memory = service.services.body_memory.arriving
    length = ("content-length", str(900_000))
    sender = Sender(service, [bytes(50_000), bytes(50_000)], length, path=path)
    while not memory.held:
        await asyncio.sleep(0.005)
        assert not sender.task.done()
    assert memory.held == 900_000
    if end == "gone":
        sender.is_gone.set()
    elif end == "cancelled":
        sender.task.cancel()
    elif end == "stopped":
        service.services.polls.release()
    await asyncio.gather(sender.task, return_exceptions=True)
    assert sender.answer.get("status") == {"stalled": 408, "stopped": 503, "gone": 400}.get(end)
    assert held(service) == 0


async def test_an_announced_body_counts_only_once_it_arrives(service: Any) -> None:
    sender = Sender(service, [bytes(1000)], ("content-length", "900000"), path="/forward_backward")
    while not sender.asked > 1:
        await asyncio.sleep(0.005)
    assert held(service) == 0
    sender.is_gone.set()
    await sender.task


async def test_a_body_without_a_length_counts_as_the_largest_until_it_is_complete(
    service: Any,
) -> None:
    memory = service.services.body_memory.arriving
    sender = Sender(service, [bytes(70_000)], path="/forward_backward")
    while not memory.held:
        await asyncio.sleep(0.005)
    assert memory.held == MIB
    sender.is_gone.set()
    await sender.task
    assert memory.held == 0


async def test_a_body_is_read_only_after_its_key_was_accepted(service: Any) -> None:
    for key in ("", "nonsense"):
        sender = Sender(service, [bytes(70_000)], path="/forward_backward")
        sender.scope["headers"][1] = (b"x-api-key", key.encode())
        await sender.task
        assert (sender.answer["status"], sender.asked) == (401, 0)


async def test_a_body_whose_length_is_too_large_is_not_read_to_the_end(service: Any) -> None:
    length = ("content-length", str(2 * MIB))
    sender = Sender(service, [bytes(5000)] * 100, length, path="/forward_backward")
    await sender.task
    assert (sender.answer["status"], len(sender.pieces)) == (413, 99)
    assert held(service) == 0


@pytest.mark.parametrize("fails", ["submit", "head"])
async def test_memory_is_released_when_the_request_fails(
    service: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    model = await service.model(await service.session())
    body = zstandard.compress(padded(model, 1, 900_000))
    with monkeypatch.context() as patch:
        if fails == "submit":

            async def away(*_: object) -> None:
                raise ConnectionError

            patch.setattr(service.services.store, "submit", away)
        else:
            body = zstandard.compress(os.urandom(900_000))
        response = await send(service, body, **ZSTD)
    assert response.status_code == {"submit": 503, "head": 422}[fails]
    assert held(service) == 0


def test_settings_under_which_the_largest_body_never_fits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a tenant has 1000 bytes; .* needs 178956970"):
        ApiSettings(tenant_body_memory_bytes=1000)
    ApiSettings(tenant_body_memory_bytes=8000, max_body_bytes=1000, max_decompressed_bytes=1000)
