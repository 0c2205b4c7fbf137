"""Hostile bodies and texts: memory stays bounded, and other clients are served."""

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.faults.bystander import Bystander
from tests.faults.processes import Service, running_service

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("speaking_worker.py")
MIB = 2**20

QUICK = {
    "bombs": 20,
    "undeclared": 6,
    "slow": 12,
    "prompts": 4,
    "misfits": 12,
    "swarm": 48,
    "polls": 100,
}
FULL = {
    "bombs": 200,
    "dense": 200,
    "undeclared": 200,
    "honest": 64,
    "slow": 200,
    "prompts": 50,
    "numbers": 50,
    "misfits": 120,
    "swarm": 1200,
    "polls": 1200,
}
ROOMY = {"max_model_bytes": 2**30, "max_tenant_bytes": 2**30}
"""Limits for honest clients, because the queue's own limits are not tested here."""

OUTCOMES = {
    "honest": {200},
    "bombs": {413},
    "dense": {200, 429},
    "undeclared": {200, 429},
    "slow": {408, 429},
    "prompts": {400, 429},
    "numbers": {404, 429},
    "misfits": {400, 404, 422, 429},
    "swarm": {400, 404, 422},
    "polls": {200, 429},
}


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker and the attackers import from the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@dataclass(frozen=True)
class Measured:
    statuses: Counter[int]
    seconds: float
    grown_bytes: int
    healthz_s: list[float]
    polls_s: list[float]

    def __str__(self) -> str:
        times = (
            f"{name} p50 {np.percentile(each, 50):.3f} s, p99 {np.percentile(each, 99):.3f} s, "
            f"max {max(each):.3f} s of {len(each)}"
            for name, each in (("healthz", self.healthz_s), ("polls", self.polls_s))
        )
        return (
            f"{dict(self.statuses)} in {self.seconds:.1f} s; the API grew by "
            f"{self.grown_bytes / MIB:.0f} MiB; {'; '.join(times)}"
        )


def attacked(service: Service, kind: str, count: int) -> Measured:
    time.sleep(1)
    idle_bytes = service.api_memory_bytes()
    service.forget_api_peak()
    with Bystander(service.port) as bystander:
        command = [sys.executable, "-m", "tests.faults.body_attacks", kind]
        told = subprocess.run(
            [*command, str(service.port), str(count)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
            timeout=280,
        )
    found = json.loads(told.stdout)
    measured = Measured(
        Counter({int(status): number for status, number in found["statuses"].items()}),
        found["seconds"],
        service.api_peak_bytes() - idle_bytes,
        bystander.healthz_s,
        bystander.polls_s,
    )
    print(f"\n{count} {kind}: {measured}")
    return measured


def check(measured: Measured, kind: str, count: int) -> None:
    assert measured.statuses.total() == count
    assert measured.statuses.keys() <= OUTCOMES[kind]
    assert measured.grown_bytes < 2**30


def test_a_few_hostile_bodies_of_each_kind_leave_the_memory_bounded(tmp_path: Path) -> None:
    """12 slow bodies once took 190 MiB for minutes, 20 bombs 1.3 GB, and one misfit 3.4 GB."""
    small = {"body_memory_bytes": 256 * MIB, "text_memory_bytes": 64 * MIB, "poll_s": 1}
    with running_service(tmp_path, worker=False, body_timeout_s=0.5, **small) as service:
        service.start_worker(WORKER)
        for kind, count in QUICK.items():
            measured = attacked(service, kind, count)
            check(measured, kind, count)
        assert service.health() == "ready"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FULL)
def test_hostile_bodies_take_less_than_a_gigabyte_and_others_are_served(
    tmp_path: Path, kind: str
) -> None:
    settings = ROOMY if kind == "honest" else {}
    with running_service(tmp_path, worker=False, **settings) as service:
        service.start_worker(WORKER)
        measured = attacked(service, kind, FULL[kind])
        check(measured, kind, FULL[kind])
        assert service.health() == "ready"
    assert np.percentile(measured.healthz_s, 99) < 0.25
    assert np.percentile(measured.polls_s, 99) < 0.25
