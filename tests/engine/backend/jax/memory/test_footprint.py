"""The planner counts what the arrays take, and no less than the programs need."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from scripts.gpu_compile.shapes import MODELS as GPU_MODELS
from tests.engine.backend.jax.memory.footprint_case import (
    DTYPES,
    EVERY_SHAPE,
    MODELS,
    QWEN3,
    SHAPES,
    STATIC_SHAPES,
    adapter_slots,
    decoder,
    footprint,
    size,
)
from tests.support.compiled import memory_of
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import new_adapter, target_shapes
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.training.adapter_slots import (
    new_gradient_slots,
)
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    score_micro_batch,
    space_shapes,
    train_micro_batch,
)
from tuneserve_engine.backend.jax.training.tape import Workspace
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

BLOCKS = STATIC_SHAPES.micro_batch_tokens // STATIC_SHAPES.block


def workspace(config: ModelConfig, dtype: Any, remat: Any) -> Workspace:
    """Shapes of the arrays that training holds."""
    shapes: Workspace = space_shapes(decoder(config, dtype, remat), adapter_slots(config), BLOCKS)
    return shapes


@MODELS
@DTYPES
def test_the_base_weights_are_counted_exactly(config: ModelConfig, dtype: Any) -> None:
    real = nnx.state(decoder(config, dtype), nnx.Param)
    assert footprint(config, dtype=dtype).base.bytes == size(real)


@MODELS
def test_adapter_and_gradient_slots_have_one_slot_per_request_of_a_batch(
    config: ModelConfig,
) -> None:
    for rank in STATIC_SHAPES.rank_buckets:
        held = adapter_slots(config, rank=rank)
        gradient_slots = new_gradient_slots(target_shapes(config), rank, STATIC_SHAPES.slots(rank))
        assert footprint(config).adapter_slots(rank).bytes == size((held.a, held.b)) + size(
            gradient_slots
        )


@MODELS
def test_an_adapter_has_four_copies(config: ModelConfig) -> None:
    counted = footprint(config)
    for rank in STATIC_SHAPES.rank_buckets:
        adapter = new_adapter(AdapterConfig(1, 1.0, 0), target_shapes(config), rank)
        copies = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
        assert [size(copy) for copy in copies] == [counted.adapter_bytes(rank)] * 4
    batch_adapters = max(
        STATIC_SHAPES.slots(rank) * counted.adapter_bytes(rank)
        for rank in STATIC_SHAPES.rank_buckets
    )
    assert counted.batch_adapter_bytes == 4 * batch_adapters


@MODELS
@DTYPES
@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_training_takes_as_much_as_its_workspace(
    config: ModelConfig, remat: Any, dtype: Any
) -> None:
    counted = footprint(config, remat=remat, dtype=dtype)
    real = workspace(config, dtype, remat)
    assert counted.tape.bytes == size(real.tape)
    assert counted.layer_gradients.bytes == size((real.dx, real.dattended, real.dqkv))


@DTYPES
@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_training_on_a_gpu_takes_as_much_as_its_workspace(
    remat: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products with A of the highest rank are kept, also if kernels leave out the LM head."""
    monkeypatch.setattr(block_lora, "_is_gpu", lambda: True)
    shapes = StaticShapes(
        64, block=16, chunk=32, requested_tokens=64, request_slots=4, rank_buckets=(2, 20)
    )
    config = replace(
        QWEN3, vocab_size=61, hidden=128, heads=2, kv_heads=1, head_dim=128, intermediate=256
    )
    counted = footprint(config, remat=remat, dtype=dtype, static_shapes=shapes, device_kind="gpu")
    held, blocks = adapter_slots(config, shapes), shapes.micro_batch_tokens // shapes.block
    real = space_shapes(decoder(config, dtype, remat, shapes), held, blocks)
    assert counted.tape.bytes == size(real.tape)


@MODELS
@DTYPES
def test_training_without_recomputation_is_not_underestimated(
    config: ModelConfig, dtype: Any
) -> None:
    counted = footprint(config, remat="none", dtype=dtype).tape.bytes
    real = size(workspace(config, dtype, "none").tape)
    assert real <= counted <= 1.25 * real


