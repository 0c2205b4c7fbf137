"""Measure the memory of the engine's compiled programs; nothing runs.

Ids are those of the acceptance figures in docs/performance.md. Controls are programs as one would
write them without a thought for memory.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_model import Shape, hf_config
from flax import nnx
from results import machine, publish, table
from side_by_side import limit_threads

from tuneserve_engine.backend.jax.adapters.arrays import LoraWeights, new_adapter, target_shapes
from tuneserve_engine.backend.jax.model.block import Layer, after_attention, before_attention
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.layer_stack import PackedTokens
from tuneserve_engine.backend.jax.model.layers import rms_norm
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.training import adapter_slots as slot_programs
from tuneserve_engine.backend.jax.training.adamw import adamw_step, step_scalars
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners
from tuneserve_engine.backend.jax.training.lm_head import HeadAdapters, LmHead, train_lm_head
from tuneserve_engine.backend.jax.training.losses import LossInputs
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    space_shapes,
    train_micro_batch,
)
from tuneserve_engine.core.adapter import UNEMBED, AdamwParams, AdapterConfig

BLOCK, CHUNK_BLOCKS, BLOCKS, SLOTS, RANK = 64, 4, 32, 32, 8
TOKENS = BLOCK * BLOCKS
INPUT_BYTES = TOKENS * Shape().hidden * 4
LAYERS = (8, 32)


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures of a program."""

    temp: int
    alias: int
    compile_cpu_s: float


def compiled(lower: Callable[[], jax.stages.Lowered]) -> Compiled:
    started_s = time.process_time()
    memory = lower().compile().memory_analysis()
    seconds = time.process_time() - started_s
    return Compiled(memory.temp_size_in_bytes, memory.alias_size_in_bytes, seconds)


