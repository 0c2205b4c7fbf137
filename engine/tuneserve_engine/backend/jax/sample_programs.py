"""The sampler's programs: pure functions of a model and arrays, for a closed set of shapes.

A request's options are arguments or places in arrays of fixed width, never part of a shape.

Dimension key: B lanes, V vocabulary, D hidden, T cache capacity, P positions of a part, K ids per
position, Q choices per position, U steps per dispatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.adapters import target_shapes
from tuneserve_engine.backend.jax.head import head_chunk_blocks
from tuneserve_engine.backend.jax.models.block import Layer
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.decoder import Decoder, KVCache
from tuneserve_engine.backend.jax.programs import ProgramSet
from tuneserve_engine.backend.jax.sample_adapters import (
    Adapter,
    LaneBank,
    Scalar,
    adapter_specs,
    adopt,
    empty_bank,
)
from tuneserve_engine.backend.jax.sampling_math import (
    AnyArray,
    RowParams,
    draw,
    draw_alternatives,
    token_logprobs,
    top_logprobs,
)
from tuneserve_engine.lattice import ShapeLattice

STEPS_PER_DISPATCH = 4
"""Tokens per lane between two looks of the host: at most one fewer are decoded in vain."""
CHOICES = 64
"""Entries of a top-k or of alternatives that are computed whatever k is asked, and most ids to
score beside a prompt's own tokens: a few percent of what a position's logits cost."""


class Choices(NamedTuple):
    """Ids and their logprobs, best or first drawn first; undefined where nobody asked."""

    ids: AnyArray  # [..., Q] int32
    logprobs: AnyArray  # [..., Q] float32


class Prefilled(NamedTuple):
    """What one pass over a prompt leaves: shared by all samples of its request."""

    hidden: Float[Array, "1 T D"]
    cache: KVCache  # of one row
    logits: Float[Array, "1 V"]  # after the last token


class Questions(NamedTuple):
    """What to say about each position of a part of a prompt."""

    ids: AnyArray  # [P, K] int32, -1 = none
    top: Scalar  # bool: the most likely ids
    alternatives: Scalar  # bool: draws
    seed: AnyArray  # [2] uint32, high half first
    positions: AnyArray  # [P] int32 that draws depend on
    temperature: Scalar  # float32 of the draws


class Scores(NamedTuple):
    """The answers."""

    logprobs: Float[Array, "P K"]
    top: Choices
    alternatives: Choices


class LaneState(NamedTuple):
    """What each lane decodes next."""

    tokens: AnyArray  # [B] int32 the last token of its sequence
    positions: AnyArray  # [B] int32 that token's place; the capacity or beyond in an idle lane
    step: AnyArray  # [B] int32 number of the token to draw, 0 = the first after the prompt
    rows: RowParams
    top: Scalar  # bool: some lane asks for the most likely ids


class Decoded(NamedTuple):
    """What one dispatch gave."""

    cache: KVCache
    tokens: Int[Array, "U B"]
    logprobs: Float[Array, "U B"]
    top: Choices  # [U, B, Q]


class Programs:
    """The sampler's part of a process's programs; each says what its keys are."""

    def __init__(
        self, programs: ProgramSet, model: Decoder, lattice: ShapeLattice, lanes: int
    ) -> None:
        # As many as training scores at once: logits of a whole chunk would take gigabytes.
        blocks = head_chunk_blocks(lattice.block, lattice.chunk, model.config.vocab_size)
        positions = blocks * lattice.block
        self.positions = positions
        use = "samples, by capacity and rank class"
        self.prefill = programs.add("prefill", _prefill, use=use, model=model)
        self.decode = programs.add("decode", _decode, use=use, model=model, donate=(0,))
        use = "samples, by capacity"
        self.part = programs.add("part", partial(_part, positions=positions), use=use)
        self.join = programs.add("join", _join, use=use, donate=(0,))
        self.empty_cache = programs.add("empty_cache", partial(_empty_cache, lanes=lanes), use=use)
        use = "samples, by rank class"
        self.score = programs.add("score", _score, use=use, model=model)
        self.adopt = programs.add("adopt", adopt, use=use, donate=(0,))
        self.empty_bank = programs.add("empty_bank", partial(empty_bank, lanes=lanes), use=use)
        use = "samples, all of them"
        self.first = programs.add("first", _first, use=use)
        self.unstacked = programs.add("unstacked", _unstacked, use=use, model=model)
        self._declare(model, lattice, lanes)

    def _declare(self, model: Decoder, lattice: ShapeLattice, lanes: int) -> None:
        """Small capacities and low ranks first: everybody passes through those."""
        config, shapes = model.config, target_shapes(model.config)
        dtype = model.unembedding().dtype
        index = _spec((), np.int32)
        adapters = {rank: adapter_specs(shapes, rank) for rank in lattice.rank_classes}
        banks = {
            rank: jax.eval_shape(partial(empty_bank, lanes=lanes), adapter.weights)
            for rank, adapter in adapters.items()
        }
        weights = jax.eval_shape(partial(_unstacked, model))
        part = _spec((1, self.positions, config.hidden), dtype)
        questions = _question_specs(self.positions)
        for order, (rank, adapter) in enumerate(adapters.items()):
            self.score.declare(rank, part, adapter, questions, order=order)
            self.adopt.declare(rank, banks[rank], index, adapter, order=order)
            self.empty_bank.declare(rank, adapter.weights, order=order)
        for order, capacity in enumerate(lattice.capacities):
            hidden = _spec((1, capacity, config.hidden), dtype)
            tokens = _spec((1, capacity), np.int32)
            one = _cache_specs(config, capacity, dtype)
            cache = jax.eval_shape(partial(_empty_cache, lanes=lanes), one)
            self.part.declare(capacity, hidden, index, order=order)
            self.join.declare(capacity, cache, index, one, order=order)
            self.empty_cache.declare(capacity, one, order=order)
            state = no_lanes(lanes, capacity)
            for rarer, (rank, adapter) in enumerate(adapters.items()):
                key, rare = (capacity, rank), order + rarer
                self.prefill.declare(key, tokens, index, adapter, order=rare)
                self.decode.declare(key, cache, weights, banks[rank], state, order=rare)
        self.first.declare((), _spec((1, config.vocab_size), np.float32), no_rows(lanes))
        self.unstacked.declare(())


def no_rows(lanes: int) -> RowParams:
    """Greedy rows without limits: the cheapest to draw."""
    return RowParams(
        seed=np.zeros((lanes, 2), np.uint32),
        sample=np.zeros(lanes, np.int32),
        temperature=np.zeros(lanes, np.float32),
        top_k=np.full(lanes, -1, np.int32),
        top_p=np.ones(lanes, np.float32),
    )


def no_lanes(lanes: int, capacity: int) -> LaneState:
    """Idle lanes."""
    return LaneState(
        tokens=np.zeros(lanes, np.int32),
        positions=np.full(lanes, capacity, np.int32),
        step=np.zeros(lanes, np.int32),
        rows=no_rows(lanes),
        top=np.bool_(False),
    )


def _prefill(
    model: Decoder, tokens: Int[Array, "1 T"], length: Int[Array, ""], adapter: Adapter
) -> Prefilled:
    lora = adapter.one_row()
    hidden, cache = model.prefill(tokens, lora, tokens.shape[1], length)
    last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)
    return Prefilled(hidden, cache, model.logits(last, lora)[:, 0])


def _part(
    hidden: Float[Array, "1 T D"], start: Int[Array, ""], *, positions: int
) -> Float[Array, "1 P D"]:
    """``positions`` positions from ``start`` on, zeros past the end."""
    padded = jnp.pad(hidden, ((0, 0), (0, -hidden.shape[1] % positions), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, start, positions, axis=1)


def _score(
    model: Decoder, hidden: Float[Array, "1 P D"], adapter: Adapter, asked: Questions
) -> Scores:
    """Logits exist in here only: for one chunk at a time, and never on the host."""
    logits = model.logits(hidden, adapter.one_row())[0]
    count = logits.shape[0]
    temperature = jnp.broadcast_to(jnp.asarray(asked.temperature)[None], (count,))
    alternatives = _if(
        asked.alternatives,
        lambda: Choices(
            *draw_alternatives(
                logits, jnp.asarray(asked.seed), jnp.asarray(asked.positions), temperature, CHOICES
            )
        ),
    )
    top = _if(asked.top, lambda: _top(logits, jnp.ones(count, jnp.float32)))
    return Scores(token_logprobs(logits, jnp.asarray(asked.ids)), top, alternatives)


def _unstacked(model: Decoder) -> tuple[Any, ...]:
    """Each layer's own weights: a copy of the base model for as long as somebody decodes."""
    return tuple(layer.weights for layer in model.unstacked(None))


