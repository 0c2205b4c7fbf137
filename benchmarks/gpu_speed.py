"""The measurements of ``gpu_accept.py``: gradients and decoding, beside predictions."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from bare_engine import Bare, Tokens, random_tokens, training_data
from bench_model import Shape, write_large_model, write_model
from gpu_numbers import RANK, backend, logprobs
from gpu_scales import CARD, Row, Scale
from kernel_times import kernel_times
from side_by_side import ratio, take_turns

from scripts.gpu_compile.devices import GPUS, Gpu
from scripts.gpu_compile.forecast import Load, plan_request, planned_bytes, token_flops, work
from scripts.gpu_compile.hlo import Module
from scripts.gpu_compile.roofline import cost
from tuneserve_engine.backend.base import SamplingRequest
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.memory.device import default_device
from tuneserve_engine.backend.jax.memory.planner import Plan, plan
from tuneserve_engine.backend.jax.model.weights import read_config
from tuneserve_engine.backend.jax.programs import registry
from tuneserve_engine.backend.jax.sampling.adapter_slot_table import adapter_slot_count
from tuneserve_engine.backend.jax.sampling.programs import STEPS_PER_DISPATCH
from tuneserve_engine.core.adapter import AdapterConfig

ROUNDS = 7


def environment(scale: Scale, folder: Path) -> Iterator[Row]:
    """Name the device and its software, and measure a product in bfloat16 and a copy."""
    device = jax.local_devices()[0]
    yield {
        "device": device.device_kind,
        "platform": " ".join(device.client.platform_version.split()),
        "jax": jax.__version__,
        "data sheet": _data_sheet().name,
        **registry.compiler_options(),
    }
    size = 8192 if scale.checked == CARD.checked else 256
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(jnp.matmul, compiler_options=registry.compiler_options())
    product_s = _seconds(lambda: product(left, right))
    large = jnp.zeros((4 * size, 4 * size), jnp.float32) + left[0, 0]
    copy = jax.jit(lambda x: -x)
    copy_s = _seconds(lambda: copy(large))
    yield {
        "rates of": f"a product of {size} x {size}, and reading and writing {large.nbytes} bytes",
        "TFLOP/s": round(2 * size**3 / product_s / 1e12),
        "GB/s": round(2 * large.nbytes / copy_s / 1e9),
    }


def _seconds(run: Callable[[], jax.Array], times: int = 20) -> float:
    """Return the seconds of one call among many."""
    last = jax.block_until_ready(run())
    began_s = time.perf_counter()
    for _ in range(times):
        last = run()  # frees the result before
    jax.block_until_ready(last)
    return (time.perf_counter() - began_s) / times


class Planned:
    """An engine as a worker on this device plans it, and the predictions of its programs."""

    def __init__(self, model: Path, load: Load) -> None:
        self.config = read_config(model)
        self.plan: Plan = plan(self.config, default_device(), plan_request(load))
        began_s = time.perf_counter()
        self.engine = JaxBackend(
            str(model),
            name="bench",
            tokenizer_id="bench",
            dtype="bfloat16",
            static_shapes=self.plan.static_shapes,
            remat=self.plan.remat,
            sample_rows=load.slots,
            kv_pages=self.plan.kv_pages,
        )
        self.loaded_s = time.perf_counter() - began_s
        self.gpu = _data_sheet()

    def beside(self, seconds: float, program: str, load: Load, *, steps: int = 1) -> Row:
        """Return the predicted time of a step of this program, and its temporary memory as compiled
        and as planned.

        On a CPU, nothing: predictions are of GPUs.
        """
        if self.plan.device.kind == "cpu":
            return {}
        shapes = self.engine.programs.shapes()
        (found,) = (x for x in shapes if x.is_compiled and x.name.startswith(program))
        executable = found.compiled()
        module = Module.parse(executable.as_text() or "")
        expected_s = cost(module, self.gpu, work(self.config, self.plan, load)).total_s / steps
        return {
            "predicted ms": round(1e3 * expected_s, 2),
            "predicted / measured": round(expected_s / seconds, 2),
            "temporary MiB": _mib(executable.memory_analysis().temp_size_in_bytes),
            "planned MiB": _mib(planned_bytes(self.config, self.plan, program)),
        }

    def weight_limit(self) -> float:
        """Return the steps per second that only read the base model's weights."""
        read = self.plan.memory["memory_base_model_bytes"]
        if not self.config.tied_embeddings:
            read -= 2 * self.config.vocab_size * self.config.hidden
        return self.gpu.bandwidth / read


_kept: dict[tuple[Path, Load], Planned] = {}
"""The last engine, and what it was made for."""


def _planned(folder: Path, shape: Shape, load: Load) -> Planned:
    """Return the engine for this model and load: the last one, if it is the same."""
    if (folder, load) not in _kept:
        _kept.clear()  # before the next one needs the memory
        gc.collect()
        _kept[folder, load] = Planned(_written(folder, shape), load)
    return _kept[folder, load]


def _written(folder: Path, shape: Shape) -> Path:
    """Return the folder of a model, written unless it is there."""
    if not folder.exists():
        write_large_model(folder, shape)
    return folder


def _data_sheet() -> Gpu:
    """Return the rates of this GPU; those of an H200 for a device that is not known."""
    kind = jax.local_devices()[0].device_kind
    return next((gpu for gpu in GPUS.values() if gpu.name in kind), GPUS["h200"])


