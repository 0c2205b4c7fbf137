"""Training programs: the slots of a micro-batch, and the memory that a compiled program takes.

It takes one layer input per layer, and no stack of all layers' gradients.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array

from tests.engine.backend.jax.training.packed_case import TINY
from tests.engine.conftest import empty
from tests.support.adapters import nbytes
from tests.support.compiled import memory_of
from tests.support.decoders import zero_decoder
from tests.support.nightly import at_night
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, target_shapes
from tuneserve_engine.backend.jax.model.block import Layer, after_attention, before_attention
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.training.adapter_slots import (
    AdapterSlots,
    new_adapter_slots,
    new_gradient_slots,
)
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    space_shapes,
    train_micro_batch,
)
from tuneserve_engine.core.adapter import PROJECTIONS

SLOTS, RANK = 8, 16
TOKENS, BLOCK, CHUNK_BLOCKS = 512, 8, 2
CONFIG = replace(TINY, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48)
WIDE = replace(CONFIG, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=1536)
"""As wide as a small model that users train."""
FEW, MANY = 4, 12


def with_attention(config: ModelConfig) -> float:
    """The memory of a layer under ``attention``, in layer inputs.

    It stores its input, the attention output of equal size, and the log sum of exponentials in
    float32, one per head.
    """
    return 2 + config.heads / config.hidden


class Takes(NamedTuple):
    """Bytes of a program."""

    workspace: int
    temporary: int
    live: int  # at once, beyond weights and slots
    weights: int  # of the layers


class Case(NamedTuple):
    """A model and the arguments of one micro-batch."""

    model: Decoder
    adapter_slots: AdapterSlots
    gradient_slots: LoraWeights
    micro_batch: DeviceMicroBatch


def case_of(layers: int, remat: str, config: ModelConfig = CONFIG) -> Case:
    model = zero_decoder(replace(config, layers=layers))
    model.block, model.chunk_blocks = BLOCK, CHUNK_BLOCKS
    model.remat = remat  # type: ignore[assignment]
    model.train()
    shapes = target_shapes(model.config)
    micro_batch = DeviceMicroBatch.from_host(MicroBatch(**empty(TOKENS, BLOCK), blocks=0), BLOCK)
    return Case(
        model,
        new_adapter_slots(shapes, RANK, SLOTS),
        new_gradient_slots(shapes, RANK, SLOTS),
        micro_batch,
    )


def takes(lowered: jax.stages.Lowered, case: Case, workspace: int) -> Takes:
    memory = memory_of(lowered)
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes
    live += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    weights = nbytes(nnx.state(case.model.layers))
    live -= weights + nbytes((case.adapter_slots, case.gradient_slots))
    return Takes(workspace, memory.temp_size_in_bytes, live, weights)


@cache
def training(layers: int, remat: str, config: ModelConfig = CONFIG) -> Takes:
    """The training program, with workspace and gradient slots donated."""
    case = case_of(layers, remat, config)
    space = space_shapes(case.model, case.adapter_slots, TOKENS // BLOCK)
    program = jax.jit(train_micro_batch, donate_argnums=(1, 2))
    lowered = program.lower(
        case.model, space, case.gradient_slots, case.adapter_slots, case.micro_batch
    )
    workspace = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(space))
    return takes(lowered, case, workspace)


@cache
def autodiff(layers: int) -> Takes:
    """``jax.grad`` over a scan of checkpointed layers, whose gradients are added to donated slots.

    Blocks attend to themselves only, which minimises what a layer stores.
    """
    case = case_of(layers, "full")
    config = case.model.config

    def added(
        model: Decoder,
        gradient_slots: LoraWeights,
        adapter_slots: AdapterSlots,
        x: Array,
        slot: Array,
    ) -> Any:
        rope = model.stack().rope(jnp.broadcast_to(jnp.arange(BLOCK)[None], x.shape[:2]))

        @jax.checkpoint
        def layer(x: Array, sliced: Any) -> Any:
            weights, a, b = sliced
            parts = Layer(weights, LoraRows(a, b, adapter_slots.scale, slot))
            q, k, v = before_attention(config, parts, x, rope)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            attended = attended.reshape(*x.shape[:2], -1)
            return after_attention(config, parts, x, attended), None

        def loss(adapters: LoraWeights) -> Array:
            y, _ = jax.lax.scan(layer, x, (model.stack().weights, *adapters))
            return jnp.square(y).sum()

        return jax.tree.map(
            jnp.add, gradient_slots, jax.grad(loss)(LoraWeights(adapter_slots.a, adapter_slots.b))
        )

    def of_layers(side: dict[str, Array]) -> dict[str, Array]:
        return {name: side[name] for name in PROJECTIONS}

    case = case._replace(
        adapter_slots=case.adapter_slots._replace(
            a=of_layers(case.adapter_slots.a), b=of_layers(case.adapter_slots.b)
        ),
        gradient_slots=LoraWeights(*map(of_layers, case.gradient_slots)),
    )
    x = jnp.zeros((TOKENS // BLOCK, BLOCK, CONFIG.hidden))
    slot = jnp.zeros(TOKENS // BLOCK, jnp.int32)
    program = jax.jit(added, donate_argnums=1)
    lowered = program.lower(case.model, case.gradient_slots, case.adapter_slots, x, slot)
    return takes(lowered, case, 0)


def per_layer(few: Takes, many: Takes, config: ModelConfig = CONFIG) -> dict[str, float]:
    """The memory that an additional layer takes, in layer inputs."""
    layer_inputs = (MANY - FEW) * 4 * TOKENS * config.hidden
    return {
        name: (getattr(many, name) - getattr(few, name)) / layer_inputs
        for name in ("workspace", "temporary", "live")
    }


@pytest.mark.parametrize(
    ("remat", "kept"), [at_night("full", 1), ("attention", with_attention(CONFIG))]
)
def test_an_additional_layer_takes_what_its_policy_stores(remat: str, kept: float) -> None:
    slope = per_layer(training(FEW, remat), training(MANY, remat))
    assert slope["workspace"] == pytest.approx(kept)
    assert slope["workspace"] + slope["temporary"] <= kept + 0.1, slope
    assert slope["live"] <= kept + 0.1, slope


@pytest.mark.acceptance("W1", "C2")
@pytest.mark.parametrize(("remat", "most"), [("full", 1.1), at_night("attention", 2.1)])
def test_an_additional_wide_layer_takes_one_layer_input_or_two(remat: str, most: float) -> None:
    slope = per_layer(training(FEW, remat, WIDE), training(MANY, remat, WIDE), WIDE)
    assert slope["workspace"] == {"full": 1, "attention": with_attention(WIDE)}[remat]
    assert slope["workspace"] + slope["temporary"] <= most, slope
    assert slope["live"] <= most, slope


@pytest.mark.nightly
@pytest.mark.acceptance("W2")
def test_autodiff_over_the_layers_would_take_three_times_as_much() -> None:
    ours = per_layer(training(FEW, "full"), training(MANY, "full"))
    slope = per_layer(autodiff(FEW), autodiff(MANY))
    assert slope["temporary"] >= 3 * (ours["workspace"] + ours["temporary"]), (slope, ours)


@pytest.mark.acceptance("C3")
def test_no_array_of_all_layers_is_copied() -> None:
    """Weights, adapter slots and tape are read in place: a stack of them among the temporaries
    would be as large as itself.
    """
    deep = training(32, "full")
    assert deep.temporary < 0.5 * deep.weights, deep


@pytest.mark.nightly
def test_code_that_is_compiled_quickly_needs_the_same_memory() -> None:
    """``memory_of`` therefore tells the memory of the programs that run."""
    case = case_of(FEW, "dots")
    space = space_shapes(case.model, case.adapter_slots, TOKENS // BLOCK)
    lowered = jax.jit(train_micro_batch, donate_argnums=(1, 2)).lower(
        case.model, space, case.gradient_slots, case.adapter_slots, case.micro_batch
    )
    quick, usual = memory_of(lowered), lowered.compile().memory_analysis()
    for name in ("argument", "output", "temp", "alias"):
        field = f"{name}_size_in_bytes"
        assert getattr(quick, field) == getattr(usual, field) > 0


@pytest.mark.acceptance("C4")
def test_the_program_of_a_deep_model_has_as_many_operations_as_a_shallow_one() -> None:
    """It therefore compiles as fast: ``benchmarks/memory.py`` measures the time."""

    def operations(layers: int) -> Counter[str]:
        case = case_of(layers, "dots")
        space = space_shapes(case.model, case.adapter_slots, TOKENS // BLOCK)
        program = jax.jit(train_micro_batch, donate_argnums=(1, 2))
        lowered = program.lower(
            case.model, space, case.gradient_slots, case.adapter_slots, case.micro_batch
        )
        return Counter(re.findall(r"stablehlo\.\w+", lowered.as_text()))

    flat = operations(4)
    assert flat["stablehlo.dot_general"] > 10
    assert operations(32) == flat


def test_requests_are_in_the_slots_from_the_first_on_and_unused_blocks_in_none() -> None:
    arrays = empty(TOKENS, BLOCK)
    arrays["block_request"][:3] = 0, 2, -1
    micro_batch = MicroBatch(**arrays, blocks=2)
    for first, slots in ((0, [0, 2, 0]), (3, [3, 5, 0])):
        sent = DeviceMicroBatch.from_host(micro_batch, BLOCK, first_slot=first)
        assert sent.owners.slot[:3].tolist() == sent.layers.slot[:3].tolist() == slots
        assert sent.owners.is_used[:3].tolist() == [True, True, False]
        assert sent.owners.is_first[:3].tolist() == [True, True, False]
