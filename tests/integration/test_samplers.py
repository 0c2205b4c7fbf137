"""Workers that only sample, beside one that trains: added, killed and stopped under load."""

import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest
from tinker import types

from tests.integration.test_end_to_end import DATA, new_trainer, step
from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPT = types.ModelInput.from_ints(list(range(5, 25)))
SAMPLES, SEQUENCES, LENGTH = 20, 20, 200


class Samplers:
    """Workers of a running service that only sample, by name."""

    def __init__(self, running: LocalServer) -> None:
        self._running = running
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.trainer = ""

    def add(self, name: str) -> None:
        given = QUICK | {"data_dir": self._running.data_dir, "sample_only": "true"}
        given |= {"worker_name": name, "lease_ttl_s": "2"}
        variables = {f"TUNESERVE_{each.upper()}": str(value) for each, value in given.items()}
        with self._running.log.with_name(f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tuneserve_engine.worker"],
                env=os.environ | variables,
                stderr=log,
            )

    def until(self, *names: str) -> None:
        """Wait until exactly these serve, beside the worker that trains."""
        deadline_s = time.monotonic() + 120
        while set(names) != told(self._running, "decode_slots").keys() - {self.trainer}:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        (served,) = health(self._running)["base_models"]
        assert served.get("samplers", 0) == len(names)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def health(running: LocalServer) -> dict:
    with urllib.request.urlopen(f"{running.url}/api/v1/healthz", timeout=30) as answer:
        return json.load(answer)


def told(running: LocalServer, name: str) -> dict[str, float]:
    """A metric of each worker that is alive, as of its last report."""
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [each for each in lines if each.startswith(f"tuneserve_{name}{{")]
    return {each.split('worker="')[1].split('"')[0]: float(each.split()[-1]) for each in found}


def sampled_by(running: LocalServer) -> dict[str, float]:
    return told(running, "tokens_sampled_total")


def begun(sampler, seeds):
    params = [types.SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=n) for n in seeds]
    return [sampler.sample(PROMPT, num_samples=SEQUENCES, sampling_params=each) for each in params]


def tokens(futures):
    found = [future.result(timeout=120).sequences for future in futures]
    return [[each.tokens for each in sequences] for sequences in found]


def test_samplers_take_the_samples_and_leave_again(tmp_path, monkeypatch):
    with (
        LocalServer(tmp_path, **QUICK, lease_ttl_s="2") as running,
        service_client(running.url, "tml-sampler") as client,
    ):
        samplers = Samplers(running)
        try:
            run_scenario(running, client, samplers)
        finally:
            samplers.end()


def run_scenario(running, client, samplers):
    trainer = new_trainer(client, running)
    step(trainer, DATA)
    first = trainer.save_weights_and_get_sampling_client().result()
    wanted = tokens(begun(first, range(SAMPLES)))
    (samplers.trainer,) = sampled_by(running)

    for name in ("one", "two"):
        samplers.add(name)
    samplers.until("one", "two")
    before = sampled_by(running)[samplers.trainer]
    futures = begun(first, range(SAMPLES))
    for victim, successor, left in (
        ("one", "three", ("two", "three")),
        ("two", "four", ("four", "three")),
    ):
        futures += until_busy(running, victim, first)
        samplers.add(successor)
        samplers.processes[victim].kill()
        step(trainer, DATA)  # the trainer trains meanwhile
        samplers.until(*left)
    assert tokens(futures) == len(futures) // SAMPLES * wanted

    second = trainer.save_weights_and_get_sampling_client().result()  # its file reaches both
    reached = sampled_by(running)
    found = tokens(begun(second, range(SAMPLES)))
    deadline_s = time.monotonic() + 30
    while any(sampled_by(running)[name] - reached[name] < LENGTH for name in ("three", "four")):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert sampled_by(running)[samplers.trainer] == before
    assert health(running)["worker"] == "ready"

    for name in ("three", "four"):
        samplers.processes[name].terminate()
        assert samplers.processes[name].wait(60) == 0
    samplers.until()
    assert tokens(begun(second, range(SAMPLES))) == found  # by the trainer, the same tokens


def until_busy(running: LocalServer, name: str, sampler):
    """Sample until the worker has unfinished sequences: its death leaves some to others.

    Reports of its load may miss samples that end quickly. Returns the futures.
    """
    futures, again_s, deadline_s = [], 0.0, time.monotonic() + 60
    while not told(running, "sequences_unfinished").get(name):
        now_s = time.monotonic()
        assert now_s < deadline_s, "its samples had ended before it was looked at"
        if now_s >= again_s:
            futures += begun(sampler, range(SAMPLES))
            again_s = now_s + 10
        time.sleep(0.05)
    return futures
