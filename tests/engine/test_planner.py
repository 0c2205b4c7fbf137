"""What the planner counts is what the arrays take, and what it chooses is the best that fits."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tuneserve_engine.adapters import AdapterConfig
from tuneserve_engine.backend.base import TrainBatch
from tuneserve_engine.backend.jax.adapters import new_adapter, target_shapes
from tuneserve_engine.backend.jax.bank import Bank, new_bank, new_scratch
from tuneserve_engine.backend.jax.device_memory import machine_bytes
from tuneserve_engine.backend.jax.head import head_chunk_blocks
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.decoder import Decoder
from tuneserve_engine.backend.jax.tape import Workspace
from tuneserve_engine.backend.jax.train import StreamIn, score_stream, space_shapes, train_stream
from tuneserve_engine.config import WorkerSettings
from tuneserve_engine.footprint import Footprint, Shape
from tuneserve_engine.lattice import ShapeLattice
from tuneserve_engine.planner import Device, DoesNotFit, Plan, plan

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
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LATTICE = ShapeLattice(48, block=8, chunk=16, tokens=64, request_slots=6, rank_classes=(2, 4))
RANK = LATTICE.max_rank
BLOCKS = LATTICE.stream // LATTICE.block


def footprint(config: ModelConfig, **changes: Any) -> Footprint:
    shape = Shape(LATTICE, "dots", 8, "float32", "cpu")
    return Footprint(config, replace(shape, **changes))


def size(arrays: Any) -> int:
    """Bytes of arrays, or of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def decoder(config: ModelConfig, dtype: Any, remat: Any = "dots") -> Decoder:
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    )
    model = nnx.merge(graph, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    model.block, model.chunk_blocks = LATTICE.block, LATTICE.chunk // LATTICE.block
    model.remat = remat
    return model


def bank(config: ModelConfig, rank: int = RANK) -> Bank:
    return new_bank(target_shapes(config), rank, LATTICE.slots(rank))


def workspace(config: ModelConfig, dtype: Any, remat: Any) -> Workspace:
    """Shapes of what training holds."""
    shapes: Workspace = space_shapes(decoder(config, dtype, remat), bank(config), BLOCKS)
    return shapes


# --- bytes ---------------------------------------------------------------------------------------


@MODELS
@DTYPES
def test_the_base_weights_are_those_of_the_decoder(config: ModelConfig, dtype: Any) -> None:
    real = nnx.state(decoder(config, dtype), nnx.Param)
    assert footprint(config, dtype=dtype).base.bytes == size(real)


@MODELS
def test_bank_and_scratch_have_a_slot_for_every_request_of_a_unit(config: ModelConfig) -> None:
    for rank in LATTICE.rank_classes:
        held = bank(config, rank)
        scratch = new_scratch(target_shapes(config), rank, LATTICE.slots(rank))
        assert footprint(config).bank(rank).bytes == size((held.a, held.b)) + size(scratch)


@MODELS
def test_an_adapter_has_four_copies(config: ModelConfig) -> None:
    counted = footprint(config)
    for rank in LATTICE.rank_classes:
        adapter = new_adapter(AdapterConfig(1, 1.0, 0), target_shapes(config), rank)
        copies = (adapter.weights, adapter.first_moment, adapter.second_moment, adapter.accumulator)
        assert [size(copy) for copy in copies] == [counted.adapter_bytes(rank)] * 4
    unit = max(LATTICE.slots(rank) * counted.adapter_bytes(rank) for rank in LATTICE.rank_classes)
    assert counted.unit_adapter_bytes == 4 * unit


@MODELS
@DTYPES
@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_training_takes_what_its_workspace_does(
    config: ModelConfig, remat: Any, dtype: Any
) -> None:
    counted = footprint(config, remat=remat, dtype=dtype)
    real = workspace(config, dtype, remat)
    assert counted.tape.bytes == size(real.tape)
    assert counted.layer_gradients.bytes == size((real.dx, real.dattended, real.dqkv))


@MODELS
@DTYPES
def test_training_that_computes_nothing_again_is_not_underestimated(
    config: ModelConfig, dtype: Any
) -> None:
    counted = footprint(config, remat="none", dtype=dtype).tape.bytes
    real = size(workspace(config, dtype, "none").tape)
    assert real <= counted <= 1.25 * real


@pytest.mark.parametrize("vocab_size", [61, 8192, 151_936, 1_000_000])
def test_the_head_takes_the_chunk_that_the_planner_counts(vocab_size: int) -> None:
    lattice = replace(LATTICE, block=64, chunk=1024)
    counted = footprint(replace(QWEN3, vocab_size=vocab_size), lattice=lattice)
    blocks = head_chunk_blocks(64, 1024, vocab_size)
    assert counted.head_chunk_tokens == 64 * blocks
    assert counted.logits.bytes == 2 * 64 * blocks * vocab_size * 4


def test_sampling_has_a_cache_and_an_adapter_for_every_row() -> None:
    counted = footprint(QWEN3, sample_rows=5)
    assert counted.caches.bytes == 5 * 2 * 3 * 2 * 6 * 48 * 4  # k and v, layers, heads, H, capacity
    assert counted.lanes.bytes == 5 * counted.adapter_bytes(4)


@DTYPES
def test_programs_of_training_need_no_more_besides_than_is_planned(dtype: Any) -> None:
    config = replace(QWEN3, hidden=64, intermediate=160, head_dim=16, vocab_size=400)
    counted = footprint(config, dtype=dtype)
    planned = counted.stream.bytes + counted.chunk.bytes + counted.logits.bytes
    wide = sum(line.bytes for line in counted.wide_copies)
    trained, scored = temporaries(config, dtype)
    assert trained <= planned + wide
    assert scored <= planned + wide


def temporaries(config: ModelConfig, dtype: Any) -> tuple[int, int]:
    """Bytes that the programs of a gradient and of scores need while they run."""
    model, held = decoder(config, dtype), bank(config)
    space = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), workspace(config, dtype, "dots"))
    scratch = new_scratch(target_shapes(config), RANK, LATTICE.slots(RANK))
    stream = StreamIn.of(nobodys(LATTICE.stream), LATTICE.block)
    model.train()
    graph, weights = nnx.split(model)

    def train(weights: Any, *args: Any) -> Any:
        return train_stream(nnx.merge(graph, weights), *args)

    training = jax.jit(train, donate_argnums=(1, 2)).lower(weights, space, scratch, held, stream)
    model.eval()
    scoring_graph, _ = nnx.split(model)

    def score(weights: Any, *args: Any) -> Any:
        return score_stream(nnx.merge(scoring_graph, weights), *args)

    scoring = jax.jit(score).lower(weights, held, stream)
    trained, scored = (
        each.compile().memory_analysis().temp_size_in_bytes for each in (training, scoring)
    )
    return trained, scored