def nbytes(tree: Any) -> int:
    """Return the bytes of arrays, or of shapes of arrays."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- the programs ---------------------------------------------------------------------------------


def config_of(layers: int) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(Shape(layers=layers)))


def decoder(layers: int) -> Decoder:
    """Return a decoder that consists of shapes only."""
    config = config_of(layers)
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32))


def shapes_of(layers: int) -> tuple[slot_programs.AdapterSlots, LoraWeights]:
    """Return the shapes of adapter slots and gradient slots."""
    shapes = target_shapes(config_of(layers))
    return jax.eval_shape(
        lambda: (
            slot_programs.new_adapter_slots(shapes, RANK, SLOTS),
            slot_programs.new_gradient_slots(shapes, RANK, SLOTS),
        )
    )


def micro_batch() -> DeviceMicroBatch:
    """Return the shapes of a micro-batch of ``TOKENS`` tokens."""
    per_token = {
        name: spec(BLOCKS, BLOCK, dtype=dtype)
        for name, dtype in (
            ("valid", jnp.bool_),
            ("segment_ids", jnp.int32),
            ("loss_id", jnp.int32),
        )
    }
    inputs = {name: per_token.get(name, spec(BLOCKS, BLOCK)) for name in LossInputs._fields}
    inputs["weights"] = spec(BLOCKS, BLOCK, 1)
    blocks = spec(BLOCKS, dtype=jnp.int32)
    tokens = spec(BLOCKS, BLOCK, dtype=jnp.int32)
    flags = spec(BLOCKS, dtype=jnp.bool_)
    return DeviceMicroBatch(
        tokens=tokens,
        targets=spec(BLOCKS, BLOCK, 1, dtype=jnp.int32),
        inputs=LossInputs(**inputs),
        layers=PackedTokens(tokens, tokens, blocks, spec(dtype=jnp.int32), blocks),
        owners=BlockOwners(blocks, flags, flags),
    )


@dataclass(frozen=True)
class Training:
    """The training program at a number of layers, and its workspace."""

    program: Compiled
    workspace: int


@cache
def training(layers: int, remat: str) -> Training:
    model = decoder(layers)
    model.remat, model.block, model.chunk_blocks = remat, BLOCK, CHUNK_BLOCKS
    model.train()
    adapter_slots, gradient_slots = shapes_of(layers)
    graph, state = nnx.split(model)
    spaces: list[Any] = []

    def run(state: Any, *args: Any) -> Any:
        return train_micro_batch(nnx.merge(graph, state), *args)

    jax.eval_shape(
        lambda state: spaces.append(space_shapes(nnx.merge(graph, state), adapter_slots, BLOCKS)),
        state,
    )
    space = spaces[0]
    jitted = jax.jit(run, donate_argnums=(1, 2))
    program = compiled(
        lambda: jitted.lower(state, space, gradient_slots, adapter_slots, micro_batch())
    )
    return Training(program, nbytes(space))


def per_layer(remat: str) -> float:
    """Return the bytes per layer that the training program needs, over those of a layer's input.

    Weights, adapter slots and gradient slots do not count.
    """
    low, high = (training(layers, remat) for layers in LAYERS)
    grown = high.program.temp + high.workspace - low.program.temp - low.workspace
    return grown / (LAYERS[1] - LAYERS[0]) / INPUT_BYTES


@cache
def ordinary(layers: int) -> Compiled:
    """Compile the control: ``jax.grad`` over a scan with checkpoints, added to accumulators.

    Attention stays within blocks.
    """
    config = config_of(layers)
    weights = {name: spec(*x.shape) for name, x in decoder(layers).layers.items()}
    adapter_slots, gradient_slots = shapes_of(layers)
    adapters = LoraRows(adapter_slots.a, adapter_slots.b, adapter_slots.scale).layers()
    rope = (spec(BLOCKS, BLOCK, 1, config.head_dim // 2),) * 2

    def loss(adapters: Any, weights: Any, x: Any, rows: tuple[Any, Any], rope: Any) -> Any:
        def body(x: Any, sliced: Any) -> Any:
            weights, (a, b) = sliced
            layer = Layer(weights, LoraRows(a, b, *rows))
            q, k, v = before_attention(config, layer, x, rope)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            return after_attention(config, layer, x, attended.reshape(*x.shape[:2], -1)), None

        x, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, (weights, adapters))
        return x.sum()

    @partial(jax.jit, donate_argnums=0)
    def run(sums: Any, adapters: Any, *args: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(adapters, *args))

    sums = LoraRows(gradient_slots.a, gradient_slots.b, adapter_slots.scale).layers()
    x, slot = spec(BLOCKS, BLOCK, config.hidden), spec(BLOCKS, dtype=jnp.int32)
    return compiled(
        lambda: run.lower(sums, adapters, weights, x, (adapter_slots.scale, slot), rope)
    )


def head() -> float:
    """Return the temporary bytes of the head in eight chunks, over those with all logits."""
    batch, config = micro_batch(), config_of(1)
    adapter_slots, gradient_slots = shapes_of(1)
    x = spec(BLOCKS, BLOCK, config.hidden)
    table = LmHead(spec(config.vocab_size, config.hidden), spec(config.hidden))

    @partial(jax.jit, donate_argnums=3)
    def chunked(
        table: LmHead,
        x: Any,
        adapter_slots: slot_programs.AdapterSlots,
        gradient_slots: Any,
        batch: DeviceMicroBatch,
    ) -> Any:
        adapters = HeadAdapters(
            adapter_slots.a[UNEMBED][0],
            adapter_slots.b[UNEMBED][0],
            adapter_slots.scale,
            adapter_slots.trained,
        )
        asked = (table, x, batch.targets, batch.inputs, adapters, batch.owners, batch.layers.blocks)
        return train_lm_head(*asked, gradient_slots, eps=config.rms_eps, chunk_blocks=CHUNK_BLOCKS)

    @jax.jit
    def full(table: LmHead, x: Any, targets: Any) -> Any:
        def loss(x: Any) -> Any:
            logits = rms_norm(x, table.norm, eps=config.rms_eps) @ table.unembedding.T
            return jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=2).sum()

        return jax.value_and_grad(loss)(x)

    mine = {"a": gradient_slots.a[UNEMBED], "b": gradient_slots.b[UNEMBED]}
    ours = compiled(lambda: chunked.lower(table, x, adapter_slots, mine, batch))
    return ours.temp / compiled(lambda: full.lower(table, x, batch.targets)).temp


# --- the figures ----------------------------------------------------------------------------------


def at_most(name: str, what: str, seen: float, limit: float) -> dict[str, Any]:
    return {"id": name, "what": what, "seen": seen, "limit": f"<= {limit}", "kept": seen <= limit}


def exactly(name: str, what: str, seen: float, expected: float) -> dict[str, Any]:
    return {"id": name, "what": what, "seen": seen, "limit": expected, "kept": seen == expected}


def adapters() -> list[dict[str, Any]]:
    """Return the rows about one adapter's state and the two programs that change it."""
    shapes = target_shapes(config_of(8))
    adapter = new_adapter(AdapterConfig(rank=RANK, alpha=32, seed=0), shapes, RANK)
    weights = nbytes(adapter.weights)
    _, gradient_slots = shapes_of(8)
    slot, flag = spec(dtype=jnp.int32), spec(dtype=jnp.bool_)
    given = (adapter.accumulator, gradient_slots, slot, flag, flag)
    add = compiled(lambda: slot_programs.accumulate_slot.lower(*given))
    moments = (adapter.first_moment, adapter.second_moment)
    state = (adapter.weights, *moments, adapter.accumulator)
    step = compiled(lambda: adamw_step.lower(*state, step_scalars(AdamwParams(), 1)))
    return [
        exactly("", "adapter's state / its weights", nbytes(state) / weights, 4),
        exactly("S3", "add: reused / accumulator", add.alias / weights, 1),
        at_most("S3", "add: temporary bytes", add.temp, 1024),
        exactly("S4", "optimizer step: reused / state", step.alias / nbytes(state), 1),
        at_most("S4", "optimizer step: temporary / adapter", step.temp / weights, 4),
    ]


