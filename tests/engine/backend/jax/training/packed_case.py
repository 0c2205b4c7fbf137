"""Micro-batches of datums through a tiny decoder, against one datum alone in plain torch.

The reference has no chunk, block, checkpoint or neighbour: one datum, one adapter, float64.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from tests.engine.conftest import STATIC_SHAPES, Row
from tests.support.decoders import random_decoder
from tuneserve_engine.adapters.state import AdapterState, Tensors
from tuneserve_engine.backend.base import MicroBatch
from tuneserve_engine.backend.jax.adapters.arrays import (
    LoraWeights,
    TrainingAdapter,
    new_state,
    restored_adapter,
    target_shapes,
)
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.training.adapter_slots import (
    AdapterSlots,
    add_earlier_gradient,
    copy_gradient,
    new_adapter_slots,
    new_gradient_slots,
    write_slot,
)
from tuneserve_engine.backend.jax.training.programs import (
    DeviceMicroBatch,
    ScoredMicroBatch,
    score_micro_batch,
    space_shapes,
    train_micro_batch,
)
from tuneserve_engine.core.adapter import UNEMBED, AdapterConfig
from tuneserve_engine.core.shapes import StaticShapes

SLOTS, RANK_CLASS = 4, 4
_BLOCKS = STATIC_SHAPES.micro_batch_tokens // STATIC_SHAPES.block
REMATS = ("none", "dots", "attention", "full")
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    hidden=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate=24,
    context_length=128,
    qk_norm=True,
)

SHAPES = StaticShapes(
    128, block=8, chunk=16, requested_tokens=128, request_slots=SLOTS, rank_buckets=(RANK_CLASS,)
)


def model_of(config: ModelConfig = TINY, remat: str = "dots", dtype: Any = jnp.float32) -> Decoder:
    """A decoder in training mode, in blocks and chunks of ``STATIC_SHAPES``, with random
    weights.
    """
    model = random_decoder(config, dtype, std=0.3, norm_std=0.3)
    model.use_shapes(STATIC_SHAPES)
    model.remat = remat  # type: ignore[assignment]
    model.train()
    return model


def adapter_of(
    seed: int, config: ModelConfig = TINY, *, unembed: bool = True, poison: float = 0.0
) -> TrainingAdapter:
    """An adapter with random A and B. ``poison`` is added to every number of A."""
    rank = 2 + seed % 3
    shapes = target_shapes(config)
    lora = AdapterConfig(rank, rank + 0.25 * seed, seed, train_unembed=unembed)
    random = np.random.default_rng(seed)
    weights: Tensors = {
        name: (0.2 * random.standard_normal(x.shape) + poison * name.endswith("A")).astype("f4")
        for name, x in new_state(lora, shapes).weights.items()
    }
    return restored_adapter(AdapterState(lora, weights), shapes, RANK_CLASS)


ADAPTERS = {0: adapter_of(4), 1: adapter_of(5, unembed=False), 2: adapter_of(4)}
"""Three requests of two adapters by slot. One adapter does not train the unembedding."""


def adapter_slots_of(
    adapters: Mapping[int, TrainingAdapter], config: ModelConfig = TINY
) -> AdapterSlots:
    """Adapter slots filled with these adapters."""
    adapter_slots = new_adapter_slots(target_shapes(config), RANK_CLASS, SLOTS)
    for slot, adapter in adapters.items():
        trained = np.bool_(UNEMBED in adapter.config.targets)
        scale = adapter.scale
        adapter_slots = write_slot(adapter_slots, np.int32(slot), adapter.weights, scale, trained)
    return adapter_slots


class Ran(NamedTuple):
    """A batch's output per micro-batch, each field [N, ...], and the donated buffers after it."""

    outs: list[ScoredMicroBatch]
    space: Any
    gradient_slots: LoraWeights


def tokens_of(micro_batch: MicroBatch, slot: int) -> np.ndarray:
    """The positions of the request's tokens in the micro-batch."""
    mine = np.repeat(micro_batch.block_request == slot, SHAPES.block)
    return np.flatnonzero(mine & (micro_batch.segment_ids >= 0))


train = jax.jit(train_micro_batch, donate_argnums=(1, 2))
score = jax.jit(score_micro_batch)


def run(
    model: Decoder,
    adapters: Mapping[int, TrainingAdapter],
    *micro_batches: MicroBatch,
    stale: float = np.nan,
    after: Ran | None = None,
) -> Ran:
    """Run a batch whose request i is in slot i, in buffers full of ``stale`` or left by another
    batch.

    A request's number may be any slot, and lower ones need not be in use.
    """
    adapter_slots = adapter_slots_of(adapters, model.config)
    space, gradient_slots = (
        (after.space, after.gradient_slots)
        if after
        else buffers(model, stale, len(micro_batches[0].block_request))
    )
    outs, begun = [], set[int]()
    for micro_batch in micro_batches:
        requests = set(micro_batch.block_request[: micro_batch.blocks].tolist())
        earlier = {i: copy_gradient(gradient_slots, np.int32(i)) for i in requests & begun}
        trained = train(
            model,
            space,
            gradient_slots,
            adapter_slots,
            DeviceMicroBatch.from_host(micro_batch, model.block),
        )
        space, gradient_slots = trained.space, trained.gradient_slots
        begun |= requests
        for slot, gradient in earlier.items():
            gradient_slots = add_earlier_gradient(gradient_slots, np.int32(slot), gradient)
        outs.append(flat(trained.out))
    return Ran(outs, space, gradient_slots)


