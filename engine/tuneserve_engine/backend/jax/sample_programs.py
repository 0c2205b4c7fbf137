"""The sampler's programs: pure functions of a model and arrays, for a closed set of shapes.

A request's options are arguments or places in arrays of fixed width, never part of a shape.

Dimension key: B lanes, n blocks of a chunk of prompts, S positions of a block, which is a page, J
entries of a row of the table, V vocabulary, D hidden, K ids per position, Q choices per position, U
steps per dispatch.
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
from tuneserve_engine.backend.jax.lora import LoraRows
from tuneserve_engine.backend.jax.models.block import Layer
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.decoder import Decoder, Paged
from tuneserve_engine.backend.jax.page_pool import table_width
from tuneserve_engine.backend.jax.pages import Pages
from tuneserve_engine.backend.jax.programs import ProgramSet
from tuneserve_engine.backend.jax.sample_adapters import (
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
"""Tokens that each lane gets before the host looks; what a dispatch costs is shared by them."""
CHOICES = 64
"""Entries of a top-k or of alternatives that are computed whatever k is asked, and most ids to
score beside a prompt's own tokens: a few percent of what a position's logits cost."""


class Choices(NamedTuple):
    """Ids and their logprobs, best or first drawn first; undefined where nobody asked."""

    ids: AnyArray  # [..., Q] int32
    logprobs: AnyArray  # [..., Q] float32


class Blocks(NamedTuple):
    """Parts of prompts, of one lane or several, that are computed together."""

    tokens: AnyArray  # [n, S] int32
    start: AnyArray  # [n] int32 the position of the first token; -S for an unused block
    table: AnyArray  # [n, J] int32 of the lane
    lane: AnyArray  # [n] int32


class Questions(NamedTuple):
    """What to say about each position of a chunk's blocks."""

    ids: AnyArray  # [n, S, K] int32, -1 = none
    top: AnyArray  # [n] bool: the most likely ids
    alternatives: AnyArray  # [n] bool: draws
    seed: AnyArray  # [n, 2] uint32, high half first
    positions: AnyArray  # [n, S] int32 that draws depend on
    temperature: AnyArray  # [n] float32 of the draws


class Scores(NamedTuple):
    """The answers."""

    logprobs: AnyArray  # [n, S, K] float32
    top: Choices  # [n, S, Q]
    alternatives: Choices  # [n, S, Q]


class LaneState(NamedTuple):
    """What each lane decodes next."""

    tokens: AnyArray  # [B] int32 the last token of its sequence
    positions: AnyArray  # [B] int32 that token's place; -1 in an idle lane
    step: AnyArray  # [B] int32 number of the token to draw, 0 = the first after the prompt
    table: AnyArray  # [B, J] int32 the pages of its sequence
    rows: RowParams
    top: Scalar  # bool: some lane asks for the most likely ids


class Decoded(NamedTuple):
    """What one dispatch gave."""

    pages: Pages
    tokens: Int[Array, "U B"]
    logprobs: Float[Array, "U B"]
    top: Choices  # [U, B, Q]


