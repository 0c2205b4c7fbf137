"""The sampler's programs: pure functions of a model and arrays, each compiled once per shapes.

Dimension key: B lanes, V vocabulary, D hidden, T padded prompt, P positions of a chunk, C cache
capacity, U steps per dispatch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.adapters import LoraWeights
from tuneserve_engine.backend.jax.binding import bind
from tuneserve_engine.backend.jax.lora import LoraRows
from tuneserve_engine.backend.jax.models.decoder import Decoder, KVCache
from tuneserve_engine.backend.jax.sampling_math import (
    AnyArray,
    RowParams,
    draw,
    draw_alternatives,
    token_logprobs,
    top_logprobs,
)
from tuneserve_engine.lattice import power_of_two_from

STEPS_PER_DISPATCH = 4
"""Tokens per lane between two looks of the host: at most one fewer are decoded in vain."""


class Adapter(NamedTuple):
    """A frozen adapter on the device, padded to its rank class; the base model has one of zeros."""

    weights: LoraWeights
    scale: Array | np.float32

    @property
    def rank_class(self) -> int:
        return int(next(iter(self.weights.a.values())).shape[-1])


class Prefilled(NamedTuple):
    """What one pass over a prompt leaves: shared by all samples of its request."""

    hidden: Float[Array, "1 T D"]
    cache: KVCache  # of one row and capacity T
    logits: Float[Array, "1 V"]  # after the last token


class LaneState(NamedTuple):
    """What each lane decodes next."""

    tokens: AnyArray  # [B] int32 the last token of its sequence
    positions: AnyArray  # [B] int32 that token's place; the capacity or beyond in an idle lane
    step: AnyArray  # [B] int32 number of the token to draw, 0 = the first after the prompt
    rows: RowParams


class Decoded(NamedTuple):
    """What one dispatch gave; ``logits`` stay on the device unless someone asks for the top k."""

    cache: KVCache
    tokens: Int[Array, "U B"]
    logprobs: Float[Array, "U B"]
    logits: Float[Array, "U B V"]


class Programs:
    """The compiled functions. No option of a request is part of a shape."""

    def __init__(self, model: Decoder) -> None:
        self.vocab_size = model.config.vocab_size
        self.prefill = bind(model, _prefill)
        self.head = bind(model, _head, static=("positions",))
        self.decode = bind(model, _decode, donate=(1,))
        self.first: Callable[..., Any] = jax.jit(_first)
        self.join: Callable[..., KVCache] = jax.jit(_join, donate_argnums=(0,))
        self.adopt: Callable[..., LoraRows] = jax.jit(_adopt, donate_argnums=(0,))
        self.empty: Callable[..., tuple[KVCache, LoraRows]] = jax.jit(
            _empty, static_argnames=("lanes", "capacity")
        )
        self.score: Callable[..., Any] = jax.jit(token_logprobs)
        self.top: Callable[..., Any] = jax.jit(top_logprobs, static_argnames=("k",))
        self.alternatives: Callable[..., Any] = jax.jit(draw_alternatives, static_argnames=("k",))


def _prefill(
    model: Decoder, tokens: Int[Array, "1 T"], length: Int[Array, ""], adapter: Adapter
) -> Prefilled:
    lora = _one_row(adapter)
    hidden, cache = model.prefill(tokens, lora, tokens.shape[1])
    last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)
    return Prefilled(hidden, cache, model.logits(last, lora)[:, 0])


def _head(
    model: Decoder,
    hidden: Float[Array, "1 T D"],
    start: Int[Array, ""],
    adapter: Adapter,
    *,
    positions: int,
) -> Float[Array, "P V"]:
    """Logits of ``positions`` (static) positions from ``start`` on, zeros past the end."""
    padded = jnp.pad(hidden, ((0, 0), (0, -hidden.shape[1] % positions), (0, 0)))
    part = jax.lax.dynamic_slice_in_dim(padded, start, positions, axis=1)
    return model.logits(part, _one_row(adapter))[0]


def _one_row(adapter: Adapter) -> LoraRows:
    weights = jax.tree.map(lambda x: jnp.expand_dims(x, x.ndim - 2), adapter.weights)
    return LoraRows(weights.a, weights.b, jnp.asarray(adapter.scale)[None])


def _decode(
    model: Decoder,
    cache: KVCache,
    bank: LoraRows,
    lanes: LaneState,
) -> Decoded:
    """The next tokens of every lane; idle lanes give values to ignore."""

    positions, step = jnp.asarray(lanes.positions), jnp.asarray(lanes.step)

    def one(carry: tuple[Array, KVCache], index: Array) -> tuple[Any, tuple[Array, Array, Array]]:
        tokens, cache = carry
        hidden, cache = model.decode(tokens, positions + index, cache, bank)
        logits = model.logits(hidden[:, None], bank)[:, 0]
        tokens, logprobs = draw(logits, step + index, lanes.rows)
        return (tokens, cache), (tokens, logprobs, logits)

    numbers = jnp.arange(STEPS_PER_DISPATCH, dtype=jnp.int32)
    (_, cache), drawn = jax.lax.scan(one, (jnp.asarray(lanes.tokens), cache), numbers)
    return Decoded(cache, *drawn)


def _first(logits: Float[Array, "1 V"], rows: RowParams) -> tuple[Array, Array]:
    """Token 0 of as many samples of a prompt as there are lanes."""
    lanes = rows.sample.shape[0]
    return draw(
        jnp.broadcast_to(logits, (lanes, logits.shape[1])), jnp.zeros(lanes, jnp.int32), rows
    )


def _join(cache: KVCache, lane: Int[Array, ""], prompt: KVCache) -> KVCache:
    """The lane holds the prompt's cache and zeros behind it: what a former sequence left there, a
    NaN for instance, would reach the new one through its masked positions (0 x NaN)."""

    def place(lanes: Array, row: Array) -> Array:
        room = [(0, full - used) for full, used in zip(lanes.shape[1:], row.shape[1:], strict=True)]
        return jax.lax.dynamic_update_slice_in_dim(
            lanes, jnp.pad(row, [(0, 0), *room]), lane, axis=0
        )

    return KVCache(*jax.tree.map(place, tuple(cache), tuple(prompt)))


def _adopt(bank: LoraRows, lane: Int[Array, ""], adapter: Adapter) -> LoraRows:
    """The bank with the adapter in the lane's slot."""

    def place(slots: Array, new: Array) -> Array:
        updated: Array = jax.lax.dynamic_update_index_in_dim(slots, new, lane, axis=new.ndim - 2)
        return updated

    return LoraRows(
        a=jax.tree.map(place, bank.a, adapter.weights.a),
        b=jax.tree.map(place, bank.b, adapter.weights.b),
        scale=bank.scale.at[lane].set(jnp.asarray(adapter.scale)),
    )


