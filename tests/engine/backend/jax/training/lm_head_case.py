"""Micro-batches for the chunked head, with NaN in everything that it must not read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tuneserve_engine.backend.base import LOSS_NAMES
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners
from tuneserve_engine.backend.jax.training.lm_head import (
    HeadAdapters,
    HeadScored,
    HeadTrained,
    LmHead,
    score_lm_head,
    train_lm_head,
)
from tuneserve_engine.backend.jax.training.losses import LossInputs

EPS = 1e-6
J, R = 4, 3


@dataclass(frozen=True)
class Sizes:
    block: int = 8  # S
    hidden: int = 16  # D
    vocabulary: int = 61  # V
    targets: int = 1  # K


SMALL = Sizes()
REAL = Sizes(block=64, hidden=64, vocabulary=512)
"""Sizes with a block as long as the engine's, to compare bits."""


@dataclass(frozen=True)
class Request:
    """Datums of one adapter. Equal requests have equal numbers. Slots 0 and 2 train the head."""

    seed: int
    slot: int
    lengths: tuple[int, ...]
    loss: str = "cross_entropy"
    poison: float = 0.0  # added to the hidden states

    def blocks(self, sizes: Sizes) -> int:
        return -(-sum(self.lengths) // sizes.block)


class Micro(NamedTuple):
    """The arguments of the head that depend on a micro-batch."""

    x: np.ndarray
    targets: np.ndarray
    inputs: LossInputs
    blocks: BlockOwners
    used: np.ndarray


MIXED = (
    Request(1, 0, (3, 18, 9), "ppo"),
    Request(2, 1, (20,)),
    Request(3, 2, (11, 2, 30), "gspo"),
    Request(4, 3, (7, 7), "cispo"),
)
"""15 blocks of 8, with trained and frozen heads, and a datum over five blocks."""


def head_of(sizes: Sizes) -> LmHead:
    random = np.random.default_rng(10)
    table = 0.5 * random.standard_normal((sizes.vocabulary, sizes.hidden))
    return LmHead(*(jnp.asarray(x, jnp.float32) for x in (table, 1 + 0.1 * table[0])))


def adapters_of(sizes: Sizes) -> HeadAdapters:
    random = np.random.default_rng(11)
    a = 0.5 * random.standard_normal((J, sizes.hidden, R)).astype(np.float32)
    b = 0.5 * random.standard_normal((J, R, sizes.vocabulary)).astype(np.float32)
    trained = np.arange(J) % 2 == 0
    for unread in (a, b):
        unread[~trained] = np.nan
    scale = np.float32([0.5, 1.0, 2.0, 4.0])
    return HeadAdapters(*(jnp.asarray(x) for x in (a, b, scale, trained)))


def stale_gradient_slots(sizes: Sizes, value: float = np.nan) -> dict[str, Array]:
    shapes = {"a": (1, J, sizes.hidden, R), "b": (1, J, R, sizes.vocabulary)}
    return {name: jnp.full(shape, value, jnp.float32) for name, shape in shapes.items()}


def micro_of(
    requests: Sequence[Request], sizes: Sizes, *, n: int, at: Sequence[int] | None = None
) -> Micro:
    """The requests one after the other, or each starting at the block in ``at``.

    Padding holds NaN. So do the blocks after the used ones, which also claim to be valid and to be
    the first of a request.
    """
    places = at or np.cumsum([0, *(r.blocks(sizes) for r in requests)])[:-1].tolist()
    tokens = n * sizes.block
    arrays = {
        name: np.full((tokens, *shape), np.nan, np.float32)
        for name, shape in {
            "x": (sizes.hidden,), "weights": (sizes.targets,), "old_logprobs": (),
            "advantages": (), "clip_low": (), "clip_high": (), "sequence_mask": (), "beta": (),
        }.items()
    }  # fmt: skip
    arrays["targets"] = np.full((tokens, sizes.targets), 2, np.int32)
    arrays["loss_id"] = np.zeros(tokens, np.int32)
    arrays["segment_ids"] = np.full(tokens, -1, np.int32)
    used = max(place + r.blocks(sizes) for place, r in zip(places, requests, strict=True))
    arrays["segment_ids"][used * sizes.block :] = 0
    slots = BlockOwners(np.full(n, J - 1, np.int32), np.arange(n) >= used, np.arange(n) >= used)
    for number, (place, request) in enumerate(zip(places, requests, strict=True)):
        start, count = place * sizes.block, sum(request.lengths)
        for name, values in numbers_of(request, sizes).items():
            arrays[name][start : start + count] = values
        ids = 10 * number + np.repeat(np.arange(len(request.lengths)), request.lengths)
        arrays["segment_ids"][start : start + count] = ids
        mine = slice(place, place + request.blocks(sizes))
        slots.slot[mine], slots.is_used[mine] = request.slot, True
        slots.is_first[place] = True
    arrays["valid"] = arrays["segment_ids"] >= 0
    shaped = {name: x.reshape(n, sizes.block, *x.shape[1:]) for name, x in arrays.items()}
    inputs = LossInputs(*(shaped[name] for name in LossInputs._fields))
    return Micro(shaped["x"], shaped["targets"], inputs, slots, np.int32(used))


def numbers_of(request: Request, sizes: Sizes) -> dict[str, np.ndarray]:
    """All numbers of the request's tokens that depend on the request alone."""
    random = np.random.default_rng(request.seed)
    count, targets = sum(request.lengths), sizes.targets
    weights = random.normal(0.3, 1, (count, targets))
    weights[::5] = 0
    return {
        "x": random.standard_normal((count, sizes.hidden)).astype(np.float32) + request.poison,
        "targets": random.integers(0, sizes.vocabulary, (count, targets)),
        "weights": weights,
        "old_logprobs": random.uniform(-6, -2, count),
        "advantages": random.choice([0.0, -1.3, 0.7, 2.0], count),
        "clip_low": random.uniform(0.5, 0.9, count),
        "clip_high": random.uniform(1.1, 3.0, count),
        "sequence_mask": random.integers(0, 2, count),
        "beta": np.full(count, 0.1),
        "loss_id": np.full(count, LOSS_NAMES.index(request.loss)),
    }


@partial(jax.jit, static_argnames="chunk")
def train(
    head: LmHead, micro: Micro, adapters: HeadAdapters, gradient_slots: dict[str, Array], chunk: int
) -> HeadTrained:
    x, targets, inputs, blocks, used = micro
    return train_lm_head(
        head,
        x,
        targets,
        inputs,
        adapters,
        blocks,
        used,
        gradient_slots,
        eps=EPS,
        chunk_blocks=chunk,
    )


@partial(jax.jit, static_argnames="chunk")
def score(head: LmHead, micro: Micro, adapters: HeadAdapters, chunk: int) -> HeadScored:
    x, targets, inputs, blocks, used = micro
    return score_lm_head(
        head, x, targets, inputs, adapters, blocks, used, eps=EPS, chunk_blocks=chunk
    )