class Programs:
    """The sampler's part of a process's programs. Those with adapters have a key, the rank class;
    the others have none, ``()``."""

    def __init__(
        self,
        programs: ProgramSet,
        model: Decoder,
        lattice: ShapeLattice,
        *,
        lanes: int,
        pages: int,
    ) -> None:
        self.blocks = lattice.chunk // lattice.block
        self.block = lattice.block
        self.table_width = table_width(lattice.context_length, lattice.block)
        dtype = model.unembedding().dtype
        make_bank = partial(empty_bank, lanes=lanes)
        make_pages = partial(_empty_pages, model.config, pages, lattice.block, dtype)
        use = "samples, by rank class"
        self.prefill = programs.add("prefill", _prefill, use=use, model=model, donate=(0,))
        self.score = programs.add("score", _score, use=use, model=model)
        self.decode = programs.add("decode", _decode, use=use, model=model, donate=(0,))
        self.adopt = programs.add("adopt", adopt, use=use, donate=(0,))
        self.empty_bank = programs.add("empty_bank", make_bank, use=use)
        use = "samples, all of them"
        self.copy = programs.add("copy", _copy, use=use, donate=(0,))
        self.empty_pages = programs.add("empty_pages", make_pages, use=use)
        self.unstacked = programs.add("unstacked", _unstacked, use=use, model=model)
        self._declare(model, lattice.rank_classes, lanes, jax.eval_shape(make_pages))

    def _declare(
        self, model: Decoder, rank_classes: tuple[int, ...], lanes: int, pages: Any
    ) -> None:
        """Everything that sampling can ever call, the common first. ``pages`` is one of specs."""
        config, shapes = model.config, target_shapes(model.config)
        index = _spec((), np.int32)
        weights = jax.eval_shape(partial(_unstacked, model))
        hidden = _spec((self.blocks, self.block, config.hidden), pages.k[0].dtype)
        blocks = no_blocks(self.blocks, self.block, self.table_width)
        questions = no_questions(self.blocks, self.block)
        self.unstacked.declare(())
        self.empty_pages.declare(())
        self.copy.declare((), pages, index, index)
        for order, rank in enumerate(rank_classes):
            adapter = adapter_specs(shapes, rank)
            bank = jax.eval_shape(partial(empty_bank, lanes=lanes), adapter.weights)
            state = no_lanes(lanes, self.table_width)
            self.prefill.declare(rank, pages, weights, bank, blocks, order=order)
            self.decode.declare(rank, pages, weights, bank, state, order=order)
            self.score.declare(rank, hidden, bank, blocks.lane, questions, order=order)
            self.adopt.declare(rank, bank, index, adapter, order=order)
            self.empty_bank.declare(rank, adapter.weights, order=order)


def no_rows(lanes: int) -> RowParams:
    """Greedy rows without limits: the cheapest to draw."""
    return RowParams(
        seed=np.zeros((lanes, 2), np.uint32),
        sample=np.zeros(lanes, np.int32),
        temperature=np.zeros(lanes, np.float32),
        top_k=np.full(lanes, -1, np.int32),
        top_p=np.ones(lanes, np.float32),
    )


def no_lanes(lanes: int, width: int) -> LaneState:
    """Idle lanes."""
    return LaneState(
        tokens=np.zeros(lanes, np.int32),
        positions=np.full(lanes, -1, np.int32),
        step=np.zeros(lanes, np.int32),
        table=np.zeros((lanes, width), np.int32),
        rows=no_rows(lanes),
        top=np.bool_(False),
    )


def no_blocks(blocks: int, size: int, width: int) -> Blocks:
    """Unused blocks."""
    return Blocks(
        tokens=np.zeros((blocks, size), np.int32),
        start=np.full(blocks, -size, np.int32),
        table=np.zeros((blocks, width), np.int32),
        lane=np.zeros(blocks, np.int32),
    )


def no_questions(blocks: int, size: int) -> Questions:
    """Blocks of which nothing is asked."""
    return Questions(
        ids=np.full((blocks, size, 1 + CHOICES), -1, np.int32),
        top=np.zeros(blocks, np.bool_),
        alternatives=np.zeros(blocks, np.bool_),
        seed=np.zeros((blocks, 2), np.uint32),
        positions=np.zeros((blocks, size), np.int32),
        temperature=np.zeros(blocks, np.float32),
    )


def _prefill(
    model: Decoder, pages: Pages, weights: tuple[Any, ...], bank: LaneBank, blocks: Blocks
) -> tuple[Pages, Float[Array, "n S D"]]:
    """Fills a page with the keys and values of each block; hidden states, to be scored. A block may
    follow another one of its prompt in the same chunk."""
    size = blocks.tokens.shape[1]
    start, lane = jnp.asarray(blocks.start), jnp.asarray(blocks.lane)
    layers = tuple(
        Layer(mine, bank.of_layer(index)._replace(slot=lane)) for index, mine in enumerate(weights)
    )
    positions = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    view = Paged(positions, jnp.asarray(blocks.table), pages, layers)
    hidden, pages = model.continued(jnp.asarray(blocks.tokens), view)
    return pages, hidden


