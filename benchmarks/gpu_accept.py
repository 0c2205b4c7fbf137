"""Check the engine on the GPU of this machine, and measure it; prints one JSON line per row.

    python benchmarks/gpu_accept.py              # on a machine with a GPU
    python benchmarks/gpu_accept.py --dry-run    # the same code on a tiny model, on any device

- ``bits``: the logprobs of one policy in bfloat16 from every program, under every ``remat``.
  ``differ`` names the ways whose bits are not those of ``forward_backward``.
- ``step``: milliseconds of a ``forward_backward``, and the pace with excess precision allowed.
- ``decode``: tokens per second of sequences that are decoded together.

The weights are random: nothing is downloaded.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax
import numpy as np
from bench_model import Shape, write_model
from contenders import Tokens, random_tokens
from side_by_side import ratio, take_turns

from tuneserve_engine.backend.base import SampledSequence, SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.programs import registry
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.backend_options import Remat
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.codecs.training import DecodedDatum, TrainingData
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack
from tuneserve_engine.worker.execution.rescoring import Rescoring

RANK = 8
CHUNK = 2048  # as a worker on a GPU has it
ADAPTERS = {
    "lora": AdapterConfig(rank=5, alpha=32, seed=3),
    "rslora": AdapterConfig(rank=4, alpha=8, seed=4, kind="rslora", train_unembed=False),
}
PROMPT_TOKENS, NEW_TOKENS = 512, 128
ROUNDS = 7


@dataclass(frozen=True)
class Scale:
    """The models and the batches of a run."""

    bits: Shape
    bits_lengths: tuple[int, ...]
    steps: Shape
    batches: dict[str, list[int]]
    decode_slots: tuple[int, ...]


_WIDTH = Shape(4, 1024, 3072, 16, 8, 128, 32_768, 4096)
_TINY = Shape(2, 64, 160, 4, 2, 16, 512, 1024)
CARD = Scale(
    bits=_WIDTH,
    bits_lengths=(100, 7, 64, 1, 300, 63, 65, 40, 129),
    steps=replace(_WIDTH, layers=28, vocab=151_936),
    batches={"8 x 128": [128] * 8, "64 x 20": [20] * 64, "4 x 1024": [1024] * 4},
    decode_slots=(8, 64),
)
DRY = Scale(_TINY, (23, 5, 70, 1), _TINY, {"2 x 20": [20] * 2}, (2,))


def backend(model: Path, shape: Shape, *, remat: Remat = "dots", slots: int = 8) -> JaxBackend:
    return JaxBackend(
        str(model),
        name="bench",
        tokenizer_id="bench",
        dtype="bfloat16",
        static_shapes=StaticShapes(shape.context, chunk=CHUNK, rank_buckets=(RANK,)),
        remat=remat,
        sample_rows=slots,
    )


def logprobs(
    engine: JaxBackend, adapter: str, sequences: Sequence[Tokens], *, forward_only: bool = False
) -> list[Any]:
    """Return the logprobs of one request, datum by datum."""
    datums = [
        DecodedDatum(s[:-1], s[1:, None], np.ones((len(s) - 1, 1), np.float32), flat=True)
        for s in sequences
    ]
    data = TrainingData("cross_entropy", {}, forward_only, datums)
    found: list[Any] = []
    for packed in pack([PackingRequest(adapter, RANK, data)], engine.static_shapes):
        result = engine.forward_backward(packed.batch)
        found += unpack(packed, result.outputs, 0, data)[0]
    return found


def rescored(engine: JaxBackend, adapter: str, sequence: Tokens) -> Any:
    """Return the logprobs of all tokens but the first, as if the rest had been sampled."""
    timer = DeviceTimer(time.monotonic, lambda: 0.0)
    rescoring = Rescoring(engine, timer, lambda _: engine.exported_adapter(adapter))
    count = len(sequence) - 1
    request = SamplingRequest(sequence[:1], adapter, seed=0, num_samples=1, max_tokens=count)
    drawn = SampledSequence(sequence[1:], np.zeros(count, np.float32), "length")
    result = rescoring.rescore({"one": request}, {"one": SampleResult((drawn,))})["one"]
    assert isinstance(result, SampleResult)
    return result.sequences[0].logprobs


def bits(model: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    """Compare the logprobs of every way, and those of the first ``remat`` with the others."""
    sequences = random_tokens(scale.bits_lengths, scale.bits.vocab, seed=1)
    first: dict[str, list[Any]] = {}
    for remat in sorted(get_args(Remat)):
        engine = backend(model, scale.bits, remat=remat)
        for name, config in ADAPTERS.items():
            load(engine, name, config)
            want = logprobs(engine, name, sequences)
            ways = {
                "again": logprobs(engine, name, sequences),
                "forward": logprobs(engine, name, sequences, forward_only=True),
                "alone": [logprobs(engine, name, [s])[0] for s in sequences],
                "rescored": [rescored(engine, name, s) for s in sequences],
                f"remat={sorted(get_args(Remat))[0]}": first.setdefault(name, want),
            }
            gaps = {way: widest_gap(found, want) for way, found in ways.items()}
            differ = {way: gap for way, gap in gaps.items() if gap}
            yield {"bits": remat, "adapter": name, "ways": list(ways), "differ": differ}


def load(engine: JaxBackend, name: str, config: AdapterConfig) -> None:
    """Load an adapter with random weights, B included."""
    engine.create_adapter(name, config)
    state = engine.adapter_state(name, optimizer=False)
    engine.delete_adapter(name)
    random = np.random.default_rng(config.seed)
    weights = {
        part: np.float32(0.02) * random.standard_normal(x.shape, np.float32)
        for part, x in state.weights.items()
    }
    engine.load_adapter(name, replace(state, weights=weights))


def widest_gap(found: Sequence[Any], want: Sequence[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, want, strict=True))


def steps(model: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    """Time gradients, by turns with programs that may keep excess precision."""
    engines = {"ours": backend(model, scale.steps)}
    allowed = {**registry.compiler_options(), "xla_allow_excess_precision": True}
    with mock.patch.object(registry, "compiler_options", lambda: allowed):
        engines["excess precision"] = backend(model, scale.steps)
    for engine in engines.values():
        engine.create_adapter("a", AdapterConfig(rank=RANK, alpha=16, seed=3))
    for batch, lengths in scale.batches.items():
        sequences = random_tokens(lengths, scale.steps.vocab, seed=2)
        tokens = sum(lengths)

        def turn(engine: JaxBackend, sequences: Any = sequences, tokens: int = tokens) -> int:
            logprobs(engine, "a", sequences)
            return tokens

        turns: dict[str, Callable[[], int]] = {
            name: lambda engine=engine, turn=turn: turn(engine)  # type: ignore[misc]
            for name, engine in engines.items()
        }
        ours, excess = take_turns(turns, rounds=ROUNDS).values()
        ms = 1e3 * tokens / statistics.median(ours.per_s)
        yield {
            "step": batch,
            "ms": round(ms, 1),
            "of excess precision": round(ratio(ours, excess), 3),
        }


def decode(model: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    """Time samples of one prompt, as many as are decoded together."""
    for slots in scale.decode_slots:
        engine = backend(model, scale.steps, slots=slots)
        engine.create_adapter("a", AdapterConfig(RANK, 16, seed=3, train_unembed=False))
        engine.load_snapshot("a", engine.exported_adapter("a"))
        (prompt,) = random_tokens([PROMPT_TOKENS], scale.steps.vocab, seed=5)
        request = SamplingRequest(prompt, "a", seed=1, num_samples=slots, max_tokens=NEW_TOKENS)
        engine.sample([request])
        began_s = time.perf_counter()
        (result,) = engine.sample([request])
        took_s = time.perf_counter() - began_s
        made = sum(len(sequence.tokens) for sequence in result.sequences)
        yield {"decode": slots, "tokens/s": round(made / took_s)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on any device")
    arguments = parser.parse_args()
    device = jax.local_devices()[0]
    if device.platform == "cpu" and not arguments.dry_run:
        raise SystemExit("JAX sees no GPU; use --dry-run to try the script on a CPU")
    scale = DRY if arguments.dry_run else CARD
    show({"device": device.device_kind, "jax": jax.__version__, **registry.compiler_options()})
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-") as name:
        folder = Path(name)
        write_model(folder / "bits", scale.bits)
        write_model(folder / "steps", scale.steps)
        for row in bits(folder / "bits", scale):
            show(row)
        for measure in (steps, decode):
            for row in measure(folder / "steps", scale):
                show(row)


def show(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