def train(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time the gradients of a micro-batch of one tenant, and of as many as it has datums."""
    load = scale.load
    for name, shape in scale.models.items():
        planned = _planned(folder / name, shape, load)
        engine = Bare(planned.engine, 0.0)
        yield {"model": name, "loaded in s": round(planned.loaded_s, 1)}
        sequences = random_tokens(
            [load.datum_tokens] * (load.tokens // load.datum_tokens),
            planned.config.vocab_size,
            seed=2,
        )
        names = [f"trained {index}" for index in range(len(sequences))]
        for index, each in enumerate(names):
            engine.create(each, AdapterConfig(rank=load.rank, alpha=32, seed=index))
        alone = [(names[0], training_data(sequences))]
        together = [(each, training_data([s])) for each, s in zip(names, sequences, strict=True)]
        flops = token_flops(planned.config, load.datum_tokens, is_trained=True)
        for tenants, asked in ((1, alone), (len(together), together)):
            began_s = time.perf_counter()
            engine.gradients(asked)
            compiled_s = time.perf_counter() - began_s
            seconds = _median_s(partial(engine.gradients, asked))
            rate = load.tokens / seconds
            yield {
                "train": name,
                "tenants": tenants,
                "first s": round(compiled_s, 1),
                "ms": round(1e3 * seconds, 1),
                # A chunk uses the adapters of all its datums, as of several tenants.
                **(planned.beside(seconds, "train_micro_batch", load) if tenants > 1 else {}),
                "tokens/s": round(rate),
                "MFU": round(rate * flops / planned.gpu.flops, 3),
                "process peak MiB": _peak_mib(),
            }
        yield from _kernels(partial(engine.gradients, together), scale.top)
        del planned, engine  # before the next model needs the memory


def decode(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time the steps of sequences that are decoded together, with one adapter and with many.

    The kernels listed are those of two dispatches, and of the prefill of each prompt's last page.
    """
    for name, shape in scale.models.items():
        for slots in scale.decode_slots:
            load = replace(scale.load, slots=slots)
            planned = _planned(folder / name, shape, load)
            engine = planned.engine
            count = adapter_slot_count(slots, is_shared=True)
            for index in range(count):
                config = AdapterConfig(load.rank, 32, seed=index)
                engine.create_adapter(str(index), config)
                engine.load_snapshot(str(index), engine.exported_adapter(str(index)))
            prompts = random_tokens([load.context - 1] * slots, planned.config.vocab_size, seed=5)
            for adapters in (1, count):
                seconds = _step_s(engine, prompts, adapters, scale.new_tokens)
                used = replace(load, adapters=adapters)
                yield {
                    "decode": name,
                    "slots": slots,
                    "adapters": adapters,
                    "ms per step": round(1e3 * seconds, 2),
                    **planned.beside(seconds, "decode", used, steps=STEPS_PER_DISPATCH),
                    "tokens/s": round(slots / seconds),
                    "share of the weight limit": round(1 / seconds / planned.weight_limit(), 3),
                    "process peak MiB": _peak_mib(),
                }
            many = partial(_sample, engine, prompts, count, STEPS_PER_DISPATCH + 1)
            yield from _kernels(many, scale.top)
            del planned, engine, many  # before the next engine needs the memory
    _kept.clear()


def _step_s(engine: JaxBackend, prompts: Sequence[Tokens], adapters: int, tokens: int) -> float:
    """Return the seconds of a decoding step: those of many tokens less those of few."""
    few = STEPS_PER_DISPATCH
    _sample(engine, prompts, adapters, few)  # compiles, and prefills the prompts
    seconds = [
        _median_s(lambda count=count: _sample(engine, prompts, adapters, count), rounds=3)  # type: ignore[misc]
        for count in (few, few + tokens)
    ]
    return (seconds[1] - seconds[0]) / tokens


def _sample(engine: JaxBackend, prompts: Sequence[Tokens], adapters: int, tokens: int) -> None:
    engine.sample(
        [
            SamplingRequest(x, str(index % adapters), seed=1, num_samples=1, max_tokens=tokens)
            for index, x in enumerate(prompts)
        ]
    )


def _peak_mib() -> int:
    """Return the most memory that the process has held on the device until now."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return _mib(stats.get("peak_bytes_in_use", 0))


def _mib(count: int) -> int:
    return round(count / 2**20)


def _kernels(run: Callable[[], object], top: int) -> Iterator[Row]:
    if not top:
        return
    milliseconds, launches = kernel_times(run)
    yield {"kernels": launches.total(), "ms": round(milliseconds.total(), 2)}
    for name, ms in milliseconds.most_common(top):
        yield {"kernel": name[:70], "launches": launches[name], "ms": round(ms, 3)}


def _median_s(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def small(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time gradients, by turns with programs that may keep excess precision."""
    model = folder / "small"
    write_model(model, scale.small)
    engines = {"ours": backend(model, scale.small, scale.chunk)}
    allowed = {**registry.compiler_options(), "xla_allow_excess_precision": True}
    with mock.patch.object(registry, "compiler_options", lambda: allowed):
        engines["excess precision"] = backend(model, scale.small, scale.chunk)
    for engine in engines.values():
        engine.create_adapter("a", AdapterConfig(rank=RANK, alpha=16, seed=3))
    for batch, lengths in scale.batches.items():
        sequences = random_tokens(lengths, scale.small.vocab, seed=2)
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
            "small": batch,
            "ms": round(ms, 1),
            "of excess precision": round(ratio(ours, excess), 3),
        }