def _score(
    model: Decoder,
    hidden: Float[Array, "n S D"],
    bank: LaneBank,
    lane: Int[Array, " n"],
    asked: Questions,
) -> Scores:
    """Logits exist in here only: for one block at a time, and never on the host."""
    adapters = bank.of_unembedding()

    def block(given: Any) -> Scores:
        hidden, lane, asked = given
        mine = LoraRows(
            *jax.tree.map(lambda x: x[lane][None], (adapters.a, adapters.b, adapters.scale))
        )
        logits = model.logits(hidden[None], mine)[0]
        count = logits.shape[0]
        temperature = jnp.broadcast_to(asked.temperature, (count,))
        alternatives = _if(
            asked.alternatives,
            lambda: Choices(
                *draw_alternatives(logits, asked.seed, asked.positions, temperature, CHOICES)
            ),
        )
        top = _if(asked.top, lambda: _top(logits, jnp.ones(count, jnp.float32)))
        return Scores(token_logprobs(logits, asked.ids), top, alternatives)

    scores: Scores = jax.lax.map(block, (hidden, lane, jax.tree.map(jnp.asarray, asked)))
    return scores


def _unstacked(model: Decoder) -> tuple[Any, ...]:
    """Each layer's own weights: a second copy of the base model's layers."""
    return tuple(layer.weights for layer in model.unstacked(None))


def _decode(
    model: Decoder, pages: Pages, weights: tuple[Any, ...], bank: LaneBank, lanes: LaneState
) -> Decoded:
    """The next tokens of every lane; idle lanes give values to ignore."""
    positions, step = jnp.asarray(lanes.positions), jnp.asarray(lanes.step)
    temperature, table = jnp.asarray(lanes.rows.temperature), jnp.asarray(lanes.table)
    layers = tuple(Layer(mine, bank.of_layer(index)) for index, mine in enumerate(weights))

    def one(
        carry: tuple[Array, Pages], number: Array
    ) -> tuple[tuple[Array, Pages], tuple[Array, Array, Choices]]:
        tokens, pages = carry
        at = jnp.where(positions < 0, -1, positions + number)
        hidden, pages = model.continued(tokens[:, None], Paged(at[:, None], table, pages, layers))
        logits = model.logits(hidden, bank.of_unembedding())[:, 0]
        tokens, logprobs = draw(logits, step + number, lanes.rows)
        top = _if(lanes.top, lambda: _top(logits, temperature))
        return (tokens, pages), (tokens, logprobs, top)

    numbers = jnp.arange(STEPS_PER_DISPATCH, dtype=jnp.int32)
    (_, pages), drawn = jax.lax.scan(one, (jnp.asarray(lanes.tokens), pages), numbers)
    return Decoded(pages, *drawn)


def _copy(pages: Pages, source: Int[Array, ""], target: Int[Array, ""]) -> Pages:
    """The pages with a copy of one in another's place."""

    def copied(x: Array) -> Array:
        page = jax.lax.dynamic_index_in_dim(x, source, keepdims=False)
        updated: Array = jax.lax.dynamic_update_index_in_dim(x, page, target, 0)
        return updated

    return Pages(*jax.tree.map(copied, tuple(pages)))


def _empty_pages(config: ModelConfig, pages: int, size: int, dtype: DTypeLike) -> Pages:
    heads, width = config.kv_heads, config.head_dim
    layers = range(config.layers)
    return Pages(
        k=tuple(jnp.zeros((pages, heads, width, size), dtype) for _ in layers),
        v=tuple(jnp.zeros((pages, heads, size, width), dtype) for _ in layers),
    )


def _top(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Choices:
    return Choices(*top_logprobs(logits, temperature, min(CHOICES, logits.shape[-1])))


def _if(asked: AnyArray | Scalar, choices: Callable[[], Choices]) -> Choices:
    """The choices, or zeros at next to no cost."""
    shapes = jax.eval_shape(choices)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    chosen: Choices = jax.lax.cond(jnp.asarray(asked), choices, lambda: nothing)
    return chosen


def _spec(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Stands for an array."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