def _decode(
    model: Decoder, cache: KVCache, weights: tuple[Any, ...], bank: LaneBank, lanes: LaneState
) -> Decoded:
    """The next tokens of every lane; idle lanes give values to ignore."""

    positions, step = jnp.asarray(lanes.positions), jnp.asarray(lanes.step)
    temperature = jnp.asarray(lanes.rows.temperature)
    layers = tuple(Layer(mine, bank.of_layer(index)) for index, mine in enumerate(weights))

    def one(
        carry: tuple[Array, KVCache], index: Array
    ) -> tuple[tuple[Array, KVCache], tuple[Array, Array, Choices]]:
        tokens, cache = carry
        hidden, cache = model.decode(tokens, positions + index, cache, layers)
        logits = model.logits(hidden[:, None], bank.of_unembedding())[:, 0]
        tokens, logprobs = draw(logits, step + index, lanes.rows)
        top = _if(lanes.top, lambda: _top(logits, temperature))
        return (tokens, cache), (tokens, logprobs, top)

    numbers = jnp.arange(STEPS_PER_DISPATCH, dtype=jnp.int32)
    (_, cache), drawn = jax.lax.scan(one, (jnp.asarray(lanes.tokens), cache), numbers)
    return Decoded(cache, *drawn)


def _first(logits: Float[Array, "1 V"], rows: RowParams) -> tuple[Array, Array, Choices]:
    """Token 0 of as many samples of a prompt as there are lanes, and its most likely ids [1, Q] at
    the temperature of the first of them."""
    lanes = rows.sample.shape[0]
    spread = jnp.broadcast_to(logits, (lanes, logits.shape[1]))
    tokens, logprobs = draw(spread, jnp.zeros(lanes, jnp.int32), rows)
    return tokens, logprobs, _top(logits, jnp.asarray(rows.temperature)[:1])


