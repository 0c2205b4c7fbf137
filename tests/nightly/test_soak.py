"""All attacks at once and for long, beside a tenant that trains, on real processes with the
embedded model and the default limits.

``SOAK_S`` is the duration of the attack in seconds, by default half an hour. In less than 300
seconds, all rounds of a kind may meet a restart, which fails the test. At the end, the test prints
the table of ``docs/reliability.md``.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.bystander import Bystander
from tests.faults.processes import memory_bytes, peak_bytes
from tests.faults.workload import state_bits
from tests.nightly import soak_tenant
from tests.nightly.soak_tenant import KEY, Step
from tests.nightly.test_giants import FLOOD, data, gradient_s
from tuneserve_client import Client
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_engine.core.records import CheckpointRecord
from tuneserve_engine.settings.common import CommonSettings
from tuneserve_engine.store.open import open_store
from tuneserve_server.cli.local_server import LocalServer
from tuneserve_server.cli.readiness import health_of

ROOT = Path(__file__).parents[2]
SOAK_S = float(os.environ.get("SOAK_S", "1800"))
IDLE_S = min(60.0, SOAK_S / 4)
RESTARTED_EVERY_S = min(200.0, SOAK_S / 3)
ASKED_EVERY_S = 0.05
"""Seconds between two queries of the bystander."""
AT_ONCE = 64
MIB, GIB = 2**20, 2**30
OUTCOMES = {
    "bombs": {413},
    "bombs without a size": {200, 429},
    "slow bodies": {408, 429},
    "prompts": {400, 429},
    "numbers": {404, 429},
    "wrong elements": {400, 404, 422, 429},
    "polls": {200, 429},
    "sessions": {200, 429},
    "refused samples": {200, 429},
    "failing samples": {200, 429},
    "giant requests": {200, 429},
    "requests of 5,000 tokens": {200, 429},
}
"""Expected statuses, beside 0 (the connection ended) and 503 (the API restarts)."""
AWAY = {0, 503}


@dataclass
class Waits:
    """Waits in seconds."""

    healthz: list[float]
    polls: list[float]
    steps: list[float] = field(default_factory=list)


@dataclass
class Seen:
    """The observations. ``away`` are the times in which the API process was restarted."""

    idle: Waits
    beside: Waits
    slice_s: float
    idle_bytes: int
    peak_bytes: int
    away: list[tuple[float, float]]
    attack: dict[str, Any]
    begun_s: float
    ended_s: float


class Restarts:
    """Ends the API process of a server again and again, by SIGTERM and SIGKILL in turn."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.pid = self._find()
        self.peak_bytes = 0
        self.away: list[tuple[float, float]] = []

    def look(self) -> None:
        """Read the peak memory. The kernel keeps it, so none is missed between two calls."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes(self.pid))

    def restart(self) -> None:
        self.look()
        begun_s = time.monotonic()
        os.kill(self.pid, signal.SIGKILL if len(self.away) % 2 else signal.SIGTERM)
        while self._is_there(self.pid) or not health_of(self._server.url):
            assert time.monotonic() < begun_s + 60, self._server.log.read_text()[-4000:]
            time.sleep(0.02)
        self.away.append((begun_s, time.monotonic()))
        self.pid = self._find()

    def _is_there(self, pid: int) -> bool:
        return str(pid) in self._children()

    def _children(self) -> list[str]:
        parent = self._server.pid
        return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()

    def _find(self) -> int:
        for pid in self._children():
            if b"\0api\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise AssertionError("there is no API process")


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the soak, which is killed at the end if it still runs."""
    command = [sys.executable, "-m", f"tests.nightly.{module}", *arguments]
    running = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def port_of(server: LocalServer) -> int:
    return int(server.url.rpartition(":")[2])


def measured_slice_s(server: LocalServer) -> float:
    """The time of a slice. It also compiles the programs that the attack will need."""
    with Client(server.url, api_key="tml-heavy") as client:
        heavy = client.create_model(rank=8, seed=2)
        heavy.forward_backward(data(2, 2000)).result()
        heavy.forward_backward(data(*FLOOD)).result()
        return max(SLICE_S, min(gradient_s(heavy, data(1, FLOOD[1])) for _ in range(9)))