def nobodys(tokens: int) -> TrainBatch:
    """A micro-batch of padding."""
    whole, real = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    fields: dict[str, Any] = dict.fromkeys(TrainBatch._fields, real)
    fields |= dict.fromkeys(("tokens", "positions", "datum", "loss_id"), whole)
    fields |= {"targets": whole[:, None], "weights": real[:, None], "blocks": 0}
    fields |= dict.fromkeys(("block_request", "block_start"), whole[:: LATTICE.block])
    return TrainBatch(**fields)


# --- choices -------------------------------------------------------------------------------------

MODEL = replace(
    QWEN3, vocab_size=8192, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64,
    intermediate=1536, context_length=2048,
)  # fmt: skip
GIB = 2**30
LARGE = Device("cpu", 64 * GIB, 16 * GIB)


def planned(memory: int = 64 * GIB, config: ModelConfig = MODEL, **settings: Any) -> Plan:
    return plan(config, LARGE, WorkerSettings(device_memory_bytes=memory, **settings))


@cache
def downwards(**settings: Any) -> list[Plan]:
    """Plans for less and less memory, until there is none."""
    plans: list[Plan] = []
    memory = 8 * GIB
    while True:
        try:
            plans.append(planned(memory, **settings))
        except DoesNotFit:
            return plans
        memory = memory * 24 // 25


def test_with_enough_memory_everything_has_its_default() -> None:
    found = planned()
    assert (found.remat, found.sample_rows) == ("dots", 8)
    assert found.lattice == ShapeLattice(2048)
    assert found.adapter_host_bytes == 16 * GIB


def test_an_accelerator_has_longer_chunks_and_streams() -> None:
    found = plan(MODEL, Device("gpu", 64 * GIB, GIB), WorkerSettings())
    assert (found.lattice.chunk, found.lattice.stream) == (1024, 8192)


def test_the_lines_are_all_of_the_memory() -> None:
    for found in (*downwards(), planned(adapter_device_bytes=GIB)):
        assert sum(line.bytes for line in found.lines) == found.device_bytes
        assert all(line.bytes > 0 and line.how for line in found.lines)
        (adapters,) = (line.bytes for line in found.lines if line.name == "adapters")
        assert adapters == found.adapter_device_bytes


