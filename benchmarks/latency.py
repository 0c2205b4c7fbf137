"""Measure the round trip of a one-datum ``forward_backward`` on an idle server.

It also compares a custom loss on the server with the same loss in the two phases of the SDK. The
script drives the real processes through the official SDK and, to see the server's own share,
through bare HTTP. It also runs the same body in the bare engine in this process, so the ratio shows
the cost of the service. The store is durable throughout (SQLite, synchronous=FULL), and its fsync
is timed, too.
"""

import argparse
import dataclasses
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch
from contenders import wait_until_compiled
from results import append, commit_name
from tinker import types

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.settings.worker import WorkerSettings
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.execution.packing import PackingRequest, pack
from tuneserve_server.cli.local_server import LocalServer

TOKENS, RANK, WARM_UP = 32, 8, 20


def milliseconds(run: Callable[[], Any], rounds: int) -> list[float]:
    """Return the wall time of each round after the warm-up."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - started_s))
    return times


def fsync(folder: Path) -> Callable[[], None]:
    """Return a function that appends 4 KiB and waits for the disk."""
    file = (folder / "probe").open("ab", buffering=0)

    def run() -> None:
        file.write(bytes(4096))
        os.fsync(file.fileno())

    return run


def sdk_round_trip(server: LocalServer) -> Callable[[], Any]:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-bench")
    trainer = service.create_lora_training_client(base_model=server.base_model, rank=RANK).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(TOKENS))),
        loss_fn_inputs={"target_tokens": list(range(1, TOKENS + 1)), "weights": [1.0] * TOKENS},
    )
    return lambda: trainer.forward_backward([datum], "cross_entropy").result()


def dpo(
    logprobs: Any, ref: Any, chosen: Any, rejected: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    moved = logprobs - ref
    margin = 0.1 * ((moved * chosen).sum() - (moved * rejected).sum())
    return -torch.nn.functional.logsigmoid(margin), {"custom/margin:mean": margin}


def custom_loss_round_trips(server: LocalServer) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the round trip of a custom loss on the server, and that of the SDK's two phases."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-bench")
    trainer = service.create_lora_training_client(base_model=server.base_model, rank=RANK).result()
    chosen = (torch.arange(TOKENS) < TOKENS // 2).float()
    inputs = {"ref": torch.full((TOKENS,), -2.0), "chosen": chosen, "rejected": 1 - chosen}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(TOKENS))),
        loss_fn_inputs={"target_tokens": list(range(1, TOKENS + 1)), **inputs},
    )
    ranks: Any = dict.fromkeys(("logprobs", *inputs), 1)
    handle = service.create_custom_loss(dpo, input_ranks=ranks).result()
    assert handle.loss_id is not None
    on_client = dataclasses.replace(handle, loss_id=None)
    return (
        lambda: trainer.forward_backward_custom([datum], handle).result(),
        lambda: trainer.forward_backward_custom([datum], on_client).result(),
    )


def custom_losses(server: LocalServer, rounds: int) -> dict[str, list[float]]:
    """Return the times of a custom loss on the server, and in two phases."""
    on_server, on_client = custom_loss_round_trips(server)
    return {
        "official SDK, custom loss on the server": milliseconds(on_server, rounds),
        "official SDK, custom loss in two phases": milliseconds(on_client, rounds),
    }


def body(model_id: str, seq_id: int) -> bytes:
    """Return a request with one datum of ``TOKENS`` tokens."""
    tokens = np.arange(TOKENS, dtype="<i4")
    targets = wire.Tensor(
        dense=(tokens + 1).astype("<i8").tobytes(), dtype=wire.DTYPE_INT64, shape=[TOKENS]
    )
    chunk = wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=tokens.tobytes()))
    datum = wire.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": targets})
    request = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy"
    )
    return request.SerializeToString()


def http_round_trip(server: LocalServer) -> Callable[[], Any]:
    client = httpx.Client(
        base_url=f"{server.url}/api/v1", headers={"X-API-Key": "tml-bench"}, trust_env=False
    )

    def post(path: str, **content: Any) -> httpx.Response:
        response = client.post(path, timeout=60, **content)
        response.raise_for_status()
        return response

    session = post("create_session", json={"tags": [], "sdk_version": "bench"}).json()["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": server.base_model}
    created = post("create_model", json={**create, "lora_config": {"rank": RANK}}).json()
    result = {"request_id": created["request_id"]}
    model_id = post("retrieve_future", json=result).json()["model_id"]
    seq_ids = iter(range(1, 1_000_000))

    def run() -> None:
        submitted = post(
            "forward_backward",
            content=body(model_id, next(seq_ids)),
            headers={"Content-Type": "application/x-protobuf"},
        )
        post("retrieve_future", json={"request_id": submitted.json()["request_id"]})

    return run


def bare_engine(folder: Path) -> Callable[[], Any]:
    cache = folder / "data" / "compiled"
    settings = WorkerSettings(data_dir=folder, compile_cache=cache, compile_ahead=False)
    backend = JaxBackend.from_options(settings.backend_options)
    backend.create_adapter("bench", AdapterConfig(rank=RANK, alpha=32, seed=0))

    def run() -> None:
        data = training.decode_request(body("bench", 1), backend.info)
        (packed,) = pack([PackingRequest("bench", RANK, data)], backend.static_shapes)
        backend.forward_backward(packed.batch)

    return run


def measure(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        figures = {"fsync of 4 KiB": milliseconds(fsync(folder), rounds)}
        with LocalServer(folder) as server:
            wait_until_compiled(server)
            figures["HTTP, two calls"] = milliseconds(http_round_trip(server), rounds)
            figures["official SDK"] = milliseconds(sdk_round_trip(server), rounds)
            figures |= custom_losses(server, rounds)
        with slow_disk(), LocalServer(folder) as server:
            wait_until_compiled(server)
            slow = "every commit 4 ms slower"
            figures[f"HTTP, {slow}"] = milliseconds(http_round_trip(server), rounds)
            figures[f"official SDK, {slow}"] = milliseconds(sdk_round_trip(server), rounds)
            for name, times in custom_losses(server, rounds).items():
                figures[f"{name}, {slow}"] = times
        figures["bare engine"] = milliseconds(bare_engine(folder), rounds)
    return figures


@contextmanager
def slow_disk() -> Iterator[None]:
    """Give servers that are started inside a disk whose fsync takes 4 ms longer."""
    os.environ |= {"PYTHONPATH": str(Path(__file__).parent / "slow_disk"), "SLOW_FSYNC_S": "0.004"}
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"], os.environ["SLOW_FSYNC_S"]


def record(figures: dict[str, list[float]], rounds: int) -> str:
    """Return the table for results.md."""
    engine = statistics.median(figures["bare engine"])
    lines = [
        f"## Round trip of one datum, {commit_name()}",
        "",
        f"`benchmarks/latency.py --rounds {rounds}`: {TOKENS} tokens, rank {RANK}, embedded model, "
        f"durable SQLite, idle server, {os.cpu_count()} cores ({platform.machine()}).",
        "",
        "| | p50 ms | p95 ms | over bare engine |",
        "|---|---|---|---|",
    ]
    for name, times in figures.items():
        p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        lines.append(f"| {name} | {p50:.2f} | {p95:.2f} | {p50 / engine:.2f} |")
    return "\n".join([*lines, "", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds)
    table = record(figures, arguments.rounds)
    append(table, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
