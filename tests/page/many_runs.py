"""A store with hundreds of runs, written before the API process starts: no worker trains them."""

import asyncio
import json
import math
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.records import (
    CheckpointKind,
    CheckpointRecord,
    ModelRecord,
    ModelStatus,
    SessionRecord,
)
from tuneserve_engine.store.open import open_store
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.settings import ApiSettings

KEY = "tml-local"
COUNT = 500
BASE = "tuneserve/tiny"
SESSION = "s-" + "0" * 32
FOREIGN, OTHER_KEY = 251, "tml-other"  # one run is of another tenant
RESTORED = 486  # a run whose replay gave other results
STATES = ("running", "finished", "stopped", "diverged", "failed")  # of runs 0 to 4, and again
STEPS, ASKED = 40, 80  # optimizer steps of each run, and the number that its configuration names
STEP_S = 6.0
HELD_OUT_EVERY = 5
TOKENS = 500  # of each step


def run_id(number: int) -> str:
    return f"{SESSION}:train:{number}"


def tags(number: int) -> list[str]:
    """The tags of a run: each second is of a sweep, each fifth of a night."""
    return ["sweep"] * (number % 2 == 0) + ["night"] * (number % 5 == 0)


def key_of(number: int) -> str:
    return OTHER_KEY if number == FOREIGN else KEY


def last_loss(number: int) -> float:
    """The loss of the newest step; no two runs have the same."""
    return 1 + number / 1000


def fill(folder: Path, count: int) -> None:
    """Write ``count`` runs into a new store in the folder. The newest has the highest number."""
    with ThreadPoolExecutor() as pool:  # Playwright has an event loop in the tests' thread
        pool.submit(lambda: asyncio.run(_fill(folder, count))).result()
    with closing(sqlite3.connect(folder / "store.db")) as db, db:
        for number in range(count):
            _draw(db, number, count)
            _charge(db, number)


async def _fill(folder: Path, count: int) -> None:
    store = await open_store(ApiSettings(data_dir=folder))
    tenant, now_s = open_tenant(KEY), time.time()
    await store.put_record(SessionRecord(SESSION, tenant, now_s, now_s))
    for number in range(count):
        await store.put_record(_model(number, _created_s(number, count, now_s)))
    for number in range(0, count, 100):
        await store.put_record(_checkpoint(number, tenant, now_s))
    await store.close()


def _created_s(number: int, count: int, now_s: float) -> float:
    return now_s - STEPS * STEP_S - 10 * (count - 1 - number)


def _model(number: int, created_s: float) -> ModelRecord:
    state = STATES[number % len(STATES)]
    config = {"data": "tickets.jsonl", "rows": 640, "seed": 7, "steps": ASKED}
    metadata = {
        "name": f"tickets {number:03}",
        "tags": ",".join(tags(number)),
        "config": json.dumps(config | {"learning_rate": 2e-4}),
    }
    if state in ("finished", "stopped", "diverged"):
        metadata["outcome"] = state
    return ModelRecord(
        key=run_id(number),
        tenant=open_tenant(key_of(number)),
        parent=SESSION,
        base_model=BASE,
        config=AdapterConfig(rank=8, alpha=16.0, seed=7),
        created_s=created_s,
        last_request_s=created_s + STEPS * STEP_S,
        status=ModelStatus.FAILED if state == "failed" else ModelStatus.READY,
        user_metadata={key: value for key, value in metadata.items() if value},
        diverged=number == RESTORED,
    )


def _checkpoint(number: int, tenant: str, now_s: float) -> CheckpointRecord:
    return CheckpointRecord(
        key=f"tinker://{run_id(number)}/sampler_weights/final",
        tenant=tenant,
        parent=run_id(number),
        kind=CheckpointKind.SAMPLER,
        name="final",
        file_id="0" * 32,
        base_model=BASE,
        config=AdapterConfig(rank=8, alpha=16.0, seed=7),
        created_s=now_s,
        size_bytes=4096,
    )


def _draw(db: sqlite3.Connection, number: int, count: int) -> None:
    """Write the points of a curve with the times of real steps, which the store would not keep."""
    began_s = _created_s(number, count, time.time())
    position, points = 0, []
    for step in range(1, STEPS + 1):
        at_s = began_s + step * STEP_S
        loss = last_loss(number) + math.exp(-step / 8) * (step < STEPS)
        trained = {"loss_sum": 400 * loss, "tokens": TOKENS, "weight": 400.0}
        stepped = {"step": step, "learning_rate": 2e-4 * (1 - step / ASKED), "grad_norm": 0.9}
        told = [("forward_backward", trained), ("optim_step", stepped)]
        if step % HELD_OUT_EVERY == 0:
            told.append(("forward", trained | {"loss_sum": 400 * (loss + 0.1)}))
        for kind, values in told:
            position += 1
            points.append((kind, position, {"time_s": at_s, **values}))
    for kind in ("forward_backward", "optim_step", "forward"):
        own = [each for each in points if each[0] == kind]
        db.execute("INSERT INTO curves VALUES (?, ?, ?)", (run_id(number), kind, len(own)))
        db.executemany(
            "INSERT INTO curve_points VALUES (?, ?, ?, ?, ?)",
            [
                (run_id(number), kind, n, at, json.dumps({"kind": kind, "position": at, **values}))
                for n, (_, at, values) in enumerate(own)
            ],
        )


def _charge(db: sqlite3.Connection, number: int) -> None:
    """Write the usage of a run: a tenth of a device second for each of its steps."""
    numbers = {"requests": 2 * STEPS, "device_s": STEPS / 10, "trained_tokens": STEPS * TOKENS}
    db.execute(
        f"INSERT INTO usage (tenant, day, name, {', '.join(numbers)}, prompt_tokens, "
        "sampled_tokens, padded_tokens, flops) VALUES (?, ?, ?, ?, ?, ?, 0, 0, 0, 0)",
        (
            open_tenant(key_of(number)),
            int(time.time() // 86_400),
            run_id(number),
            *numbers.values(),
        ),
    )