def test_memory_that_lacks_costs_first_what_is_kept_then_slots_then_ranks() -> None:
    chosen = [
        (found.lattice.rank_classes, found.lattice.request_slots, found.remat)
        for found in downwards()
    ]
    ranks = [len(classes) for classes, _, _ in chosen]
    assert ranks == sorted(ranks, reverse=True) and set(ranks) == {3, 2, 1}
    slowness = ["dots", "attention", "full"]
    for some in set(ranks):
        slots = [count for classes, count, _ in chosen if len(classes) == some]
        assert slots == sorted(slots, reverse=True)
        for count in set(slots):
            kept = [slowness.index(r) for c, n, r in chosen if (len(c), n) == (some, count)]
            assert kept == sorted(kept)
    assert {remat for _, _, remat in chosen} == set(slowness)
    assert chosen[-1] == ((8,), 1, "full")


def test_every_plan_has_room_for_the_adapters_of_a_unit() -> None:
    for found in downwards():
        lattice = found.lattice
        shape = Shape(lattice, found.remat, 8, "float32", "cpu")
        assert found.adapter_device_bytes >= Footprint(MODEL, shape).unit_adapter_bytes


def test_a_stream_is_shortened_only_to_what_a_sequence_and_a_piece_need() -> None:
    for context, least in ((300, 1024), (2048, 2048)):
        lengths = {found.lattice.stream for found in downwards(max_context_tokens=context)}
        assert max(lengths) == 4096 and min(lengths) == least


@pytest.mark.parametrize(
    "asked",
    [
        {"remat": "none"},
        {"remat": "attention"},
        {"remat": "full"},
        {"batch_tokens": 16_384},
        {"chunk_tokens": 128},
        {"request_slots": 16},
        {"adapter_device_bytes": GIB, "adapter_host_bytes": 0},
        {"max_context_tokens": 128},
    ],
)
def test_what_was_asked_for_is_kept(asked: dict[str, Any]) -> None:
    found = planned(**asked)
    kept = {
        "remat": found.remat,
        "batch_tokens": found.lattice.stream,
        "chunk_tokens": found.lattice.chunk,
        "request_slots": found.lattice.request_slots,
        "adapter_device_bytes": found.adapter_device_bytes,
        "adapter_host_bytes": found.adapter_host_bytes,
        "max_context_tokens": found.lattice.context_length,
    }
    assert {name: kept[name] for name in asked} == asked


def test_more_requests_than_a_unit_ever_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"request_slots\s+.*less than or equal to 32"):
        WorkerSettings(request_slots=33)


@pytest.mark.parametrize(
    ("max_rank", "classes"),
    [
        (4, (4,)),
        (8, (8,)),
        (16, (8, 16)),
        (32, (8, 32)),
        (64, (8, 32, 64)),
        (256, (8, 32, 128, 256)),
    ],
)
def test_the_highest_rank_ends_the_classes(max_rank: int, classes: tuple[int, ...]) -> None:
    assert planned(max_rank=max_rank).lattice.rank_classes == classes


def test_a_rank_that_was_asked_for_is_not_dropped() -> None:
    assert {found.lattice.max_rank for found in downwards(max_rank=128)} == {128}


def test_a_context_longer_than_the_models_is_the_models() -> None:
    assert planned(max_context_tokens=10**6).lattice.context_length == 2048


def test_a_model_that_has_no_room_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFit) as refused:
        planned(GIB // 8)
    said = str(refused.value)
    assert "of the cpu's memory at least, and there are 128.00 MiB to use" in said
    assert "base weights: 112.04 MiB" in said  # 29,369,856 parameters
    for setting in ("max_context_tokens (4096)", "sample_rows (8)", "device_memory_bytes"):
        assert setting in said


def test_too_little_for_the_adapters_of_a_unit_is_refused_with_what_they_take() -> None:
    with pytest.raises(DoesNotFit, match="adapter_device_bytes is 1000; the adapters of one unit"):
        planned(adapter_device_bytes=1000)


# --- devices -------------------------------------------------------------------------------------


def test_a_cpu_shares_its_memory_with_the_machine() -> None:
    device = Device.cpu(8 * GIB)
    assert (device.kind, device.memory_bytes, device.host_bytes) == ("cpu", 4 * GIB, 2 * GIB)


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path) -> None:
    unlimited, limited = tmp_path / "max", tmp_path / "limited"
    unlimited.write_text("max\n")
    limited.write_text(f"{2**20}\n")
    everything = machine_bytes((tmp_path / "missing", unlimited))
    assert everything > 2**20
    assert machine_bytes((unlimited, limited)) == 2**20


def test_planning_loads_no_jax() -> None:
    code = "import sys, tuneserve_engine.planner as p; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
