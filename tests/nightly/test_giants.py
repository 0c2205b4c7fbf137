"""A paying tenant's small steps on an idle service, beside another tenant's request of half a
million tokens, and beside its flood of requests of five thousand, on real processes.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tuneserve_client import Client, Datum, next_token_datum
from tuneserve_client.sync import Model
from tuneserve_engine.core.policies import SLICE_S
from tuneserve_server.cli.local_server import LocalServer

GIANT, FLOOD = (500, 1000), (5, 1000)
"""Datums, and the tokens of each."""
STEPS = 60


def data(count: int, tokens: int) -> list[Datum]:
    return [next_token_datum([(7 * i + j) % 400 + 3 for j in range(tokens)]) for i in range(count)]


def step_s(model: Model, batch: list[Datum]) -> float:
    started_s = time.monotonic()
    model.forward_backward(batch)
    model.optim_step(1e-4).result()
    return time.monotonic() - started_s


def gradient_s(model: Model, batch: list[Datum]) -> float:
    """The time of one gradient. A slice has whole sequences, so it is no shorter than this."""
    started_s = time.monotonic()
    model.forward_backward(batch).result()
    return time.monotonic() - started_s


def told(name: str, waits: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    p50, p99 = statistics.median(waits), sorted(waits)[int(0.99 * (len(waits) - 1))]
    print(f"{name}: {len(waits)} steps, p50 {p50:.3f} s, p99 {p99:.3f} s")
    return p50, p99


@contextmanager
def tenants(folder: Path) -> Iterator[tuple[Model, Model]]:
    """The model of a light tenant, and that of a heavy one, with compiled programs."""
    with (
        LocalServer(folder, compile_ahead="false") as server,
        Client(server.url, api_key="tml-light") as light,
        Client(server.url, api_key="tml-heavy") as heavy,
    ):
        models = light.create_model(rank=8, seed=1), heavy.create_model(rank=8, seed=2)
        for model in models:
            model.forward_backward(data(2, 2000)).result()
            for _ in range(9):
                step_s(model, data(1, 128))
        yield models


@pytest.mark.parametrize("load", ["giant", "flood"])
def test_small_steps_beside_a_giant_and_a_flood(tmp_path: Path, load: str) -> None:
    with tenants(tmp_path) as (light, heavy):
        small = data(1, 128)
        idle = told("idle", [step_s(light, small) for _ in range(STEPS)])
        size = GIANT if load == "giant" else FLOOD
        batch = data(*size)
        slice_s = max(SLICE_S, min(gradient_s(heavy, data(1, 1000)) for _ in range(9)))
        asked = [heavy.forward_backward(batch) for _ in range(1 if load == "giant" else 100)]
        time.sleep(2)
        waits = [step_s(light, small) for _ in range(STEPS)]
        assert not asked[-1].done(), "the load was over too soon"
        beside = told(f"beside a {load}", waits)
        ratios = [own / alone for own, alone in zip(beside, idle, strict=True)]
        print(f"slice {slice_s:.3f} s; ratios: p50 x{ratios[0]:.1f}, p99 x{ratios[1]:.1f}")
        assert beside[0] <= 3 * idle[0] + slice_s
        assert beside[1] <= 3 * idle[1] + slice_s
        for each in asked:
            each.result()
