"""Trace the time of a batch in the engine, phase by phase: 8 datums of 512 tokens.

The phases are those of the worker, which decodes the next requests and encodes the last results
while the device is busy. The device waits for the rest of the host's work.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bare_engine import Bare, random_tokens
from bench_model import Shape, write_model
from results import machine, publish, table
from side_by_side import limit_threads

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.backend.jax.training import trainer
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack

CONFIG = AdapterConfig(rank=8, alpha=32, seed=7, train_unembed=False)
DATUMS, TOKENS = 8, 512
BESIDE = ("decode the request", "encode the results")
CALL = "the backend's call"
INSIDE = {
    "arrange the micro-batch": (trainer.DeviceMicroBatch, "of"),
    "dispatch": (trainer.Trainer, "_run"),
    "wait for the device": (trainer, "_fetched"),
    "check for non-finite values": (trainer, "_finite"),
    "add to the accumulator": (trainer.Trainer, "_commit"),
}
ON_DEVICE = ("dispatch", "wait for the device", "add to the accumulator")


class Clock:
    """The seconds of the running batch, by phase."""

    def __init__(self) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - started_s

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run


def body() -> bytes:
    """Return a request as the SDK sends it."""

    def tensor(values: np.ndarray[Any, Any], kind: wire.DType) -> wire.Tensor:
        return wire.Tensor(dense=values.tobytes(), dtype=kind, shape=values.shape)

    data = [
        wire.Datum(
            model_input=[
                wire.Chunk(
                    encoded_text=wire.EncodedTextChunk(tokens=s[:-1].astype("<i4").tobytes())
                )
            ],
            loss_fn_inputs={
                "target_tokens": tensor(s[1:].astype("<i8"), wire.DTYPE_INT64),
                "weights": tensor(np.ones(TOKENS, "<f4"), wire.DTYPE_FLOAT32),
            },
        )
        for s in random_tokens([TOKENS] * DATUMS, Shape().vocab, seed=1)
    ]
    return wire.ForwardBackwardRequest(data=data, loss_fn="cross_entropy").SerializeToString()


def batch(bare: Bare, payload: bytes, clock: Clock) -> None:
    """Run one request, from its body to the body of its result."""
    with clock.phase("decode the request"):
        data = training.decode_request(payload, bare.backend.info)
    with clock.phase("pack"):
        (packed,) = pack([PackingRequest("t", CONFIG.rank, data)], bare.backend.static_shapes)
    with clock.phase(CALL):
        result = bare.backend.forward_backward(packed.batch)
    assert all(result.finite)
    with clock.phase("encode the results"):
        training.encode_output(*unpack(packed, result.outputs, 0, data))


def measure(folder: Path, batches: int) -> list[dict[str, Any]]:
    write_model(folder / "bench")
    bare = Bare.beside(folder, folder / "bench", folder / "compiled")
    bare.create("t", CONFIG)
    payload, clocks = body(), []
    for _ in range(batches + 1):
        clock = Clock()
        with inside(clock):
            batch(bare, payload, clock)
        clocks.append(clock.phases)
    found = {name: statistics.median(c[name] for c in clocks[1:]) for name in clocks[-1]}
    found["the rest of the backend's call"] = found.pop(CALL) - sum(found[n] for n in INSIDE)
    device_s = sum(found[name] for name in ON_DEVICE)
    host = {name: seconds for name, seconds in found.items() if name not in ON_DEVICE}
    found["host work that delays the device"] = sum(s for n, s in host.items() if n not in BESIDE)
    found["all of the host's work"] = sum(host.values())
    return [
        {"phase": name, "ms": 1000 * s, "of device time": f"{s / device_s:.2%}"}
        for name, s in found.items()
    ]


@contextmanager
def inside(clock: Clock) -> Iterator[None]:
    """Time the trainer's own phases."""
    with ExitStack() as stack:
        for name, (owner, function) in INSIDE.items():
            timed = clock.timed(name, getattr(owner, function))
            stack.enter_context(mock.patch.object(owner, function, timed))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=Path.cwd()) as name:
        rows = measure(Path(name), arguments.units)
    about = (
        f"`benchmarks/trace.py --units {arguments.units}`: bench model, {DATUMS} datums of "
        f"{TOKENS} tokens, rank {CONFIG.rank}; {machine('jax', threads=threads)}. Medians."
    )
    section = table("Time of a batch", about, list(rows[0]), [list(row.values()) for row in rows])
    publish({"trace": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