def _top(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Choices:
    return Choices(*top_logprobs(logits, temperature, min(CHOICES, logits.shape[-1])))


def _if(asked: Scalar, choices: Callable[[], Choices]) -> Choices:
    """The choices, or zeros at next to no cost."""
    shapes = jax.eval_shape(choices)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    chosen: Choices = jax.lax.cond(jnp.asarray(asked), choices, lambda: nothing)
    return chosen


def _join(cache: KVCache, lane: Int[Array, ""], prompt: KVCache) -> KVCache:
    """The lane holds the prompt's cache, all of it: what a former sequence left there, a NaN for
    instance, would reach the new one through its masked positions (0 x NaN)."""

    def place(lanes: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(lanes, row, lane, axis=0)

    return KVCache(*jax.tree.map(place, tuple(cache), tuple(prompt)))


def _empty_cache(prompt: KVCache, *, lanes: int) -> KVCache:
    """Zeros for all lanes, each with the shape of this prompt's cache."""

    def rows(x: Array) -> Array:
        return jnp.zeros((lanes, *x.shape[1:]), x.dtype)

    return KVCache(*jax.tree.map(rows, tuple(prompt)))


def _spec(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Stands for an array."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _cache_specs(config: ModelConfig, capacity: int, dtype: DTypeLike) -> Any:
    """A ``KVCache`` of specs, of one row."""
    heads, size = config.kv_heads, config.head_dim
    keys, values = (1, heads, size, capacity), (1, heads, capacity, size)
    return KVCache(
        k=(_spec(keys, dtype),) * config.layers, v=(_spec(values, dtype),) * config.layers
    )


def _question_specs(positions: int) -> Any:
    """``Questions`` of specs."""
    return Questions(
        ids=_spec((positions, 1 + CHOICES), np.int32),
        top=_spec((), np.bool_),
        alternatives=_spec((), np.bool_),
        seed=_spec((2,), np.uint32),
        positions=_spec((positions,), np.int32),
        temperature=_spec((), np.float32),
    )