def test_an_optimizer_step_on_a_gpu_fits_every_kind_of_adapter() -> None:
    """Compiled for an H200, Qwen3-8B, rank 32: steps, and OSFT's pairs as their result."""
    shapes = StaticShapes(4096, chunk=2048, requested_tokens=8192, rank_buckets=(8, 32))
    counted = footprint(
        GPU_MODELS["qwen3-8b"], static_shapes=shapes, device_kind="gpu", dtype="bfloat16"
    )
    lora, osft, pairs = 56_626_072, 232_174_048, 56_628_480 + 369_148_032
    assert max(lora, osft, pairs) <= counted.step.bytes == 2 * counted.adapter_bytes(32)


@pytest.mark.parametrize(
    ("vocab_size", "device_kind", "blocks"),
    [(61, "cpu", 16), (151_936, "cpu", 2), (1_000_000, "cpu", 1), (151_936, "gpu", 16)],
)
def test_logits_take_their_room_and_their_gradient_as_much_again(
    vocab_size: int, device_kind: str, blocks: int
) -> None:
    static_shapes = replace(STATIC_SHAPES, block=64, chunk=1024)
    config = replace(QWEN3, vocab_size=vocab_size)
    counted = footprint(config, static_shapes=static_shapes, device_kind=device_kind)
    assert counted.logits.bytes == 2 * 64 * blocks * vocab_size * 4
    narrow = replace(counted, shape=replace(counted.shape, dtype="bfloat16"))
    assert narrow.logits.bytes == 64 * blocks * vocab_size * (2 * 4 + 2)


def test_two_micro_batches_of_arrays_are_counted() -> None:
    micro_batch = DeviceMicroBatch.from_host(nobodys(STATIC_SHAPES), STATIC_SHAPES.block)
    logprobs, loss = 4 * STATIC_SHAPES.micro_batch_tokens * 64, 4 * STATIC_SHAPES.micro_batch_tokens
    real = 2 * (size(micro_batch) + logprobs + loss)
    assert real <= footprint(QWEN3).batches.bytes <= 1.05 * real


# --- programs ------------------------------------------------------------------------------------


@EVERY_SHAPE
def test_programs_of_training_need_no_more_extra_memory_than_planned(name: str, dtype: Any) -> None:
    """Each token has 64 targets, whose arrays are the largest."""
    config, static_shapes = SHAPES[name]
    counted = footprint(config, dtype=dtype, static_shapes=static_shapes)
    lines = counted.temporaries
    planned = sum(line.bytes for line in (*lines, *counted.wide_copies))
    trained, scored = temporaries(config, static_shapes, dtype)
    assert trained <= planned
    assert scored <= planned


def temporaries(config: ModelConfig, static_shapes: StaticShapes, dtype: Any) -> tuple[int, int]:
    """The bytes that the programs of a gradient and of scores need while they run."""
    model, held = (
        decoder(config, dtype, static_shapes=static_shapes),
        adapter_slots(config, static_shapes),
    )
    space = space_shapes(model, held, static_shapes.micro_batch_tokens // static_shapes.block)
    gradient_slots = new_gradient_slots(
        target_shapes(config), static_shapes.max_rank, static_shapes.slots(static_shapes.max_rank)
    )
    micro_batch = DeviceMicroBatch.from_host(nobodys(static_shapes), static_shapes.block)
    model.train()
    graph, weights = nnx.split(model)

    def train(weights: Any, *args: Any) -> Any:
        return train_micro_batch(nnx.merge(graph, weights), *args)

    training = jax.jit(train, donate_argnums=(1, 2)).lower(
        weights, space, gradient_slots, held, micro_batch
    )
    model.eval()
    scoring_graph, _ = nnx.split(model)

    def score(weights: Any, *args: Any) -> Any:
        return score_micro_batch(nnx.merge(scoring_graph, weights), *args)

    scoring = jax.jit(score).lower(weights, held, micro_batch)
    trained, scored = (memory_of(each).temp_size_in_bytes for each in (training, scoring))
    return trained, scored


def nobodys(static_shapes: StaticShapes) -> MicroBatch:
    """A micro-batch of padding, with 64 targets per token."""
    tokens, targets = static_shapes.micro_batch_tokens, static_shapes.target_buckets[-1]
    whole, real = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    fields: dict[str, Any] = dict.fromkeys(MicroBatch._fields, real)
    fields |= dict.fromkeys(("tokens", "positions", "segment_ids", "loss_id"), whole)
    fields |= {"targets": np.zeros((tokens, targets), np.int32), "blocks": 0, "part": None}
    fields |= {"weights": np.zeros((tokens, targets), np.float32)}
    fields |= dict.fromkeys(("block_request", "first_visible_block"), whole[:: static_shapes.block])
    return MicroBatch(**fields)
