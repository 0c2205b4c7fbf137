"""The backend's own promises, apart from isolation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tuneserve_engine.adapters import AdamParams, AdapterConfig, BaseModelInfo
from tuneserve_engine.backend.base import (
    AdapterState,
    Backend,
    DeviceFailed,
    OutOfMemory,
    SampleRequest,
    TrainUnit,
)
from tuneserve_engine.backend.jax import backend as backend_module
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.numerics import numerics_id
from tuneserve_engine.backend.jax.optimizer import Stepped
from tuneserve_engine.config import WorkerSettings
from tuneserve_engine.errors import ServerError, UserError
from tuneserve_engine.lattice import ShapeLattice

CONFIG = AdapterConfig(rank=8, alpha=32, seed=1)


def test_it_tells_what_clients_need_to_know(backend: Backend, base_model: Path):
    assert backend.info == BaseModelInfo(
        name="tiny",
        architecture="qwen3",
        vocab_size=61,
        context_length=24,
        max_rank=128,
        tokenizer_id=str(base_model),
    )


def test_an_adapter_that_is_not_there_is_named(backend: Backend):
    with pytest.raises(ServerError, match="'nobody' is not on this device"):
        backend.optim_step("nobody", AdamParams())
    backend.create_adapter("gone", CONFIG)
    backend.delete_adapter("gone")
    with pytest.raises(ServerError, match="'gone' is not on this device"):
        backend.adapter_state("gone", optimizer=False)


def test_a_rank_beyond_the_largest_class_is_refused(backend: Backend):
    with pytest.raises(UserError, match=r"rank is 129.*1 to 128"):
        backend.create_adapter("wide", replace(CONFIG, rank=129))


def test_a_context_longer_than_the_models_is_refused(base_model: Path):
    with pytest.raises(ValueError, match=r"25 tokens.*built for 24"):
        JaxBackend(str(base_model), name="tiny", tokenizer_id="t", lattice=ShapeLattice(25))


def test_a_step_reports_the_norm_of_the_gradient_before_clipping(
    backend: JaxBackend, batch_of: Any, unit_of: Any, datum: Any
):
    norms = []
    for name, limit in (("free", 0.0), ("clipped", 1e-3)):
        backend.create_adapter(name, CONFIG)
        batch = batch_of({0: (0, datum(1, 11))}, rows=4, bucket=16)
        backend.forward_backward(unit_of([name], [batch]))
        norms.append(backend.optim_step(name, AdamParams(grad_clip_norm=limit))["grad_norm"])
    assert norms[0] == norms[1] > 0.1


def test_a_step_without_a_gradient_leaves_a_fresh_adapter_as_it_is(backend: JaxBackend):
    backend.create_adapter("idle", CONFIG)
    before = backend.adapter_state("idle", optimizer=True)
    assert backend.optim_step("idle", AdamParams()) == {"grad_norm": 0.0}
    after = backend.adapter_state("idle", optimizer=True)
    assert after.step == 1
    for name, array in before.weights.items():
        np.testing.assert_array_equal(after.weights[name], array)


def test_a_step_that_fails_on_the_device_changes_nothing(
    backend: JaxBackend, batch_of: Any, unit_of: Any, datum: Any, monkeypatch: pytest.MonkeyPatch
):
    """A program is dispatched without waiting: its failure comes after its results."""

    class Lost:
        """An array that the device failed to compute."""

        def block_until_ready(self) -> None:
            raise RuntimeError("out of device memory")

        __float__ = block_until_ready

    backend.create_adapter("unlucky", CONFIG)
    batch = batch_of({0: (0, datum(1, 11))}, rows=4, bucket=16)
    backend.forward_backward(unit_of(["unlucky"], [batch]))
    before = backend.adapter_state("unlucky", optimizer=True)
    lost = Stepped(*(Lost() for _ in Stepped._fields))
    monkeypatch.setattr(backend_module, "adamw_step", lambda *args: lost)
    with pytest.raises(RuntimeError, match="out of device memory"):
        backend.optim_step("unlucky", AdamParams())
    monkeypatch.undo()
    after = backend.adapter_state("unlucky", optimizer=True)
    assert after.step == before.step == 0
    for name, array in before.weights.items():
        np.testing.assert_array_equal(after.weights[name], array)
    assert backend.optim_step("unlucky", AdamParams())["grad_norm"] > 0.1, "the gradient is there"


def test_the_sampler_scores_a_prompt_as_the_trainer_does(
    backend: JaxBackend, batch_of: Any, unit_of: Any, datum: Any
):
    backend.create_adapter("scored", CONFIG)
    row = datum(1, 15)
    row = replace(row, targets=[*row.tokens[1:], 7])
    for _ in range(3):
        batch = batch_of({0: (0, row)}, rows=1, bucket=16)
        backend.forward_backward(unit_of(["scored"], [batch]))
        backend.optim_step("scored", AdamParams(learning_rate=0.02))
    trained = backend.forward_backward(unit_of(["scored"], [batch], forward_only=True))
    assert not backend.has_snapshot("snap")
    backend.load_snapshot("snap", backend.adapter_state("scored", optimizer=False))
    assert backend.has_snapshot("snap")
    prompt = np.array([*row.tokens, 7], np.int32)
    request = SampleRequest(
        prompt, "snap", seed=1, num_samples=1, max_tokens=1, prompt_logprobs=True
    )
    (result,) = backend.sample([request])
    np.testing.assert_allclose(
        result.prompt_logprobs[1:], trained.outputs[0].logprobs[0, :15, 0], rtol=1e-4, atol=1e-4
    )


def test_a_bfloat16_model_trains_and_samples_near_the_float32_one(
    base_model: Path, backend: JaxBackend, batch_of: Any, unit_of: Any, datum: Any
):
    """Query heads share key heads, and there are many rows: products that XLA may not have."""
    half = JaxBackend(
        str(base_model), name="half", tokenizer_id="t", dtype="bfloat16", lattice=backend.lattice
    )
    batch = batch_of({place: (0, datum(place, 15)) for place in range(4)}, rows=4, bucket=16)
    losses, prompts = [], []
    for each in (half, backend):
        each.create_adapter("wide", CONFIG)
        losses.append([])
        for _ in range(3):
            result = each.forward_backward(unit_of(["wide"], [batch]))
            losses[-1].append(result.outputs[0].loss.sum())
            each.optim_step("wide", AdamParams(learning_rate=0.02))
        each.load_snapshot("wide", each.adapter_state("wide", optimizer=False))
        prompt = np.array(datum(0, 15).tokens, np.int32)
        request = SampleRequest(
            prompt, "wide", seed=1, num_samples=4, max_tokens=8, prompt_logprobs=True
        )
        (sampled,) = each.sample([request])
        assert all(np.isfinite(one.logprobs).all() for one in sampled.sequences)
        prompts.append(sampled.prompt_logprobs[1:])
    np.testing.assert_allclose(*losses, rtol=0.05)
    assert np.abs(prompts[0] - prompts[1]).mean() < 0.05


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """Puts JAX's settings back: they belong to the process."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_every_program_is_kept_in_the_cache_directory(
    base_model: Path, tmp_path: Path, cache_settings: None
):
    cache = tmp_path / "programs"
    JaxBackend(str(base_model), name="tiny", tokenizer_id="t", compile_cache_dir=cache)
    before = set(cache.glob("*"))
    jax.jit(lambda x: 3 * x + 1)(np.float32(2))
    assert set(cache.glob("*")) > before


