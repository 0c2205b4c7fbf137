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
from tuneserve_engine.backend.base import Backend, SampleRequest
from tuneserve_engine.backend.jax import backend as backend_module
from tuneserve_engine.backend.jax.backend import JaxBackend
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
