"""Reading one body without a service around it: frames, pieces, and the reading threads."""

import asyncio
import gc
import json
import os
import sys
import threading
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import pytest
import zstandard
from fastapi import Request

from tuneserve_server.errors import Malformed
from tuneserve_server.http import incoming
from tuneserve_server.http.incoming import BodyMemory, Incoming, SentJson
from tuneserve_server.settings import MIB, ApiSettings

pytestmark = pytest.mark.anyio


def undeclared(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 2 * MIB])
def test_a_body_of_two_frames_is_malformed(size: int) -> None:
    """Only the first frame was read if neither declared its size, whatever the second contained."""
    frame = undeclared(os.urandom(size))
    assert len(incoming._one_shot(frame, incoming._counted(frame, 64 * MIB))) == size
    for second in (frame, frame[:-1], undeclared(b"a")):
        counted = incoming._counted(frame + second, 64 * MIB)
        with pytest.raises(Malformed):
            incoming._one_shot(frame + second, counted)


def test_a_frame_is_counted_without_storing_it() -> None:
    """The buffer once grew by copying up to 64 MiB in one step, which blocked other requests."""
    frame = undeclared(bytes(60 * MIB))
    incoming._counted(undeclared(b"x"), MIB)
    tracemalloc.start()
    size, stopped = incoming._counted(frame, 64 * MIB), incoming._counted(frame, 4 * MIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 60 * MIB
    assert 4 * MIB < stopped <= 5 * MIB
    assert peak < 2 * MIB


async def test_a_body_that_arrives_byte_by_byte_is_stored_in_few_pieces() -> None:
    """Otherwise each piece would be an object of 57 bytes, however short."""
    body = json.dumps({"x": "a" * 50_000}).encode()
    left = [body[at : at + 1] for at in range(len(body))]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    request = Request({"type": "http", "headers": []}, receive)
    settings = ApiSettings()
    async with AsyncExitStack() as stack:
        memory = BodyMemory.from_settings(settings)
        sent = await Incoming(request, settings, memory, "a", stack).json()
        assert len(sent.pieces) == 1
        assert await sent.read(lambda raw: raw) == body


async def test_other_requests_run_while_the_structure_of_a_body_is_checked() -> None:
    """16 MB of escapes once took 0.17 s in one step, during which no other thread ran."""
    raw = b'{"tags": ["' + b"\\\\" * 7_900_000 + b'"], "x": [' + b"[]," * 40 + b"1]}"
    memory = BodyMemory.from_settings(ApiSettings())
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    def check(sent: bytes) -> None:
        nonlocal ticks
        ticks = 0  # ticks before the pause do not count
        incoming.body._structure(sent)

    ticking = asyncio.create_task(tick())
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        await SentJson([raw], memory, "a", 0).read(check)
    finally:
        sys.setswitchinterval(usual_s)
    assert ticks >= 8
    ticking.cancel()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_request_waits_for_the_thread_that_works_for_it(
    fails: bool,
) -> None:
    """The thread's memory counts until then, and its end is not logged."""
    release = threading.Event()

    def work() -> None:
        release.wait(5)
        if fails:
            raise RuntimeError

    said: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: said.append(about))
    task = asyncio.create_task(incoming.finished(asyncio.to_thread(work)))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    assert not said
