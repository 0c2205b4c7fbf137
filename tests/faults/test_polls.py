"""Many polls at once: the cost of a parked one, and the delay of its result."""

import asyncio
import json
import resource
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import Service, running_service

pytestmark = pytest.mark.anyio

MOST_BYTES = 64 * 1024  # per parked poll, socket included
MOST_S = 1.0  # from the store's commit to the last byte of the answer, for 99 of 100
JOBS_OF_TENANT = 1000  # the server accepts 1,024


@dataclass
class Connection:
    """One kept-alive connection of a client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, key: str, body: Any) -> tuple[int, bytes]:
        content = json.dumps(body).encode()
        self.writer.write(
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split()[0])
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def accepted(self, path: str, key: str, body: Any) -> Any:
        status, content = await self.post(path, key, body)
        assert status == 200, content
        return json.loads(content)


@asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    opened = [await Connection.open(port) for _ in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            each.writer.close()


async def shared_out(
    work: Iterable[Any], hands: list[Connection], do: Callable[[Connection, Any], Awaitable[Any]]
) -> list[Any]:
    """The results of ``do`` for all work, which the hands share."""
    left = iter(work)
    done: list[Any] = []

    async def run(hand: Connection) -> None:
        for piece in left:
            done.append(await do(hand, piece))

    await asyncio.gather(*map(run, hands))
    return done


async def submitted(port: int, count: int) -> list[tuple[str, str]]:
    """Submit samples, and return the tenant and request id of each."""

    async def sample(hand: Connection, number: int) -> tuple[str, str]:
        tenant = f"tml-{number // JOBS_OF_TENANT}"
        body = {
            "sampling_session_id": samplers[tenant],
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 3, "seed": 7},
        }
        return tenant, (await hand.accepted("asample", tenant, body))["request_id"]

    samplers = {}
    async with connections(port, 50) as hands:
        for tenant in {f"tml-{number // JOBS_OF_TENANT}" for number in range(count)}:
            session = await hands[0].accepted("create_session", tenant, {})
            wanted = {**session, "sampling_session_seq_id": 0, "base_model": "tuneserve/fake"}
            made = await hands[0].accepted("create_sampling_session", tenant, wanted)
            samplers[tenant] = made["sampling_session_id"]
        return await shared_out(range(count), hands, sample)


async def result(hand: Connection, tenant: str, request_id: str) -> tuple[str, float]:
    """The result and the time of its arrival. Polls are repeated as in the SDK."""
    while True:
        status, content = await hand.post("retrieve_future", tenant, {"request_id": request_id})
        if status == 200:
            assert b"error" not in content
            return request_id, time.time()
        assert status == 408, content


async def settled(service: Service) -> int:
    """The memory of the API once it no longer grows."""
    seen = [service.api_memory_bytes()]
    while len(seen) < 3 or seen[-1] > seen[-3]:
        await asyncio.sleep(0.3)
        seen.append(service.api_memory_bytes())
    return seen[-1]


def finished_s(data_dir: Path) -> dict[str, float]:
    """The end of each job, from the store, which is closed by then."""
    with sqlite3.connect(f"file:{data_dir / 'store.db'}?mode=ro", uri=True) as store:
        found = dict(store.execute("SELECT request_id, finished_s FROM jobs"))
    store.close()
    return found


async def poll_many(data_dir: Path, count: int) -> None:
    with running_service(data_dir, worker=False) as service:
        requests = await submitted(service.port, count)
        before = await settled(service)
        async with connections(service.port, count) as hands:
            polls = [
                asyncio.create_task(result(hand, *request))
                for hand, request in zip(hands, requests, strict=True)
            ]
            each = (await settled(service) - before) / count
            assert not any(poll.done() for poll in polls)
            await asyncio.to_thread(service.start_worker)
            received = dict(await asyncio.gather(*polls))
    stored = finished_s(data_dir)
    delays = sorted(received[request_id] - stored[request_id] for request_id in received)
    p99_s = delays[int(0.99 * count)]
    print(
        f"\n{count} parked polls: {each / 1024:.1f} KiB each; delivered in "
        f"{delays[count // 2] * 1000:.0f} ms (median), {p99_s * 1000:.0f} ms (99 of 100)"
    )
    assert each <= MOST_BYTES
    assert p99_s <= MOST_S


@pytest.fixture(autouse=True)
def many_sockets() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 20_000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(20_000, hard), hard))


@pytest.mark.alone
async def test_a_thousand_parked_polls_are_cheap_and_answered_soon(tmp_path: Path) -> None:
    await poll_many(tmp_path, 1000)


@pytest.mark.nightly
async def test_five_thousand_parked_polls_are_cheap_and_answered_soon(tmp_path: Path) -> None:
    await poll_many(tmp_path, 5000)
