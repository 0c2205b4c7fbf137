"""The checks of ``gpu_accept.py``: errors, and results whose bits have to be equal."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from bare_engine import Tokens, random_tokens, training_data
from bench_model import Shape, write_large_model, write_model
from gpu_scales import CARD, Row, Scale

from tuneserve_engine.backend.base import SampledSequence, SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig
from tuneserve_engine.core.backend_options import DType, Remat
from tuneserve_engine.core.errors import ServerError
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.worker.execution.device_timer import DeviceTimer
from tuneserve_engine.worker.execution.packing import PackingRequest, pack, unpack
from tuneserve_engine.worker.execution.rescoring import Rescoring

RANK = 64  # the bucket: kernels of adapters take two steps of 32 ranks
ADAPTERS = {
    "lora": AdapterConfig(rank=40, alpha=32, seed=3),
    "rslora": AdapterConfig(rank=33, alpha=8, seed=4, kind="rslora", train_unembed=False),
}
_OSFT = AdapterConfig(24, 32, seed=5, kind="osft", train_unembed=False)
SAMPLED = 40  # tokens whose logprobs are checked
_SAMPLES = {"lora": 18, "rslora": 6}  # decoded together: the rows of one adapter fill two tiles
_COMMAND = Path(__file__).with_name("gpu_accept.py")


def backend(
    model: Path,
    shape: Shape,
    chunk: int,
    *,
    dtype: DType = "bfloat16",
    remat: Remat = "dots",
) -> JaxBackend:
    return JaxBackend(
        str(model),
        name="bench",
        tokenizer_id="bench",
        dtype=dtype,
        static_shapes=StaticShapes(shape.context, chunk=chunk, rank_buckets=(RANK,)),
        remat=remat,
        sample_rows=sum(_SAMPLES.values()),
    )


def logprobs(
    engine: JaxBackend, adapter: str, sequences: Sequence[Tokens], *, forward_only: bool = False
) -> list[Any]:
    """Return the logprobs of one request, datum by datum."""
    data = training_data(sequences, forward_only=forward_only)
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


def load(engine: JaxBackend, name: str, config: AdapterConfig) -> None:
    """Load an adapter anew, a LoRA with random weights, B included."""
    with suppress(ServerError):  # there is none yet
        engine.delete_adapter(name)
    engine.create_adapter(name, config)
    if config.kind == "osft":
        return
    state = engine.adapter_state(name, optimizer=False)
    engine.delete_adapter(name)
    random = np.random.default_rng(config.seed)
    weights = {
        part: np.float32(0.02) * random.standard_normal(x.shape, np.float32)
        for part, x in state.weights.items()
    }
    engine.load_adapter(name, replace(state, weights=weights))


def answer(scale: Scale, folder: Path) -> Iterator[Row]:
    """Keep this device's answers in the folder, for ``errors``."""
    model = folder / "checked"
    write_large_model(model, scale.checked)  # in bfloat16: float32 reads the same weights
    sequences = random_tokens(scale.checked_lengths, scale.checked.vocab, seed=1)
    for dtype in get_args(DType):
        began_s = time.perf_counter()
        found = answers(backend(model, scale.checked, scale.chunk, dtype=dtype), sequences)
        np.savez(folder / f"found.{dtype}.npz", **found)
        yield {"answers": len(found), "dtype": dtype, "s": round(time.perf_counter() - began_s, 1)}


