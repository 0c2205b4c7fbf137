"""Measure the queue alone, from submit over take and finish to the waiting client.

A request has 100 KB. There are two processes, as in the service. The process with the store submits
and waits. The other one takes and finishes, over the worker's socket (SQLite) or over Redis. For
comparison, the same bytes are appended to a file and fsynced.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from results import append, commit_name

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import Job, JobKind, Outcome
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store import remote
from tuneserve_engine.store.base import Store
from tuneserve_engine.store.open import open_queue, open_store
from tuneserve_engine.store.sqlite import group_commit

INFO = BaseModelInfo("bench", "none", 1, 1, 1, "bench")
PAYLOAD, BODY = os.urandom(100_000), os.urandom(40_000)
IN_FLIGHT = 32
SLOW_FSYNC_S = 0.004


@dataclass(frozen=True)
class Figures:
    p50_ms: float  # one request at a time
    per_s: float  # with IN_FLIGHT at a time


def echo(settings: CommonSettings) -> None:
    """Run a worker that answers at once."""

    async def work() -> None:
        async with open_queue(settings) as connect:
            queue = await connect()
            lease = await queue.lease("bench", "bench", INFO)
            cursor = 0
            while True:
                jobs = await queue.take_jobs(lease.epoch, after=cursor, max_jobs=256)
                cursor = jobs[-1].release
                await queue.finish(lease.epoch, [Outcome(job.request_id, BODY) for job in jobs])

    asyncio.run(work())


@asynccontextmanager
async def opened(settings: CommonSettings) -> AsyncIterator[Store]:
    store = await open_store(settings)
    try:
        if settings.store_kind == "sqlite":
            async with remote.serve(store, settings.store_socket):
                yield store
        else:
            yield store
    finally:
        await store.close()


async def measure(settings: CommonSettings, requests: int) -> Figures:
    worker = multiprocessing.get_context("spawn").Process(target=echo, args=(settings,))
    async with opened(settings) as store:
        worker.start()
        try:
            seqs = iter(range(10**9))

            async def one() -> float:
                started_s = time.perf_counter()
                job = Job("bench", JobKind.SAMPLE, "bench", next(seqs), PAYLOAD, base_model="bench")
                request_id = (await store.submit(job)).request_id
                assert await store.wait(request_id, 60) is not None
                return time.perf_counter() - started_s

            for _ in range(20):
                await one()
            alone = [await one() for _ in range(requests // 4)]
            limit = asyncio.Semaphore(IN_FLIGHT)

            async def limited() -> None:
                async with limit:
                    await one()

            started_s = time.perf_counter()
            await asyncio.gather(*(limited() for _ in range(requests)))
            together_s = time.perf_counter() - started_s
        finally:
            worker.kill()
            worker.join()
    return Figures(1000 * statistics.median(alone), requests / together_s)


def disk(folder: Path, requests: int) -> Figures:
    """Append the same bytes and fsync them, twice per request.

    With one request in flight, no durable store can be faster. With many, a store gains by sharing
    an fsync.
    """
    times = []
    with (folder / "disk").open("ab", buffering=0) as file:
        for _ in range(requests // 4):
            started_s = time.perf_counter()
            for data in (PAYLOAD, BODY):
                file.write(data)
                os.fsync(file.fileno())
            times.append(time.perf_counter() - started_s)
    p50_s = statistics.median(times)
    return Figures(1000 * p50_s, 1 / p50_s)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Start a durable Redis server, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    server = subprocess.Popen(
        [*command, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@contextmanager
def slow_disk() -> Iterator[None]:
    """Make each commit that changes something, which is one fsync, take 4 ms longer."""
    fast = group_commit.commit

    def slow(connection, calls, now_s):  # type: ignore[no-untyped-def]
        before = connection.total_changes
        answer = fast(connection, calls, now_s)
        if connection.total_changes != before:
            time.sleep(SLOW_FSYNC_S)
        return answer

    group_commit.commit = slow
    try:
        yield
    finally:
        group_commit.commit = fast


def run(folder: Path, requests: int) -> dict[str, Figures]:
    figures = {"disk: 2 fsyncs per request": disk(folder, requests)}
    settings = CommonSettings(data_dir=folder / "sqlite")
    figures["SQLite"] = asyncio.run(measure(settings, requests))
    with slow_disk():
        settings = CommonSettings(data_dir=folder / "slow")
        figures["SQLite, every commit 4 ms slower"] = asyncio.run(measure(settings, requests))
    if shutil.which("redis-server"):
        with redis_server(folder) as url:
            settings = CommonSettings(data_dir=folder / "redis", store=url)
            figures["Redis, appendfsync always"] = asyncio.run(measure(settings, requests))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        figures = run(Path(name), arguments.requests)
    base = figures["disk: 2 fsyncs per request"]
    lines = [
        f"## The queue alone, {commit_name()}",
        "",
        f"`benchmarks/queue_alone.py --requests {arguments.requests}`: payloads of 100 KB, results "
        f"of 40 KB, two processes, {os.cpu_count()} cores.",
        "",
        f"| | 1 in flight, p50 ms | {IN_FLIGHT} in flight, requests/s | over disk alone |",
        "|---|---|---|---|",
    ]
    for label, each in figures.items():
        ratio = each.per_s / base.per_s
        lines.append(f"| {label} | {each.p50_ms:.2f} | {each.per_s:.0f} | {ratio:.2f} |")
    append("\n".join([*lines, "", ""]), dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
