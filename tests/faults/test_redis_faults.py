"""T6: Redis dies under load again and again and loses nothing that it acknowledged. Every process
refuses a Redis that would lose something.
"""

import asyncio
import hashlib
import logging
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import REFUSED
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_engine.store.redis import durability
from tuneserve_engine.store.redis.store import RedisStore
from tuneserve_server.cli.local_server import free_port

INFO = BaseModelInfo("tiny", "qwen3", 512, 1024, 64, "tiny")
KILLS = 12
MODELS = ("a", "b", "c", "d")
BACK_S = 1.0  # from the server's first answer to the first accepted submission
AWAY = (ConnectionError, StoreFailed)


def step(model: str, position: int) -> Job:
    payload = f"{model} {position} ".encode() * 200
    kind = JobKind.FORWARD_BACKWARD
    return Job(model, kind, model, position, payload, model, position, base_model="tiny")


def next_state(state: bytes, job: Job) -> bytes:
    """A state that differs for every order, repetition or omission of jobs."""
    return hashlib.blake2b(state + job.payload).digest()


@dataclass
class Diary:
    """The acknowledged requests and results, with their times."""

    accepted: dict[str, dict[int, str]] = field(default_factory=lambda: {m: {} for m in MODELS})
    results: dict[str, bytes] = field(default_factory=dict)
    last_s: float = 0.0
    should_yield: bool = False


async def submit_all(store: RedisStore, model: str, diary: Diary) -> None:
    """A client that sends its next request after the last was accepted, and resends if unsure."""
    position = 0
    while not diary.should_yield:
        try:
            submitted = await store.submit(step(model, position))
        except AWAY:
            await asyncio.sleep(0.02)
            continue
        diary.accepted[model][position] = submitted.request_id
        diary.last_s = time.monotonic()
        position += 1


async def result(store: RedisStore, request_id: str) -> bytes:
    while True:
        try:
            outcome = await store.wait(request_id, 10)
        except AWAY:
            await asyncio.sleep(0.02)
            continue
        if outcome is not None:
            assert outcome.rejection is None
            return outcome.body


async def read_all(store: RedisStore, model: str, diary: Diary) -> None:
    position = 0
    while not diary.should_yield or position < len(diary.accepted[model]):
        if position in diary.accepted[model]:
            request_id = diary.accepted[model][position]
            diary.results[request_id] = await result(store, request_id)
            position += 1
        else:
            await asyncio.sleep(0.01)


async def work(store: RedisStore) -> None:
    """A worker that sends its results until they are accepted."""
    epoch = (await store.lease("worker", "process", INFO)).epoch
    states = dict.fromkeys(MODELS, b"")
    cursor = 0
    while True:
        try:
            jobs = await store.take_jobs(epoch, after=cursor, max_jobs=8)
        except AWAY:
            await asyncio.sleep(0.02)
            continue
        cursor = jobs[-1].release
        outcomes = []
        for job in jobs:
            assert job.model_id is not None
            states[job.model_id] = next_state(states[job.model_id], job)
            outcomes.append(Outcome(job.request_id, states[job.model_id], changed=True))
        while True:
            try:
                await store.finish(epoch, outcomes)
                break
            except AWAY:
                await asyncio.sleep(0.02)


async def kill_again_and_again(server: RedisServer, diary: Diary) -> list[float]:
    """The seconds after each kill until a request was accepted again."""
    moments, waits = random.Random(1), []
    for _ in range(KILLS):
        await asyncio.sleep(moments.uniform(0.1, 0.4))
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(moments.uniform(0.0, 0.2))
        await asyncio.to_thread(server.start)
        back_s = time.monotonic()
        while diary.last_s < back_s:
            assert time.monotonic() < back_s + 10 * BACK_S
            await asyncio.sleep(0.005)
        waits.append(diary.last_s - back_s)
    return waits


@pytest.mark.alone
def test_redis_killed_twelve_times_loses_nothing_that_it_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    diary = Diary()

    async def load(server: RedisServer) -> list[float]:
        api, queue = [await RedisStore.open(server.url) for _ in range(2)]
        working = asyncio.create_task(work(queue))
        async with asyncio.TaskGroup() as clients:
            for model in MODELS:
                clients.create_task(submit_all(api, model, diary))
                clients.create_task(read_all(api, model, diary))
            waits = await kill_again_and_again(server, diary)
            diary.should_yield = True
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await api.close()
        await queue.close()
        return waits

    async def check(server: RedisServer) -> None:
        store = await RedisStore.open(server.url)
        for model, accepted in diary.accepted.items():
            state = b""
            for position, request_id in accepted.items():
                job = step(model, position)
                again = await store.submit(job)
                assert (again.request_id, again.duplicate) == (request_id, True)
                state = next_state(state, job)
                assert diary.results[request_id] == state
                assert await store.wait(request_id, 0) == Outcome(request_id, state)
        await store.close()

    with RedisServer(tmp_path / "redis") as server:
        waits = asyncio.run(load(server))
        server.kill()
        server.start()
        asyncio.run(check(server))
    count = sum(map(len, diary.accepted.values()))
    print(f"{KILLS} kills, {count} requests, accepted again after {max(waits):.3f} s at most")
    assert count > 10 * KILLS  # it was under load
    assert max(waits) <= BACK_S


COMMANDS = {
    "api": ["tuneserve_server", "api", "--port", str(free_port())],
    "worker": ["tuneserve_engine.worker"],
}


@pytest.mark.parametrize(
    ("process", "setting", "value"),
    [
        ("api", "appendonly", "no"),
        ("api", "appendfsync", "everysec"),
        ("worker", "no-appendfsync-on-rewrite", "yes"),
        ("worker", "maxmemory-policy", "volatile-ttl"),
    ],
)
def test_no_process_starts_on_a_redis_that_may_lose_something(
    tmp_path: Path, process: str, setting: str, value: str
) -> None:
    assert setting in durability.SETTINGS
    with RedisServer(tmp_path / "redis", **{setting: value}) as server:
        ended = subprocess.run(
            [sys.executable, "-m", *COMMANDS[process]],
            env={
                "TUNESERVE_STORE": server.url,
                "TUNESERVE_DATA_DIR": str(tmp_path / "data"),
                "TUNESERVE_FILES_DIR": str(tmp_path / "files"),
                "JAX_PLATFORMS": "cpu",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == REFUSED, ended.stderr
    wanted = durability.SETTINGS[setting]
    assert f"{setting} is {value!r}; set in its configuration: {setting} {wanted}" in ended.stderr