def errors(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare the answers with those of float32 on the CPU, by a process of its own.

    ``of the CPU's`` is the error relative to that of the CPU in the same dtype, which computes
    without the kernels, and the logprobs of sampled tokens without decoding. For gradients, both
    figures are the worst of any array.
    """
    if not (folder / "checked").exists():
        write_large_model(folder / "checked", scale.checked)
    for dtype in get_args(DType):
        _on_a_cpu(scale, folder, dtype)
    for dtype in get_args(DType):
        found = _arrays(folder / f"found.{dtype}.npz")
        truth = _arrays(folder / f"expected.float32.{dtype}.npz")
        twin = _arrays(folder / f"expected.{dtype}.{dtype}.npz")
        found_errors: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        for name in truth:
            kind = " ".join(name.split()[:2])
            error, least = (_error(x[name], truth[name]) for x in (found, twin))
            found_errors.setdefault(kind, []).append(error)
            ratios.setdefault(kind, []).extend([error / least] if least else [])
        for kind, each in found_errors.items():
            row: Row = {"errors": kind, "dtype": dtype, "error": float(f"{max(each):.2e}")}
            yield row | ({"of the CPU's": round(max(ratios[kind]), 2)} if ratios[kind] else {})


def _arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


def answers(
    engine: JaxBackend, sequences: Sequence[Tokens], drawn: Any = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the logprobs, the gradients, and the sampled tokens and their logprobs.

    With ``drawn``, the logprobs of the tokens that another device has sampled.
    """
    found: dict[str, Any] = {}
    for name, config in ADAPTERS.items():
        load(engine, name, config)
        found[f"logprobs {name}"] = np.concatenate(logprobs(engine, name, sequences)).ravel()
        state = engine.adapter_state(name, optimizer=False, accumulator=True)
        for part, gradient in state.accumulator.items():
            found[f"gradients {name} {part}"] = gradient
        if drawn is not None:
            every = logprobs(engine, name, [drawn[name]], forward_only=True)[0].ravel()
            found[f"sampled {name}"] = every[-SAMPLED:]
    if drawn is None:
        found |= sampled(engine, max(sequences, key=len))
    return found


def sampled(
    engine: JaxBackend, prompt: Tokens, names: Sequence[str] = tuple(ADAPTERS)
) -> dict[str, np.ndarray[Any, Any]]:
    """Return one of the samples of each adapter, which are decoded together, and its logprobs."""
    for name in names:
        engine.load_snapshot(name, engine.exported_adapter(name))
    requests = [
        SamplingRequest(prompt, name, seed=1, num_samples=count, max_tokens=SAMPLED)
        for name, count in _SAMPLES.items()
        if name in names
    ]
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, result in zip(names, engine.sample(requests), strict=True):
        sequence = result.sequences[-1]
        found[f"drawn {name}"] = np.concatenate([prompt, sequence.tokens])
        found[f"sampled {name}"] = sequence.logprobs
    return found


def _on_a_cpu(scale: Scale, folder: Path, dtype: DType) -> None:
    """Run ``reference`` in a process on the CPU."""
    options = ["--reference", dtype, "--folder", str(folder)]
    options += [] if scale.checked == CARD.checked else ["--dry-run"]
    cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, str(_COMMAND), *options], env=cpu, check=True)


def reference(scale: Scale, folder: Path, dtype: DType) -> None:
    """Keep this process's answers in ``dtype``, for what the device has sampled in each dtype."""
    sequences = random_tokens(scale.checked_lengths, scale.checked.vocab, seed=1)
    engine = backend(folder / "checked", scale.checked, scale.chunk, dtype=dtype)
    for device_dtype in get_args(DType):
        found = _arrays(folder / f"found.{device_dtype}.npz")
        drawn = {name: found[f"drawn {name}"] for name in ADAPTERS}
        expected = answers(engine, sequences, drawn)
        np.savez(folder / f"expected.{dtype}.{device_dtype}.npz", **expected)


def _error(found: Any, expected: Any) -> float:
    """Return ``|found - expected| / |expected|``; infinite if something is not a number."""
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(error) else float("inf")