@pytest.mark.parametrize(("asked", "given"), [(64, 64), (4096, 2048)])
def test_the_context_is_what_was_asked_for_but_no_more_than_the_base_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, given: int
):
    monkeypatch.setattr(backend_module, "keep_programs", lambda _: None)
    settings = WorkerSettings(data_dir=tmp_path, max_context_tokens=asked)
    backend = JaxBackend.from_settings(settings)
    assert backend.info.context_length == backend.lattice.bucket(given) == given
    assert backend.info.eos_token_ids == (1000, 998)


def exhausted(*args: Any, **kwargs: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.")


FORWARD_BACKWARD = ("_train", "add_rows", "commit")
"""The programs of a unit, in the order in which they run."""


def break_program(
    backend: JaxBackend, name: str, monkeypatch: pytest.MonkeyPatch, *, after: int
) -> None:
    """The program runs ``after`` times; its next call finds no memory, its arguments donated."""
    owner = backend if hasattr(backend, name) else backend_module
    real, calls = getattr(owner, name), iter(range(after))

    def run(*args: Any) -> Any:
        result = real(*args)
        return result if next(calls, None) is not None else exhausted()

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("program", FORWARD_BACKWARD)
def test_a_unit_that_finds_no_memory_has_changed_no_adapter_and_keeps_no_array(
    program: str,
    after: int,
    backend: JaxBackend,
    batch_of: Any,
    unit_of: Any,
    datum: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    def state(name: str) -> AdapterState:
        return backend.adapter_state(name, optimizer=True, accumulator=True)

    def first(name: str) -> TrainUnit:
        return unit_of([name], [batch_of({0: (0, datum(1, 11))}, rows=4, bucket=16)])

    def second(name: str) -> TrainUnit:
        batches = [batch_of({1: (0, datum(2, 11)), 2: (1, datum(3, 5))}, rows=4, bucket=16)]
        return unit_of([name, name], [*batches, *batches])

    for name in ("unlucky", "undisturbed"):
        backend.create_adapter(name, CONFIG)
        backend.forward_backward(first(name))
    before, held = state("unlucky"), live_bytes()
    break_program(backend, program, monkeypatch, after=after)
    with pytest.raises(OutOfMemory, match=r"no room.*Out of memory allocating 64 bytes"):
        backend.forward_backward(second("unlucky"))
    monkeypatch.undo()
    assert live_bytes() == held
    assert_same(state("unlucky"), before)
    for name in ("unlucky", "undisturbed"):
        backend.forward_backward(second(name))
        backend.optim_step(name, AdamParams())
    assert_same(state("unlucky"), state("undisturbed"))


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def assert_same(a: AdapterState, b: AdapterState) -> None:
    assert (a.config, a.step) == (b.config, b.step)
    for part in ("weights", "first_moment", "second_moment", "accumulator"):
        mine, other = getattr(a, part), getattr(b, part)
        assert mine.keys() == other.keys()
        for name, array in mine.items():
            np.testing.assert_array_equal(array, other[name], err_msg=f"{part}[{name}]")


def test_a_step_that_finds_no_memory_changes_nothing(
    backend: JaxBackend, batch_of: Any, unit_of: Any, datum: Any, monkeypatch: pytest.MonkeyPatch
):
    backend.create_adapter("unlucky", CONFIG)
    batch = batch_of({0: (0, datum(1, 11))}, rows=4, bucket=16)
    backend.forward_backward(unit_of(["unlucky"], [batch]))
    before = backend.adapter_state("unlucky", optimizer=True, accumulator=True)
    monkeypatch.setattr(backend_module, "adamw_step", exhausted)
    with pytest.raises(OutOfMemory):
        backend.optim_step("unlucky", AdamParams())
    monkeypatch.undo()
    assert_same(backend.adapter_state("unlucky", optimizer=True, accumulator=True), before)
    assert backend.optim_step("unlucky", AdamParams())["grad_norm"] > 0.1


@pytest.mark.parametrize("program", ["prefill", "decode", "join", "adopt", "first"])
def test_sampling_that_finds_no_memory_can_be_done_again(
    program: str, backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
):
    request = SampleRequest(np.arange(5, dtype=np.int32), None, seed=1, num_samples=3, max_tokens=9)
    (want,) = backend.sample([request])
    real = getattr(backend._sampler._programs, program)

    def fail(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        exhausted()

    monkeypatch.setattr(backend._sampler._programs, program, fail)
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
def test_a_device_in_trouble_is_told_from_a_program_that_cannot_run(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, message: str, expected: type[Exception]
):
    def broken(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    backend.create_adapter("unlucky", CONFIG)
    monkeypatch.setattr(backend_module, "adamw_step", broken)
    with pytest.raises(expected, match=message.split(": ")[1]):
        backend.optim_step("unlucky", AdamParams())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"lattice": ShapeLattice(24, token_budget=64, max_rows=8)},
        {"sample_rows": 4},
    ],
)
def test_what_changes_bits_changes_the_numerics_id(base_model: Path, change: dict[str, Any]):
    settings = {"dtype": "float32", "lattice": ShapeLattice(24), "sample_rows": 8}
    assert numerics_id(base_model, **settings) == numerics_id(base_model, **settings)
    assert numerics_id(base_model, **settings | change) != numerics_id(base_model, **settings)


def test_the_numerics_id_tells_base_models_apart_by_their_weights(base_model: Path, tmp_path: Path):
    """A fine-tuned sister has the same configuration, names and shapes."""
    settings = {"dtype": "float32", "lattice": ShapeLattice(24), "sample_rows": 8}
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base_model / name).read_bytes())
    assert numerics_id(tmp_path, **settings) == numerics_id(base_model, **settings)
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert numerics_id(tmp_path, **settings) != numerics_id(base_model, **settings)


def test_the_numerics_id_names_versions_device_threads_and_flags(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"dtype": "float32", "lattice": ShapeLattice(24), "sample_rows": 8}
    plain = numerics_id(base_model, **settings)
    for part in (f"jax={jax.__version__}", f"numpy={np.__version__}", "device=cpu(", "threads "):
        assert part in plain
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert "--xla_cpu_enable_fast_math=true" in numerics_id(base_model, **settings)
    monkeypatch.undo()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert "threads 3" in numerics_id(base_model, **settings)