def layers() -> list[dict[str, Any]]:
    """Return the rows about the memory that training needs for each further layer."""
    slopes = {remat: per_layer(remat) for remat in ("full", "attention", "dots", "none")}
    low, high = (ordinary(count).temp for count in LAYERS)
    control = (high - low) / (LAYERS[1] - LAYERS[0]) / INPUT_BYTES / slopes["full"]
    few, many = (training(count, "dots").program for count in (4, 32))
    model = decoder(32)
    stacked = nbytes(nnx.state(model.layers))
    per = "bytes per layer / a layer's input"
    return [
        at_most("W1, C2", f"remat full: {per}", slopes["full"], 1.1),
        at_most("C2", f"remat attention: {per}", slopes["attention"], 2.1),
        {**at_most("", f"remat dots: {per}", slopes["dots"], 0), "limit": "", "kept": True},
        {**at_most("", f"remat none: {per}", slopes["none"], 0), "limit": "", "kept": True},
        {
            **at_most("W2", "jax.grad and add (control) / remat full", control, 0),
            "limit": ">= 3",
            "kept": control >= 3,
        },
        at_most("C3", "32 layers: temporary / weights of the layers", many.temp / stacked, 0.5),
        at_most("C4", "time to compile: 32 layers / 4", many.compile_cpu_s / few.compile_cpu_s, 2),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="print only; leave results.md alone")
    arguments = parser.parse_args()
    threads = limit_threads(None)
    rows = [*adapters(), *layers(), at_most("H2", "head in 8 chunks / all logits", head(), 0.2)]
    about = (
        f"`benchmarks/memory.py`: bench model, {TOKENS:,} tokens, {SLOTS} requests of rank {RANK}; "
        f"{machine('jax', threads=threads)}."
    )
    section = table(
        "Memory of compiled programs", about, list(rows[0]), [list(r.values()) for r in rows]
    )
    publish({"memory": rows}, section, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