def bits(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare each adapter's logprobs of every way, its gradient, weights and moments behind other
    requests, and the logprobs of the first ``remat`` with those of the others. Compare samples in
    company with those alone.
    """
    model = folder / "bits"
    if not model.exists():
        write_model(model, scale.checked)
    sequences = random_tokens(scale.checked_lengths, scale.checked.vocab, seed=1)
    for dtype, remats in scale.remats.items():
        first: dict[str, list[Any]] = {}
        for remat in remats:
            engine = backend(model, scale.checked, scale.chunk, dtype=dtype, remat=remat)
            for name, config in ADAPTERS.items():
                load(engine, name, config)
                want = logprobs(engine, name, sequences)
                ways = _ways(engine, name, sequences, want)
                ways[f"remat={remats[0]}"] = (first.setdefault(name, want), want)
                step = stepped(engine, [name], sequences)
                others = [other for other in ADAPTERS if other != name]
                ways |= {
                    "step again": (stepped(engine, [name], sequences), step),
                    "step behind another": (stepped(engine, [*others, name], sequences), step),
                }
                yield _bits(f"{dtype} {remat} {name}", [*want, *step], ways)
        prompt = max(sequences, key=len)
        samples = sampled(engine, prompt)
        ways = {
            f"{name} alone": (sampled(engine, prompt, [name])[f"sampled {name}"], found)
            for name in ADAPTERS
            for found in [samples[f"sampled {name}"]]
        }
        yield _bits(f"{dtype} samples", list(samples.values()), ways)
    for dtype, remats in scale.remats.items():  # last: creating the adapter takes long
        engine = backend(model, scale.checked, scale.chunk, dtype=dtype, remat=remats[-1])
        load(engine, "osft", _OSFT)
        want = logprobs(engine, "osft", sequences)
        yield _bits(f"{dtype} osft", want, _ways(engine, "osft", sequences, want))


def _ways(
    engine: JaxBackend, name: str, sequences: Sequence[Tokens], want: list[Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the adapter's logprobs by every way, each beside those of ``forward_backward``."""
    return {
        "again": (logprobs(engine, name, sequences), want),
        "forward": (logprobs(engine, name, sequences, forward_only=True), want),
        "alone": ([logprobs(engine, name, [s])[0] for s in sequences], want),
        "rescored": ([rescored(engine, name, s) for s in sequences], want),
    }


def _bits(what: str, arrays: list[Any], ways: dict[str, tuple[Any, Any]]) -> Row:
    gaps = {way: widest_gap(found, want) for way, (found, want) in ways.items()}
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays))
    differ = {way: gap for way, gap in gaps.items() if gap}
    return {"bits": what, "ways": list(ways), "differ": differ, "digest": digest.hexdigest()[:16]}


def restart(scale: Scale, folder: Path) -> Iterator[Row]:
    """Run ``bits`` in two processes, and compare the digests of all results.

    ``differ`` also names the results that differ within one of the processes.
    """
    options = ["--only", "bits", "--folder", str(folder)]
    options += [] if scale.checked == CARD.checked else ["--dry-run"]
    command = [sys.executable, str(_COMMAND), *options]
    # The process that calls this one may hold most of the device's memory.
    shared = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found_bits = []
    for _ in range(2):
        found = subprocess.run(command, env=shared, check=True, stdout=subprocess.PIPE)
        rows = [json.loads(line) for line in found.stdout.splitlines()]
        found_bits.append({row["bits"]: row for row in rows if "bits" in row})
    one, other = found_bits
    differ = [what for what in one if one[what] != other[what] or one[what]["differ"]]
    yield {"bits": "after a restart", "compared": list(one), "differ": differ}


def stepped(engine: JaxBackend, names: Sequence[str], sequences: Sequence[Tokens]) -> list[Any]:
    """Return the last one's gradient, and its weights and moments after an optimizer step.

    All adapters are loaded anew. Their requests share micro-batches, the last one's behind the
    others'.
    """
    *_, last = names
    data = training_data(sequences)
    for name in names:
        load(engine, name, ADAPTERS[name])
    packed = pack([PackingRequest(name, RANK, data) for name in names], engine.static_shapes)
    for each in packed:
        engine.forward_backward(each.batch)
    gradient = engine.adapter_state(last, optimizer=False, accumulator=True).accumulator
    (metrics,) = engine.optim_steps([(last, AdamwParams(weight_decay=0.1))])
    assert not isinstance(metrics, Exception), metrics
    state = engine.adapter_state(last, optimizer=True).to_tensors()
    return [tensor for part in (gradient, state) for _, tensor in sorted(part.items())]


def widest_gap(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest difference; infinite if only bits differ, or one is not a number."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, want, strict=True)]
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return 0.0
    gap = float(max(np.abs(a - b).max() for a, b in pairs))
    return gap if gap > 0 else float("inf")
