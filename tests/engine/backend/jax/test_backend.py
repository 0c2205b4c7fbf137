"""Promises of the JAX backend other than isolation."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import (
    Backend,
    DeviceFailed,
    OutOfMemory,
    SamplingRequest,
    TrainBatch,
)
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.fingerprint import NumericChoices, numerics_id, program_id
from tuneserve_engine.backend.jax.programs.registry import Program
from tuneserve_engine.core.adapter import AdamwParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.core.errors import ServerError, UserError
from tuneserve_engine.core.shapes import StaticShapes
from tuneserve_engine.settings.worker import WorkerSettings

CONFIG = AdapterConfig(rank=8, alpha=32, seed=1)


def step(backend: Backend, adapter_id: str, **params: float) -> dict[str, float]:
    (metrics,) = backend.optim_steps([(adapter_id, AdamwParams(**params))])
    assert not isinstance(metrics, Exception), metrics
    return dict(metrics)


def test_the_info_has_what_clients_need(backend: Backend, base_model: Path):
    assert backend.info == BaseModelInfo(
        name="tiny",
        architecture="qwen3",
        vocab_size=61,
        context_length=24,
        max_rank=128,
        tokenizer_id=str(base_model),
        parameters=2 * (16 * (24 + 12 + 12) + 24 * 16 + 3 * 16 * 24) + 61 * 16,
        target_shapes=(
            ("q_proj", (2, 16, 24)),
            ("k_proj", (2, 16, 12)),
            ("v_proj", (2, 16, 12)),
            ("o_proj", (2, 24, 16)),
            ("gate_proj", (2, 16, 24)),
            ("up_proj", (2, 16, 24)),
            ("down_proj", (2, 24, 16)),
            ("unembed", (16, 61)),
        ),
    )


def test_a_missing_adapter_is_named(backend: Backend):
    (refused,) = backend.optim_steps([("nobody", AdamwParams())])
    assert isinstance(refused, ServerError)
    assert "'nobody' is not on this device" in str(refused)
    backend.create_adapter("gone", CONFIG)
    backend.delete_adapter("gone")
    with pytest.raises(ServerError, match="'gone' is not on this device"):
        backend.adapter_state("gone", optimizer=False)


def test_a_rank_beyond_the_largest_bucket_is_refused(backend: Backend):
    with pytest.raises(UserError, match=r"rank is 129.*1 to 128"):
        backend.create_adapter("wide", replace(CONFIG, rank=129))


def test_a_context_longer_than_the_models_is_refused(base_model: Path):
    with pytest.raises(ValueError, match=r"25 tokens.*built for 24"):
        JaxBackend(str(base_model), name="tiny", tokenizer_id="t", static_shapes=StaticShapes(25))


def test_a_step_reports_the_norm_of_the_gradient_before_clipping(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
):
    norms = []
    for name, limit in (("free", 0.0), ("clipped", 1e-3)):
        backend.create_adapter(name, CONFIG)
        backend.forward_backward(batch_of([name], [micro_batch_of((0, datum(1, 11)))]))
        norms.append(step(backend, name, grad_clip_norm=limit)["grad_norm"])
    assert norms[0] == norms[1] > 0.1


def test_a_step_without_a_gradient_leaves_a_fresh_adapter_unchanged(backend: JaxBackend):
    backend.create_adapter("idle", CONFIG)
    before = backend.adapter_state("idle", optimizer=True)
    assert step(backend, "idle") == {"grad_norm": 0.0}
    after = backend.adapter_state("idle", optimizer=True)
    assert after.step == 1
    for name, array in before.weights.items():
        np.testing.assert_array_equal(after.weights[name], array)


def test_the_sampler_scores_a_prompt_like_the_trainer(
    backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
):
    backend.create_adapter("scored", CONFIG)
    row = datum(1, 15)
    row = replace(row, targets=[*row.tokens[1:], 7])
    for _ in range(3):
        micro_batch = micro_batch_of((0, row))
        backend.forward_backward(batch_of(["scored"], [micro_batch]))
        step(backend, "scored", learning_rate=0.02)
    trained = backend.forward_backward(batch_of(["scored"], [micro_batch], forward_only=True))
    assert not backend.has_snapshot("snap")
    backend.load_snapshot("snap", backend.adapter_state("scored", optimizer=False))
    assert backend.has_snapshot("snap")
    prompt = np.array([*row.tokens, 7], np.int32)
    request = SamplingRequest(
        prompt, "snap", seed=1, num_samples=1, max_tokens=1, prompt_logprobs=True
    )
    (result,) = backend.sample([request])
    np.testing.assert_allclose(
        result.prompt_logprobs[1:], trained.outputs[0].logprobs[:15, 0], rtol=7e-7, atol=7e-7
    )


def test_a_bfloat16_model_trains_and_samples_near_the_float32_one(
    base_model: Path, backend: JaxBackend, micro_batch_of: Any, batch_of: Any, datum: Any
):
    """Query heads share key heads, which makes products that XLA may lack."""
    half = JaxBackend(
        str(base_model),
        name="half",
        tokenizer_id="t",
        dtype="bfloat16",
        static_shapes=backend.static_shapes,
    )
    micro_batch = micro_batch_of(*((0, datum(seed, 15)) for seed in range(4)))
    losses, prompts = [], []
    for each in (half, backend):
        each.create_adapter("wide", CONFIG)
        losses.append([])
        for _ in range(3):
            result = each.forward_backward(batch_of(["wide"], [micro_batch]))
            losses[-1].append(result.outputs[0].loss[micro_batch.segment_ids >= 0].sum())
            step(each, "wide", learning_rate=0.02)
    state = backend.adapter_state("wide", optimizer=False)
    for each in (half, backend):
        each.load_snapshot("wide", state)
        prompt = np.array(datum(0, 15).tokens, np.int32)
        request = SamplingRequest(
            prompt, "wide", seed=1, num_samples=4, max_tokens=8, prompt_logprobs=True
        )
        (sampled,) = each.sample([request])
        assert all(np.isfinite(one.logprobs).all() for one in sampled.sequences)
        prompts.append(sampled.prompt_logprobs[1:])
    np.testing.assert_allclose(*losses, rtol=0.0027)
    assert np.abs(prompts[0] - prompts[1]).mean() < 0.019


def test_a_restart_neither_traces_nor_compiles_again(
    backend: JaxBackend,
    base_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_of: Any,
    micro_batch_of: Any,
    datum: Any,
):
    batch = batch_of(["a"], [micro_batch_of((0, datum(1, 11)))])

    def used() -> tuple[Any, dict[str, float]]:
        started = JaxBackend(
            str(base_model),
            name="tiny",
            tokenizer_id="t",
            static_shapes=backend.static_shapes,
            compile_cache_dir=tmp_path,
        )
        started.create_adapter("a", CONFIG)
        result = started.forward_backward(batch)
        stepped = step(started, "a", learning_rate=0.02)
        return result.outputs[0].logprobs.tobytes(), stepped

    cold = used()
    monkeypatch.delattr(Program, "lower")
    assert used() == cold


@pytest.mark.parametrize(("asked", "given"), [(64, 64), (4096, 2048)])
def test_the_context_is_the_requested_one_up_to_the_base_models(
    tmp_path: Path, asked: int, given: int
):
    settings = WorkerSettings(data_dir=tmp_path, max_context_tokens=asked, compile_ahead=False)
    backend = JaxBackend.from_options(settings.backend_options)
    assert backend.info.context_length == backend.static_shapes.context_length == given
    assert backend.info.eos_token_ids == (1000, 998)


def exhausted(*args: Any, **kwargs: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.")


def break_program(
    backend: JaxBackend, name: Any, monkeypatch: pytest.MonkeyPatch, *, after: int
) -> None:
    """Make the trainer's program run out of memory after ``after`` calls, its arguments donated."""
    programs = vars(backend._trainer)
    if name == "train":
        programs, name = backend._trainer._micro_batches.train, False
    real, calls = programs[name], iter(range(after))

    def run(*args: Any) -> Any:
        result = real(*args)
        return result if next(calls, None) is not None else exhausted()

    monkeypatch.setitem(programs, name, run)


