"""T3 over several processes: a worker of a leader and followers, any of which is killed.

Every result and end state equals, bit for bit, that of one undisturbed process with as many
devices.
"""

import asyncio
import os
import random
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engine.conftest import TINY, write_base_model
from tests.faults.test_kills_jax import BASE_MODEL, JaxWorker, train
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_server.cli.local_server import free_port

KEY = "sixteen characters"
FOUR_HEADS = TINY | {"num_key_value_heads": 4, "max_position_embeddings": 64}
"""A base model that four devices can share."""
LOST = 1, -signal.SIGABRT
"""The exit statuses of a process that has lost another: JAX may notice first, and aborts."""


def free_ports() -> int:
    """A free port before another free one."""
    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("", port + 1)):
            return port


class HostsWorker:
    """The processes of one worker. ``kill`` kills one, and ``keep`` restarts all that end."""

    def __init__(
        self, count: int, settings: CommonSettings, compiled: Path, **options: object
    ) -> None:
        hosts = ",".join(["127.0.0.1"] * count)
        shared = {"hosts": hosts, "hosts_key": KEY, "hosts_port": free_ports(), **options}
        self.processes = [
            JaxWorker(settings, compiled, f"host-{number}", host_number=number, **shared)
            for number in range(count)
        ]
        self._draw = random.Random(count)
        self.victims: list[int] = []

    def kill(self) -> None:
        victim = self._draw.randrange(len(self.processes))
        self.victims.append(victim)
        self.processes[victim].kill()

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            for process in self.processes:
                group.create_task(_keep(process))


async def _keep(worker: JaxWorker) -> None:
    while True:
        process = await worker.start()
        try:
            status = await process.wait()
        finally:
            worker.kill()
            await process.wait()
        assert status in (-signal.SIGKILL, *LOST), f"it ended with {status}: {worker.log[-3000:]}"


def compare(folder: Path, compiled: Path, count: int, rounds: int, kills: int) -> None:
    model = write_base_model(folder / "model", FOUR_HEADS)
    options = {"base_model": model, "base_model_name": BASE_MODEL}
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    try:
        calm = CommonSettings(data_dir=folder / "calm")
        wanted = asyncio.run(train(calm, compiled, rounds, 0, devices=count, **options))
    finally:
        del os.environ["JAX_NUM_CPU_DEVICES"]
    stormy = CommonSettings(data_dir=folder / "stormy", job_attempts=1000)
    workers: list[HostsWorker] = []

    def new_worker(*arguments: object, **options: object) -> HostsWorker:
        workers.append(HostsWorker(count, *arguments, **options))  # type: ignore[arg-type]
        return workers[0]

    running = train(stormy, compiled, rounds, kills, new_worker=new_worker, **options)
    found = asyncio.run(running)
    assert found == wanted
    victims = workers[0].victims
    assert set(victims) == set(range(count)) and len(victims) == kills
    print(f"{count} processes: {kills} kills, of each of them, equal bits")


def test_a_few_kills_of_two_processes_change_no_bit(tmp_path: Path, compiled: Path) -> None:
    compare(tmp_path, compiled, 2, rounds=4, kills=4)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [2, 4])
def test_thirty_kills_of_any_process_change_no_bit(
    tmp_path: Path, compiled: Path, count: int
) -> None:
    compare(tmp_path, compiled, count, rounds=30, kills=30)
