"""Hostile clients, and an honest one: ``body_attacks.py <kind> <port> <count>``.

They send ``count`` bodies at once in the names of eight tenants. They print the number of answers
by status (0: the connection ended) and the time taken, as JSON. They run in their own process, so
that they do not slow down the measuring one.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import httpx
import zstandard

from tests.server.conftest import PROTOBUF, create_model, forward_backward

MIB = 2**20
TENANTS = 8


def zeros(size: int) -> bytes:
    """An unknown field of ``size`` zeros."""
    return bytes([15 << 3 | 2, *varint(size)]) + bytes(size)


def varint(number: int) -> list[int]:
    return [number] if number < 128 else [number & 127 | 128, *varint(number >> 7)]


class Attacker:
    def __init__(
        self, port: int, http: httpx.AsyncClient, base_model: str = "tuneserve/fake"
    ) -> None:
        self.port, self.http, self.base_model = port, http, base_model

    async def post(self, path: str, number: int, **content: object) -> httpx.Response:
        key = f"tml-mallory-{number}"
        own = {"X-API-Key": key, "Authorization": f"Bearer {key}", "Content-Type": PROTOBUF}
        headers = {**own, **content.pop("headers", {})}  # type: ignore[dict-item]
        url = f"http://127.0.0.1:{self.port}{path}"
        return await self.http.post(url, headers=headers, **content)  # type: ignore[arg-type]

    async def session(self, number: int) -> str:
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        made = await self.post("/api/v1/create_session", number, json=session)
        return str(made.json()["session_id"])

    async def model(self, number: int, rank: int = 4) -> str:
        body = create_model(await self.session(number), base_model=self.base_model)
        body["lora_config"] = {"rank": rank, "seed": 1}
        accepted = (await self.post("/api/v1/create_model", number, json=body)).json()
        while True:
            asked = {"request_id": accepted["request_id"]}
            answer = await self.post("/api/v1/retrieve_future", number, json=asked)
            if answer.status_code == 200:
                return str(answer.json()["model_id"])

    async def bombs(self, count: int, noise: bytes, declared: bool) -> list[Awaitable[int]]:
        return self.frames(await self.bomb_bodies(count, noise, declared))

    async def bomb_bodies(self, count: int, noise: bytes, declared: bool) -> list[bytes]:
        """Frames that decompress to 63 MiB, after ``noise``, which is incompressible."""
        compressor = zstandard.ZstdCompressor(write_content_size=declared)
        models = [await self.model(number) for number in range(TENANTS)]
        rest = zeros(63 * MIB - len(noise)) + noise

        def body(number: int) -> bytes:
            head = forward_backward(models[number % TENANTS], 1 + number // TENANTS)
            return compressor.compress(head + rest)

        return [body(number) for number in range(count)]

    def frames(self, bodies: Sequence[bytes]) -> list[Awaitable[int]]:
        headers = {"Content-Encoding": "zstd"}
        path = "/api/v1/forward_backward"
        return [
            self.status(self.post(path, number % TENANTS, content=each, headers=headers))
            for number, each in enumerate(bodies)
        ]

    async def honest(self, count: int) -> list[Awaitable[int]]:
        """Bodies as SDKs send them, 5 MB each, all at once and of one tenant."""
        model, path = await self.model(0), "/api/v1/forward_backward"
        rest = zeros(5 * MIB)
        return [
            self.status(self.post(path, 0, content=forward_backward(model, seq) + rest))
            for seq in range(1, count + 1)
        ]

    async def texts(self, count: int, path: str, body: bytes) -> list[Awaitable[int]]:
        tenants = [number % TENANTS for number in range(count)]
        return [self.status(self.post(path, number, content=body)) for number in tenants]

    async def mixed(self, count: int, bodies: dict[str, tuple[str, bytes]]) -> list[Awaitable[int]]:
        """Each of the bodies in turn."""
        sent = [bodies[name] for name in bodies]
        turns = [(number % TENANTS, *sent[number % len(sent)]) for number in range(count)]
        return [self.status(self.post(path, tenant, content=body)) for tenant, path, body in turns]

    async def sampler(self, number: int) -> str:
        body = {
            "session_id": await self.session(number),
            "sampling_session_seq_id": 0,
            "base_model": self.base_model,
        }
        made = await self.post("/api/v1/create_sampling_session", number, json=body)
        return str(made.json()["sampling_session_id"])

    async def polls(self, count: int) -> list[Awaitable[int]]:
        samplers = [await self.sampler(number) for number in range(TENANTS)]
        return self.polls_of(samplers, count)

    def polls_of(self, samplers: Sequence[str], count: int) -> list[Awaitable[int]]:
        """Polls with an unknown field, whose values are the most expensive ones to read."""

        def body(number: int) -> bytes:
            target = (
                b'{"target": {"sampling_session_id": "%s"}' % samplers[number % TENANTS].encode()
            )
            return target + b', "x": [%s1]}' % (b'{"":0},' * 8000)

        path = "/api/v1/retrieve_futures"
        return [
            self.status(self.post(path, number % TENANTS, content=body(number)))
            for number in range(count)
        ]

    async def status(self, sending: Awaitable[httpx.Response]) -> int:
        try:
            return (await sending).status_code
        except httpx.TransportError:
            return 0

    async def slow(self, count: int) -> list[Awaitable[int]]:
        """Most of 16 MiB at once, and then nothing more."""
        return [self.slow_one(number) for number in range(count)]

    async def slow_one(self, number: int) -> int:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return 0
        head = (
            f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"X-API-Key: tml-mallory-{number % TENANTS}\r\nContent-Length: {16 * MIB}\r\n\r\n"
        )
        writer.write(head.encode())
        answer = asyncio.create_task(reader.readline())
        sending = asyncio.create_task(self.send_most(writer))
        try:
            line = await answer
            return int(line.split()[1]) if line else 0
        except OSError:
            return 0
        finally:
            sending.cancel()
            writer.close()

    async def send_most(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            for _ in range(15):
                writer.write(bytes(MIB))
                await writer.drain()


def filled(path: str, body: str, element: str, room: int) -> tuple[str, bytes]:
    """A body whose list has as many of an element as the server reads, or as ``room`` holds."""
    count = min(2**20 - 200, room // (len(element) + 1))
    return path, (body % ",".join([element] * count)).encode()


_ASAMPLE = '{"sampling_session_id": "s-a:sample:0", "seq_id": 1, "prompt": {"chunks": [%s]}%s}'
_CHUNK = '{"type": "encoded_text", "tokens": [%s]}'
_SCORED = ', "target_prompt_logprobs": {"data": [%s]}'
_LISTS = {
    "floats": ("/v1/completions", '{"model": "x", "prompt": [%s]}', "1.5"),
    "nulls": ("/v1/completions", '{"model": "x", "prompt": [%s]}', "null"),
    "prompts": ("/v1/completions", '{"model": "x", "prompt": [[%s]]}', "1.5"),
    "stops": ("/v1/completions", '{"model": "x", "prompt": "a", "stop": [%s]}', "1"),
    "messages": ("/v1/chat/completions", '{"model": "x", "messages": [%s]}', "1"),
    "contents": (
        "/v1/chat/completions",
        '{"model": "x", "messages": [{"role": "user", "content": [%s]}]}',
        "1",
    ),
    "chunks": ("/api/v1/asample", _ASAMPLE % ("%s", ""), "1"),
    "tokens": ("/api/v1/asample", _ASAMPLE % (_CHUNK, ""), "null"),
    "targets": ("/api/v1/asample", _ASAMPLE % ("", _SCORED), "null"),
    "ids": (
        "/api/v1/retrieve_futures",
        '{"target": {"sampling_session_id": "x"}, "retrieved_request_ids": [%s]}',
        "1",
    ),
    "recipients": (
        "/api/v1/save_weights_external",
        '{"model_id": "x", "seq_id": 1, "age_encryption_recipients": [%s]}',
        "1",
    ),
}
MISFITS = {name: filled(*each, room=16 * MIB) for name, each in _LISTS.items()}
"""Wrong elements in each list that a body may have, just fewer than are refused unread."""
SWARM = {name: filled(*each, room=63 * 1024) for name, each in _LISTS.items()}
NUMBERS = filled(*_LISTS["tokens"][:2], "257", room=4 * MIB - 2048)[1]


def prompt(base_model: str) -> bytes:
    return b'{"model": "%s", "prompt": "%s"}' % (base_model.encode(), b"word " * (15 * MIB // 5))


KINDS: dict[str, Callable[[Attacker, int], Awaitable[list[Awaitable[int]]]]] = {
    "bombs": lambda a, n: a.bombs(n, b"", declared=True),
    "dense": lambda a, n: a.bombs(n, os.urandom(70_000), declared=True),
    "undeclared": lambda a, n: a.bombs(n, os.urandom(70_000), declared=False),
    "honest": lambda a, n: a.honest(n),
    "slow": lambda a, n: a.slow(n),
    "prompts": lambda a, n: a.texts(n, "/v1/completions", prompt(a.base_model)),
    "numbers": lambda a, n: a.texts(n, "/api/v1/asample", NUMBERS),
    "misfits": lambda a, n: a.mixed(n, MISFITS),
    "swarm": lambda a, n: a.mixed(n, SWARM),
    "polls": lambda a, n: a.polls(n),
}


async def main(kind: str, port: int, count: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as http:
        attack = await KINDS[kind](Attacker(port, http), count)
        started_s = time.monotonic()
        statuses = Counter(await asyncio.gather(*attack))
    print(json.dumps({"seconds": time.monotonic() - started_s, "statuses": statuses}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