def state_of(backend: JaxBackend, adapter_id: str) -> AdapterState:
    return backend.adapter_state(adapter_id, optimizer=True, accumulator=True)


@pytest.fixture
def batch(micro_batch_of: Any, batch_of: Any, datum: Any) -> Callable[[str], TrainBatch]:
    """A batch of two requests of an adapter, in two micro-batches."""
    micro_batches = [
        micro_batch_of((0, datum(1, 11)), (1, datum(2, 11))),
        micro_batch_of((1, datum(3, 5))),
    ]
    return lambda adapter_id: batch_of([adapter_id] * 2, micro_batches)


@pytest.mark.acceptance("S6")
@pytest.mark.parametrize(
    ("program", "after"),
    [("_write_slot", 0), ("_write_slot", 1), ("train", 0), ("train", 1), ("_is_sum_finite", 0)],
)
def test_a_batch_that_runs_out_of_memory_changes_no_adapter_and_leaves_no_array(
    program: str,
    after: int,
    backend: JaxBackend,
    batch: Callable[[str], TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
):
    """Donated adapter slots, gradient slots and workspace are allocated anew."""
    for name in ("unlucky", "undisturbed"):
        backend.create_adapter(name, CONFIG)
        backend.forward_backward(batch(name))
    before, held = state_of(backend, "unlucky"), live_bytes()
    break_program(backend, program, monkeypatch, after=after)
    with pytest.raises(OutOfMemory, match=r"no room.*Out of memory allocating 64 bytes"):
        backend.forward_backward(batch("unlucky"))
    monkeypatch.undo()
    assert live_bytes() <= held
    assert_same(state_of(backend, "unlucky"), before)
    for name in ("unlucky", "undisturbed"):
        backend.forward_backward(batch(name))
    assert live_bytes() <= held
    for name in ("unlucky", "undisturbed"):
        step(backend, name)
    assert_same(state_of(backend, "unlucky"), state_of(backend, "undisturbed"))


@pytest.mark.parametrize(
    ("program", "after"), [("_accumulate_slot", 0), ("_accumulate_slot", 1), ("_is_sum_finite", 1)]
)
def test_a_batch_that_fails_after_consuming_an_accumulator_is_a_device_failure(
    program: str,
    after: int,
    backend: JaxBackend,
    batch: Callable[[str], TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
):
    backend.create_adapter("consumed", CONFIG)
    break_program(backend, program, monkeypatch, after=after)
    with pytest.raises(DeviceFailed, match="begun to change an adapter: RESOURCE_EXHAUSTED"):
        backend.forward_backward(batch("consumed"))
    backend.delete_adapter("consumed")


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def assert_same(a: AdapterState, b: AdapterState) -> None:
    assert (a.config, a.step) == (b.config, b.step)
    for part in ("weights", "first_moment", "second_moment", "accumulator"):
        mine, other = getattr(a, part), getattr(b, part)
        assert mine.keys() == other.keys()
        for name, array in mine.items():
            assert array.tobytes() == other[name].tobytes(), f"{part}[{name}]"


def test_a_step_that_runs_out_of_memory_changes_nothing_and_others_are_taken(
    backend: JaxBackend, batch: Callable[[str], TrainBatch], monkeypatch: pytest.MonkeyPatch
):
    for name in ("unlucky", "lucky"):
        backend.create_adapter(name, CONFIG)
        backend.forward_backward(batch(name))
    before, real, calls = state_of(backend, "unlucky"), backend._trainer._step, iter(range(1))
    monkeypatch.setattr(
        backend._trainer,
        "_step",
        lambda *args: real(*args) if next(calls, None) is None else exhausted(),
    )
    refused, taken = backend.optim_steps([("unlucky", AdamwParams()), ("lucky", AdamwParams())])
    monkeypatch.undo()
    assert isinstance(refused, OutOfMemory)
    assert_same(state_of(backend, "unlucky"), before)
    assert step(backend, "unlucky") == taken
    assert_same(state_of(backend, "unlucky"), state_of(backend, "lucky"))


def test_a_step_that_fails_after_consuming_its_adapter_is_a_device_failure(
    backend: JaxBackend, batch: Callable[[str], TrainBatch], monkeypatch: pytest.MonkeyPatch
):
    backend.create_adapter("consumed", CONFIG)
    backend.forward_backward(batch("consumed"))
    break_program(backend, "_step", monkeypatch, after=0)
    with pytest.raises(DeviceFailed, match="begun to change an adapter: RESOURCE_EXHAUSTED"):
        backend.optim_steps([("consumed", AdamwParams())])
    backend.delete_adapter("consumed")


def test_a_step_that_fails_after_its_dispatch_is_a_device_failure(
    backend: JaxBackend, batch: Callable[[str], TrainBatch], monkeypatch: pytest.MonkeyPatch
):
    """A program is dispatched without waiting, so it fails when its results are read."""
    backend.create_adapter("consumed", CONFIG)
    backend.forward_backward(batch("consumed"))
    monkeypatch.setattr(jax, "device_get", exhausted)
    with pytest.raises(DeviceFailed, match="a step failed on the device: RESOURCE_EXHAUSTED"):
        backend.optim_steps([("consumed", AdamwParams())])
    backend.delete_adapter("consumed")


@pytest.mark.parametrize(
    "program", ["empty_pages", "set_slot_adapter", "prefill", "copy", "decode"]
)
def test_sampling_that_runs_out_of_memory_can_be_repeated(
    program: str, backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
):
    request = SamplingRequest(
        np.arange(5, dtype=np.int32), None, seed=1, num_samples=3, max_tokens=9
    )
    (want,) = backend.sample([request])
    real = getattr(backend._sampler._programs, program)

    def fail(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        exhausted()

    monkeypatch.setattr(backend._sampler._programs, program, fail)
    backend._sampler._forget_all()  # otherwise there would be nothing to prefill or to load
    with pytest.raises(OutOfMemory):
        backend.sample([request])
    monkeypatch.undo()
    (again,) = backend.sample([request])
    for one, two in zip(want.sequences, again.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", DeviceFailed),
        ("UNAVAILABLE: the device is gone", DeviceFailed),
        ("INVALID_ARGUMENT: the program has a flaw", jax.errors.JaxRuntimeError),
    ],
)
def test_device_failures_are_distinguished_from_programs_that_cannot_run(
    backend: JaxBackend,
    batch: Callable[[str], TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
    message: str,
    expected: type[Exception],
):
    def broken(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    backend.create_adapter("unlucky", CONFIG)
    monkeypatch.setitem(backend._trainer._micro_batches.train, False, broken)
    with pytest.raises(expected, match=message.split(": ")[1]):
        backend.forward_backward(batch("unlucky"))


NUMERICS = NumericChoices("float32", StaticShapes(24), "dots", 8)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"static_shapes": StaticShapes(24, chunk=512)},
        {"remat": "full"},
        {"sample_rows": 4},
    ],
)
def test_every_cause_of_other_bits_changes_the_numerics_id(
    base_model: Path, change: dict[str, Any]
):
    changed = NUMERICS._replace(**change)
    for function in (numerics_id, program_id):
        assert function(base_model, NUMERICS) == function(base_model, NUMERICS)
        assert function(base_model, changed) != function(base_model, NUMERICS)


def test_the_numerics_id_distinguishes_base_models_by_their_weights(
    base_model: Path, tmp_path: Path
):
    """A fine-tuned sister model has the same configuration, names and shapes."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base_model / name).read_bytes())
    assert numerics_id(tmp_path, NUMERICS) == numerics_id(base_model, NUMERICS)
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert numerics_id(tmp_path, NUMERICS) != numerics_id(base_model, NUMERICS)
    assert program_id(tmp_path, NUMERICS) == program_id(base_model, NUMERICS)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("}", ', "rope_theta": 5}'))
    assert program_id(tmp_path, NUMERICS) != program_id(base_model, NUMERICS)


def test_the_numerics_id_names_versions_device_threads_and_flags(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = numerics_id(base_model, NUMERICS)
    for part in (f"jax={jax.__version__}", f"numpy={np.__version__}", "device=cpu(", "threads "):
        assert part in plain
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert "--xla_cpu_enable_fast_math=true" in numerics_id(base_model, NUMERICS)
    monkeypatch.undo()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert "threads 3" in numerics_id(base_model, NUMERICS)