def flat(out: ScoredMicroBatch) -> ScoredMicroBatch:
    """Reshape [n, S, ...] to [N, ...], on the host."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), out)


def buffers(model: Decoder, stale: float, blocks: int = _BLOCKS) -> tuple[Any, LoraWeights]:
    """Workspace, with room for a higher rank than that of the adapters, and gradient slots."""
    full = partial(jax.tree.map, lambda x: jnp.full(x.shape, stale, x.dtype))
    targets = target_shapes(model.config)
    highest = new_adapter_slots(targets, 8 * RANK_CLASS, SLOTS)
    shapes = space_shapes(model, highest, blocks)
    return full(shapes), full(new_gradient_slots(targets, RANK_CLASS, SLOTS))


def gradient(gradient_slots: LoraWeights, slot: int, adapter: TrainingAdapter) -> Tensors:
    """One request's gradient, by the names of ``AdapterState.weights`` and without padding."""
    rank = adapter.config.rank
    found: Tensors = {}
    for name in adapter.config.targets:
        a, b = (np.asarray(side[name])[:, slot] for side in gradient_slots)
        found |= {f"{name}.A": a[..., :rank], f"{name}.B": b[:, :rank]}
        assert not a[..., rank:].any() and not b[:, rank:].any(), name
    return {name: x[0] if UNEMBED in name else x for name, x in found.items()}


def reference(
    model: Decoder, adapter: TrainingAdapter, rows: Sequence[Row]
) -> tuple[list[np.ndarray], list[np.ndarray], Tensors]:
    """Logprobs and losses of each datum, and the gradient of their sum."""
    weights = {
        "/".join(map(str, path)): torch.tensor(np.asarray(weight[...], np.float64))
        for path, weight in nnx.to_flat_state(nnx.state(model))
    }
    rank = adapter.config.rank
    ab = {}
    for name in adapter.config.targets:
        a, b = (np.asarray(side[name], np.float64) for side in adapter.weights)
        ab[f"{name}.A"] = torch.tensor(a[..., :rank], requires_grad=True)
        ab[f"{name}.B"] = torch.tensor(b[..., :rank, :], requires_grad=True)
    logprobs, losses = [], []
    for row in rows:
        lp = _logprobs(model.config, weights, ab, float(adapter.scale), row)
        loss = _loss(row, lp)
        loss.sum().backward()
        logprobs.append(lp.detach().numpy())
        losses.append(loss.detach().numpy())
    return logprobs, losses, {name: x.grad.numpy() for name, x in ab.items()}


def _loss(row: Row, lp: torch.Tensor) -> torch.Tensor:
    if row.loss == "cross_entropy":
        return -torch.tensor(row.weights, dtype=torch.float64) * lp
    assert row.loss == "importance_sampling"
    given = {name: torch.tensor(x, dtype=torch.float64) for name, x in row.inputs.items()}
    return -torch.exp(lp - given["old_logprobs"]) * given["advantages"]


def _logprobs(config: ModelConfig, weights: Any, ab: Any, scale: float, row: Row) -> torch.Tensor:
    count = len(row.tokens)
    angles = torch.arange(count)[:, None] * config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    cos, sin = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
    future = torch.ones(count, count, dtype=torch.bool).triu(1)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_eps) * weight

    def rope(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = weights["embed"][list(row.tokens)]
    for layer in range(config.layers):
        w = {name.split("/")[1]: v[layer] for name, v in weights.items() if "layers/" in name}

        def project(name: str, x: torch.Tensor, w: Any = w, layer: int = layer) -> torch.Tensor:
            delta = x @ ab[f"{name}.A"][layer] @ ab[f"{name}.B"][layer]
            return x @ w[name] + scale * delta

        normed = norm(x, w["input_norm"])
        q, k, v = (
            project(f"{name}_proj", normed).reshape(count, -1, config.head_dim) for name in "qkv"
        )
        q, k = rope(norm(q, w["q_norm"])), rope(norm(k, w["k_norm"]))
        k, v = (y.repeat_interleave(config.heads // config.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) / math.sqrt(config.head_dim)
        seen = torch.softmax(scores.masked_fill(future, -torch.inf), -1)
        x = x + project("o_proj", torch.einsum("nts,snh->tnh", seen, v).reshape(count, -1))
        normed = norm(x, w["post_attention_norm"])
        gated = torch.nn.functional.silu(project("gate_proj", normed)) * project("up_proj", normed)
        x = x + project("down_proj", gated)
    x = norm(x, weights["final_norm"])
    logits = x @ weights["unembed"].T
    if f"{UNEMBED}.A" in ab:
        logits = logits + scale * (x @ ab[f"{UNEMBED}.A"] @ ab[f"{UNEMBED}.B"])
    return torch.log_softmax(logits, -1)[torch.arange(count), list(row.targets)]
