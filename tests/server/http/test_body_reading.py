"""How one body is read, without a service around it: frames, pieces, and the threads that read."""

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
def test_two_frames_are_not_taken_for_one(size: int) -> None:
    """Only the first was read if neither told its size, whatever was in the second."""
    frame = undeclared(os.urandom(size))
    assert len(incoming._one_shot(frame, incoming._counted(frame, 64 * MIB))) == size
    for second in (frame, frame[:-1], undeclared(b"a")):
        counted = incoming._counted(frame + second, 64 * MIB)
        with pytest.raises(Malformed):
            incoming._one_shot(frame + second, counted)


def test_a_frame_is_counted_without_keeping_any_of_it() -> None:
    """It grew and was copied, up to 64 MiB in one step, for which all other requests waited."""
    frame = undeclared(bytes(60 * MIB))
    incoming._counted(undeclared(b"x"), MIB)
    tracemalloc.start()
    size, stopped = incoming._counted(frame, 64 * MIB), incoming._counted(frame, 4 * MIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 60 * MIB
    assert 4 * MIB < stopped <= 5 * MIB
    assert peak < 2 * MIB


async def test_a_body_that_comes_byte_by_byte_is_kept_in_few_pieces() -> None:
    """Each piece would be an object of 57 bytes, however little is in it."""
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


async def test_other_requests_come_between_while_the_structure_of_a_body_is_checked() -> None:
    """16 MB of escapes took 0.17 s in one step, in which no other thread runs."""
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
        ticks = 0  # those of the pause before it do not count
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
async def test_a_request_that_ends_while_a_thread_works_for_it_waits_for_the_thread(
    fails: bool,
) -> None:
    """What the thread has of memory is counted until then; nothing is logged of how it ended."""
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