def soaked(server: LocalServer, diary: Path) -> Seen:
    """The observations while the tenant trained: first alone, then beside the attack."""
    slice_s = measured_slice_s(server)
    attacker = (str(port_of(server)), server.base_model, str(SOAK_S))
    with (
        Bystander(port_of(server), server.base_model, ASKED_EVERY_S) as bystander,
        process("soak_attack", *attacker) as attack,
        process("soak_tenant", server.url, str(diary)) as tenant,
    ):
        assert attack.stdout is not None and attack.stdout.readline() == "ready\n"
        while not diary.exists() or diary.read_text().count("\n") < 10:
            assert tenant.poll() is None
            time.sleep(0.1)
        restarts = Restarts(server)
        idle_s = time.monotonic()
        bystander.forget()
        time.sleep(IDLE_S)
        idle = Waits(bystander.healthz_s, bystander.polls_s)
        idle_bytes = memory_bytes(restarts.pid)
        begun_s = time.monotonic()
        bystander.forget()
        assert attack.stdin is not None
        attack.stdin.close()
        attack.stdin = None
        watch(restarts, bystander, [attack, tenant], begun_s + SOAK_S)
        ended_s = time.monotonic()
        beside = Waits(bystander.healthz_s, bystander.polls_s)
        found = json.loads(attack.communicate(timeout=300)[0])
        tenant.terminate()
        assert tenant.wait(timeout=600) == 0
    steps = [each for each in soak_tenant.read(diary) if "optim_step" in each.accepted]
    idle.steps = [each.wait_s for each in steps if idle_s <= each.begun_s < begun_s]
    beside.steps = [
        each.wait_s
        for each in steps
        if begun_s <= each.begun_s < ended_s and not is_within(each, restarts.away)
    ]
    return Seen(
        idle,
        beside,
        slice_s,
        idle_bytes,
        restarts.peak_bytes,
        restarts.away,
        found,
        begun_s,
        ended_s,
    )


def watch(
    restarts: Restarts,
    bystander: Bystander,
    running: Sequence[subprocess.Popen[str]],
    until_s: float,
) -> None:
    restart_s = time.monotonic() + RESTARTED_EVERY_S
    while time.monotonic() < until_s - 1:
        time.sleep(1)
        assert all(each.poll() is None for each in running)
        restarts.look()
        if time.monotonic() >= restart_s and until_s - restart_s > RESTARTED_EVERY_S / 2:
            restart_s += RESTARTED_EVERY_S
            with bystander.away():
                restarts.restart()


def is_within(step: Step, away: Sequence[tuple[float, float]]) -> bool:
    """Whether the API process was restarted while the step waited."""
    return any(step.begun_s <= end_s and begun_s <= step.ended_s for begun_s, end_s in away)


# --- what became of the tenant's work -------------------------------------------------------------


def told(step: Step) -> tuple[int, dict[str, Any]]:
    return step.number, {kind: each for kind, each in step.told.items() if kind != "path"}


def check_outcomes(server: LocalServer, steps: Sequence[Step]) -> int:
    """Ask again for every result, which must be unchanged. Returns the number of results."""
    asked = [
        (kind, request_id, step.told[kind])
        for step in steps
        for kind, request_id in step.accepted.items()
    ]
    assert len({request_id for _, request_id, _ in asked}) == len(asked)
    with Client(server.url, api_key=KEY) as client:
        for first in range(0, len(asked), AT_ONCE):
            some = asked[first : first + AT_ONCE]
            futures = [client.future(request_id, kind) for kind, request_id, _ in some]  # type: ignore[arg-type]
            for future, (kind, request_id, wanted) in zip(futures, some, strict=True):
                assert soak_tenant.told_of(future.result()) == wanted, f"{kind} {request_id}"
    return len(asked)


def saves(server: LocalServer, steps: Sequence[Step]) -> list[list[object]]:
    """All bits of every checkpoint that the tenant saved. The server has ended."""
    settings = CommonSettings(data_dir=server.data_dir)

    async def file_ids() -> list[str]:
        store = await open_store(settings)
        try:
            found = [
                await store.get_record(CheckpointRecord, each.told["path"])
                for each in steps
                if "path" in each.told
            ]
        finally:
            await store.close()
        return [each.file_id for each in found if each is not None]

    found = asyncio.run(file_ids())
    assert len(found) == sum("path" in each.told for each in steps)
    return [state_bits(settings.files_dir / each, server.base_model) for each in found]


