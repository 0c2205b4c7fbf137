"""Programs that loop over the layers, as on a GPU, sample what programs with unrolled layers do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.engine.backend.jax.sampling.test_sampler import COMPANY, CONFIG, STATIC_SHAPES, Letters
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SampleResult
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling import adapter_slots, programs
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.core.adapter import AdapterConfig

DEEP = replace(CONFIG, layers=3)


@contextmanager
def scanning() -> Iterator[None]:
    """Make sampling loop over the layers on a CPU as well."""
    with (
        mock.patch.object(programs, "scans_layers", lambda: True),
        mock.patch.object(adapter_slots, "scans_layers", lambda: True),
    ):
        yield


def state(config: ModelConfig, seed: int) -> AdapterState:
    adapter = AdapterConfig(rank=2, alpha=8.0, seed=seed)
    shapes, rng = target_shapes(config), np.random.default_rng(seed)
    weights = {}
    for name in adapter.targets:
        *layers, inputs, outputs = shapes[name]
        for side, shape in (("A", (inputs, 2)), ("B", (2, outputs))):
            random = rng.normal(scale=0.2, size=(*layers, *shape))
            weights[f"{name}.{side}"] = random.astype(np.float32)
    return AdapterState(adapter, weights)


def results() -> list[SampleResult]:
    model = Decoder(DEEP, rngs=nnx.Rngs(0), dtype=jnp.float32)
    weights = jax.tree.map(lambda x: x * 12 if x.ndim > 1 else x, nnx.state(model))
    nnx.update(model, weights)
    model.block, model.chunk_blocks = STATIC_SHAPES.block, 2
    sampler = JaxSampler(
        ProgramRegistry(), model, STATIC_SHAPES, Letters(), slots=4, snapshot_bytes=2**30
    )
    asked = []
    for number, request in enumerate(COMPANY):
        name = request.snapshot_id and f"adapter {number}"
        if name is not None:
            sampler.load_snapshot(name, state(DEEP, number))
        asked.append(replace(request, snapshot_id=name))
    return sampler.sample(asked)


def test_a_loop_over_the_layers_samples_what_unrolled_layers_do() -> None:
    want = results()
    with scanning():
        got = results()
    for one, other in zip(got, want, strict=True):
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            assert mine.tokens.tolist() == its.tokens.tolist()
            np.testing.assert_allclose(mine.logprobs, its.logprobs, rtol=1e-5, atol=1e-5)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        if one.prompt_logprobs is not None:
            np.testing.assert_allclose(
                one.prompt_logprobs, other.prompt_logprobs, rtol=1e-5, atol=1e-5
            )


def test_a_loop_over_the_layers_needs_no_second_copy_of_their_weights() -> None:
    """Of the model's arrays, decoding takes the stacked layers; beside it there is nothing."""
    with scanning():
        found = programs.Programs(
            ProgramRegistry(),
            Decoder(DEEP, rngs=nnx.Rngs(0), dtype=jnp.float32),
            STATIC_SHAPES,
            slots=4,
            pages=9,
        )
    assert found.layers is None
    (_, weights, *_), *_ = (shape._specs() for shape in found.decode.shapes())
    assert weights == ()
