"""Programs that loop over the layers, as on a GPU, sample what programs with unrolled layers do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from tests.engine.backend.jax.sampling.test_sampler import (
    COMPANY,
    CONFIG,
    STATIC_SHAPES,
    Letters,
    _plain,
)
from tests.support.decoders import random_decoder, zero_decoder
from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.backend.base import SampleResult, SamplingRequest
from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.attention import paged, paged_gpu, rotate_gpu
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling import adapter_slots, decode_batch, programs
from tuneserve_engine.backend.jax.sampling.sampler import JaxSampler
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

pytestmark = pytest.mark.usefixtures("quickly_compiled")

DEEP = replace(CONFIG, layers=3)
TILED = replace(DEEP, heads=2, kv_heads=1, head_dim=16)
"""Heads and pages that the kernel for GPUs takes."""
TILED_SHAPES = StaticShapes(CONFIG.context_length, block=16, chunk=32, rank_buckets=(2,))


@contextmanager
def scanning(*, scans: bool = True) -> Iterator[None]:
    """Make sampling loop over the layers on a CPU as well."""
    with (
        mock.patch.object(programs, "scans_layers", lambda: scans),
        mock.patch.object(adapter_slots, "scans_layers", lambda: scans),
        mock.patch.object(decode_batch, "scans_layers", lambda: scans),
    ):
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Also write pages at once, and read and write them by the kernels, interpreted."""

    def interpreted(kernel: Any, *arguments: Any, interpret: bool) -> Any:
        assert not interpret
        return kernel(*arguments, interpret=True)

    attend = partial(interpreted, paged_gpu.attend)
    rotate = partial(interpreted, rotate_gpu.rotate_and_write)
    with (
        scanning(),
        mock.patch.object(paged, "_is_gpu", lambda: True),
        mock.patch.object(paged_gpu, "attend", attend),
        mock.patch.object(rotate_gpu, "rotate_and_write", rotate),
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


def results(
    requests: tuple[SamplingRequest, ...] = COMPANY,
    config: ModelConfig = DEEP,
    static_shapes: StaticShapes = STATIC_SHAPES,
    dtype: DTypeLike = jnp.float32,
) -> list[SampleResult]:
    model = random_decoder(config, dtype, std=0.24)
    model.use_shapes(static_shapes)
    sampler = JaxSampler(
        ProgramRegistry(), model, static_shapes, Letters(), slots=4, snapshot_bytes=2**30
    )
    asked = []
    for number, request in enumerate(requests):
        name = request.snapshot_id and f"adapter {number}"
        if name is not None:
            sampler.load_snapshot(name, state(config, number))
        asked.append(replace(request, snapshot_id=name))
    return sampler.sample(asked)


def assert_close(got: list[SampleResult], want: list[SampleResult]) -> None:
    """Ids are equal, and logprobs close."""
    for one, other in zip(got, want, strict=True):
        mine, its = (jax.tree.leaves(_plain(each)) for each in (one, other))
        for x, y in zip(mine, its, strict=True):
            if isinstance(x, str):
                assert x == y
            else:
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_loop_over_the_layers_samples_what_unrolled_layers_do() -> None:
    want = results()
    with scanning():
        got = results()
    assert_close(got, want)


def test_in_bfloat16_the_kernel_in_the_loop_scores_what_the_other_programs_do() -> None:
    """A prompt over three pages, alone and beside others; 14 tokens fill the context."""
    prompt = np.random.default_rng(0).integers(0, 67, 50).astype(np.int32)
    request = SamplingRequest(prompt, "own", 1, num_samples=1, max_tokens=14, prompt_logprobs=True)
    company = (replace(COMPANY[3], seed=3), request, COMPANY[8])
    arguments = TILED, TILED_SHAPES, jnp.bfloat16
    want = results(company, *arguments)[1]
    with (
        as_on_a_gpu(),
        mock.patch.object(paged_gpu, "_call", wraps=paged_gpu._call) as call,
        mock.patch.object(rotate_gpu, "_kernel", wraps=rotate_gpu._kernel) as rotations,
    ):
        got = results(company, *arguments)[1]
    assert rotations.called
    lengths = {each.args[0].shape[2] for each in call.call_args_list}
    assert lengths == {16, 2}  # a page of a prompt, or the query heads of one position
    assert len(call.call_args_list) == 2  # traced once for prefill and once for decoding
    assert len(got.sequences[0].tokens) == 14
    assert np.isfinite(got.sequences[0].logprobs).all()
    assert got.prompt_logprobs is not None and want.prompt_logprobs is not None
    np.testing.assert_allclose(
        np.array(got.prompt_logprobs[1:], float),
        np.array(want.prompt_logprobs[1:], float),
        rtol=0.1,
        atol=0.1,
    )


def test_a_loop_over_the_layers_needs_no_second_copy_of_their_weights() -> None:
    with scanning():
        found = programs.Programs(
            ProgramRegistry(),
            zero_decoder(DEEP),
            STATIC_SHAPES,
            slots=4,
            pages=9,
        )
    assert found.layers is None
    (_, weights, *_), *_ = (shape._specs() for shape in found.decode.shapes())
    assert weights == ()