def undisturbed(folder: Path, settings: dict[str, str], count: int) -> tuple[list[Step], Any]:
    folder.mkdir()
    with LocalServer(folder, **settings) as server:
        with Client(server.url, api_key=KEY) as client:
            steps = list(soak_tenant.undisturbed(soak_tenant.new_model(client), count))
    return steps, saves(server, steps)


# --- the table ------------------------------------------------------------------------------------


def p50_p99(waits: Sequence[float], scale: float = 1.0) -> tuple[float, float]:
    return statistics.median(waits) * scale, float(np.percentile(waits, 99)) * scale


def table(seen: Seen, requests: int, lost: int) -> str:
    """The table, as in docs/reliability.md."""
    grown = (seen.peak_bytes - seen.idle_bytes) / MIB
    rows = [
        ("", "Idle", "Beside the attack", "Bound"),
        ("---", "---", "---", "---"),
        (
            "Memory of the API process",
            f"{seen.idle_bytes / MIB:.0f} MiB",
            f"at most {grown:.0f} MiB more",
            "1 GiB more",
        ),
    ]
    for name, idle, beside in (
        ("`/healthz`", seen.idle.healthz, seen.beside.healthz),
        ("polls", seen.idle.polls, seen.beside.polls),
    ):
        before, now = p50_p99(idle, 1e3), p50_p99(beside, 1e3)
        rows.append(
            (
                f"{name}, p50 / p99 of {len(beside):,}",
                "{:.0f} / {:.0f} ms".format(*before),
                "{:.0f} / {:.0f} ms".format(*now),
                "p99 250 ms",
            )
        )
    before, now = p50_p99(seen.idle.steps), p50_p99(seen.beside.steps)
    bound_s = 3 * before[1] + seen.slice_s
    rows.append(
        (
            f"a step of the tenant that trains, p50 / p99 of {len(seen.beside.steps):,}",
            "{:.3f} / {:.3f} s".format(*before),
            "{:.3f} / {:.3f} s".format(*now),
            f"p99 {bound_s:.3f} s",
        )
    )
    gone_s = max(end_s - begun_s for begun_s, end_s in seen.away)
    rows.append(
        (
            f"{len(seen.away)} restarts of the API process",
            "",
            f"back within {gone_s:.1f} s",
            "",
        )
    )
    of_tenant = f"{requests:,} accepted requests of that tenant"
    rows.append((of_tenant, "", f"{lost} lost or differing", "0"))
    lines = ["| " + " | ".join(each) + " |" for each in rows]
    attack = [
        f"{kind}: {seen.attack['rounds'].get(kind, 0)} over, answers {statuses}"
        for kind, statuses in seen.attack["statuses"].items()
    ]
    return "\n".join([*lines, "", f"{SOAK_S:.0f} s; a slice: {seen.slice_s:.3f} s", *attack])


def check_attack(attack: dict[str, Any]) -> None:
    """Check that every kind of attack was sent and got the same answers as alone."""
    for kind, known in OUTCOMES.items():
        answers = {int(status) for status in attack["statuses"][kind]}
        assert answers & known and answers <= known | AWAY, f"{kind}: {answers}"


@pytest.mark.timeout(int(3 * SOAK_S + 1800))
def test_a_tenant_trains_undisturbed_beside_every_attack_and_restarts(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    settings = {
        "compile_ahead": "false",
        "compile_cache": str(tmp_path / "compiled"),
        "store_reserve_bytes": str(32 * MIB),
    }
    with LocalServer(tmp_path, **settings) as server:
        seen = soaked(server, diary)
        steps = soak_tenant.read(diary)
        requests = check_outcomes(server, steps)
    found = saves(server, steps)
    count = sum("optim_step" in each.accepted for each in steps)
    wanted, wanted_saves = undisturbed(tmp_path / "calm", settings, count)
    pairs = zip_longest(map(told, steps), map(told, wanted))
    lost = sum(one != other for one, other in pairs)
    print(f"\n{table(seen, requests, lost)}")
    assert lost == 0
    assert found == wanted_saves
    check_attack(seen.attack)
    assert len(seen.away) > 1
    assert seen.peak_bytes - seen.idle_bytes < GIB
    assert p50_p99(seen.beside.healthz)[1] < 0.25
    assert p50_p99(seen.beside.polls)[1] < 0.25
    slice_s, idle, beside = seen.slice_s, p50_p99(seen.idle.steps), p50_p99(seen.beside.steps)
    assert beside[0] <= 3 * idle[0] + slice_s
    assert beside[1] <= 3 * idle[1] + slice_s
