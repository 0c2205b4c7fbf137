"""The planner counts what the arrays take, and no less than the programs need."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.support.compiled import memory_of
from tests.support.decoders import zero_decoder
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import new_adapter, target_shapes
from tuneserve_engine.backend.jax.memory.footprint import EngineShape, Footprint
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
from tuneserve_engine.backend.jax.sampling.kv_pages import most_pages
from tuneserve_engine.backend.jax.sampling.programs import Programs
from tuneserve_engine.backend.jax.training.adapter_slots import (
    AdapterSlots,
    new_adapter_slots,
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

QWEN3 = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    hidden=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate=20,
    context_length=48,
    qk_norm=True,
    tied_embeddings=True,
)
QWEN2 = replace(QWEN3, architecture="qwen2", qk_norm=False, attention_bias=True)
LLAMA = replace(
    QWEN3,
    architecture="llama",
    qk_norm=False,
    tied_embeddings=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)
MODELS = pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA], ids=lambda c: c.architecture)
SIDES = ("float32", "bfloat16")
DTYPES = pytest.mark.parametrize("dtype", SIDES)
STATIC_SHAPES = StaticShapes(
    48, block=8, chunk=16, requested_tokens=64, request_slots=6, rank_buckets=(2, 4)
)
BLOCKS = STATIC_SHAPES.micro_batch_tokens // STATIC_SHAPES.block


def footprint(config: ModelConfig, **changes: Any) -> Footprint:
    pages = most_pages(changes.get("static_shapes", STATIC_SHAPES), changes.get("sample_rows", 8))
    shape = EngineShape(STATIC_SHAPES, "dots", 8, 8, "float32", "cpu", pages)
    return Footprint(config, replace(shape, **changes))


def size(arrays: Any) -> int:
    """Bytes of arrays, or of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def decoder(
    config: ModelConfig,
    dtype: Any,
    remat: Any = "dots",
    static_shapes: StaticShapes = STATIC_SHAPES,
) -> Decoder:
    model = zero_decoder(config, dtype)
    model.block, model.chunk_blocks = (
        static_shapes.block,
        static_shapes.chunk // static_shapes.block,
    )
    model.remat = remat
    return model


def adapter_slots(
    config: ModelConfig, static_shapes: StaticShapes = STATIC_SHAPES, rank: int | None = None
) -> AdapterSlots:
    rank = rank or static_shapes.max_rank
    return new_adapter_slots(target_shapes(config), rank, static_shapes.slots(rank))


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


ROWS = 5


@dataclass(frozen=True)
class Sampling:
    """The sampler's programs, for the highest ranks."""

    programs: Programs

    @classmethod
    def of(cls, config: ModelConfig, static_shapes: StaticShapes, dtype: Any) -> "Sampling":
        model, pages = (
            decoder(config, dtype, static_shapes=static_shapes),
            most_pages(static_shapes, ROWS),
        )
        return cls(Programs(ProgramRegistry(), model, static_shapes, slots=ROWS, pages=pages))

    def arguments(self, name: str, which: int = -1) -> list[int]:
        """The bytes of each argument."""
        return [size(specs) for specs in self._shape(name, which)._specs()]

    def takes(self, name: str) -> int:
        """The bytes that the program needs while it runs, its results included."""
        memory = memory_of(self._shape(name).lowered(lambda x: x))
        returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(memory.temp_size_in_bytes + returned)

    def _shape(self, name: str, which: int = -1) -> Any:
        return getattr(self.programs, name).shapes()[which]


@MODELS
@DTYPES
def test_sampling_has_unstacked_layers_kv_pages_and_an_adapter_per_decode_slot(
    config: ModelConfig, dtype: Any
) -> None:
    counted = footprint(config, dtype=dtype, sample_rows=ROWS, snapshots=3)
    sampling = Sampling.of(config, STATIC_SHAPES, dtype)
    pages, weights, *_ = sampling.arguments("decode")
    slots = sum(sampling.arguments("decode", which)[2] for which in range(2))
    *_, snapshot = sampling.arguments("set_slot_adapter")
    *_, empty = sampling.arguments("set_slot_adapter", which=0)
    scale = 4
    assert counted.unstacked.bytes == weights
    assert counted.caches.bytes == pages
    assert counted.decode_adapters.bytes == slots - 2 * ROWS * scale  # each rank bucket has its own
    assert counted.snapshot_bytes == 3 * (snapshot - scale)
    assert counted.snapshots.bytes == counted.snapshot_bytes + empty - scale


def test_decode_slots_of_a_gpu_share_adapter_slots() -> None:
    """By hand: 16 at most, on a CPU one per decode slot."""
    few, many = (footprint(QWEN3, sample_rows=rows) for rows in (8, 64))
    one = few.decode_adapters.bytes // 8
    on_a_gpu = (replace(each, shape=replace(each.shape, device_kind="gpu")) for each in (few, many))
    assert many.decode_adapters.bytes == 64 * one
    assert [each.decode_adapters.bytes for each in on_a_gpu] == [8 * one, 16 * one]


def test_a_gpu_has_no_second_copy_of_the_layers() -> None:
    on_a_cpu, on_a_gpu = (
        {
            line.name
            for line in replace(counted, shape=replace(counted.shape, device_kind=kind)).lines
        }
        for counted in [footprint(QWEN3)]
        for kind in ("cpu", "gpu")
    )
    assert on_a_cpu - on_a_gpu == {"layers for sampling"}


# --- programs ------------------------------------------------------------------------------------

UNLIKE = replace(QWEN3, hidden=64, intermediate=160, head_dim=16, vocab_size=400)
"""A configuration in which all sizes differ."""
SHAPES = {
    "usual": (UNLIKE, STATIC_SHAPES),
    "long": (replace(UNLIKE, context_length=512), replace(STATIC_SHAPES, context_length=512)),
    "many words": (replace(UNLIKE, vocab_size=8000), STATIC_SHAPES),
    "wide layers": (replace(UNLIKE, hidden=256, intermediate=640), STATIC_SHAPES),
    "high ranks": (UNLIKE, replace(STATIC_SHAPES, rank_buckets=(2, 64))),
}
BY_DAY = {("usual", "float32"), ("long", "bfloat16"), ("high ranks", "bfloat16")}
"""The others are compiled at night."""
EVERY_SHAPE = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype) if (name, dtype) in BY_DAY else at_night(name, dtype)
        for name in SHAPES
        for dtype in SIDES
    ],
)


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
    fields |= {"targets": np.zeros((tokens, targets), np.int32), "blocks": 0}
    fields |= {"weights": np.zeros((tokens, targets), np.float32)}
    fields |= dict.fromkeys(("block_request", "first_visible_block"), whole[:: static_shapes.block])
    return MicroBatch(**fields)


@EVERY_SHAPE
def test_programs_of_sampling_need_no_more_extra_memory_than_planned(name: str, dtype: Any) -> None:
    config, static_shapes = SHAPES[name]
    counted = footprint(config, dtype=dtype, static_shapes=static_shapes, sample_rows=ROWS)
    sampling = Sampling.of(config, static_shapes, dtype)
    wide = sum(line.bytes for line in counted.wide_copies)
    assert sampling.takes("prefill") <= counted.prompt.bytes + counted.chunk.bytes + wide
    assert sampling.takes("decode") <= counted.drawing.bytes + wide
    assert sampling.takes("score") <= counted.scoring.bytes + wide
    assert sampling.takes("copy") <= counted.caches.bytes // 2 + wide