def _empty(
    prompt: KVCache, weights: LoraWeights, *, lanes: int, capacity: int
) -> tuple[KVCache, LoraRows]:
    """A cache and a bank of zeros with the shapes of these, for all lanes."""
    cache = KVCache(
        k=tuple(jnp.zeros((lanes, *x.shape[1:3], capacity), x.dtype) for x in prompt.k),
        v=tuple(jnp.zeros((lanes, x.shape[1], capacity, x.shape[3]), x.dtype) for x in prompt.v),
    )

    def slots(x: Array) -> Array:
        return jnp.zeros((*x.shape[:-2], lanes, *x.shape[-2:]), x.dtype)

    a, b = jax.tree.map(slots, weights)
    return cache, LoraRows(a, b, jnp.zeros(lanes, jnp.float32))


def top_rows(
    programs: Programs, logits: Float[Array, "B V"], temperature: AnyArray, k: int
) -> tuple[AnyArray, AnyArray]:
    """The k most likely ids and logprobs per row, on the host; a k beyond the vocabulary is cut.

    Computes a power of two of them: one program serves many k.
    """
    padded = min(power_of_two_from(k), logits.shape[-1])
    ids, logprobs = jax.device_get(programs.top(logits, temperature, k=padded))
    return ids[:, :k], logprobs[:, :k]
