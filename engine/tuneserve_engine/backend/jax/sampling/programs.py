"""The sampler's programs: pure functions of a model and arrays, for a closed set of shapes.

A request's options are arguments or rows of arrays of fixed width, never part of a shape. A slot
is a decode slot.

Dimension key: B decode slots, n blocks of a chunk of prompts, S positions of a block, which is a
page, E entries of a row of the table, V vocabulary, D hidden, K ids per position, Q choices per
position, U steps per dispatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.attention.page_table import table_width
from tuneserve_engine.backend.jax.attention.paged import Pages
from tuneserve_engine.backend.jax.mesh import WHOLE, Parts
from tuneserve_engine.backend.jax.model.block import Layer
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.decoder import Decoder, Paged
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.programs.registry import Program, ProgramRegistry
from tuneserve_engine.backend.jax.sampling.adapter_slot_table import adapter_slot_count
from tuneserve_engine.backend.jax.sampling.adapter_slots import (
    DecodeAdapters,
    Scalar,
    adapter_specs,
    empty_adapters,
    scans_layers,
    set_slot_adapter,
)
from tuneserve_engine.backend.jax.sampling.logit_edits import (
    LogitEdits,
    edited,
    no_edits,
    no_recent,
)
from tuneserve_engine.backend.jax.sampling.logits import (
    AnyArray,
    RowParams,
    draw,
    draw_alternatives,
    drawn_logprobs,
    token_logprobs,
    top_logprobs,
)
from tuneserve_engine.backend.jax.sampling.parts import parts_of_sampling
from tuneserve_engine.backend.jax.sampling.token_masks import TokenMasks, no_masks, redrawn
from tuneserve_engine.core.shapes import StaticShapes

STEPS_PER_DISPATCH = 4
"""Tokens that each slot decodes per dispatch, before the host looks: they share its cost."""
MAX_TOP_TOKENS = 64
"""Entries of a top-k or of alternatives that are computed, whatever k is asked for.

It is also the most ids to score beside a prompt's own tokens. The cost is a few percent of that of
a position's logits.
"""


class TopTokens(NamedTuple):
    """Ids and their logprobs, best or first drawn first; undefined where not asked for."""

    ids: AnyArray  # [..., Q] int32
    logprobs: AnyArray  # [..., Q] float32


class Blocks(NamedTuple):
    """Parts of prompts, of one slot or several, that are prefilled together."""

    tokens: AnyArray  # [n, S] int32
    start: AnyArray  # [n] int32 the position of the first token; -S for an unused block
    table: AnyArray  # [n, E] int32 the slot's table
    slot: AnyArray  # [n] int32 the adapter slot


class PromptScoreRequest(NamedTuple):
    """The questions about each position of a chunk's blocks."""

    ids: AnyArray  # [n, S, K] int32, -1 = none
    top: AnyArray  # [n] bool: whether the most likely ids are asked for
    alternatives: AnyArray  # [n] bool: whether draws are asked for
    seed: AnyArray  # [n, 2] uint32, high half first
    positions: AnyArray  # [n, S] int32 positions that the draws depend on
    temperature: AnyArray  # [n] float32 temperature of the draws


class PromptScores(NamedTuple):
    """The answers to ``PromptScoreRequest``."""

    logprobs: AnyArray  # [n, S, K] float32
    top: TopTokens  # [n, S, Q]
    alternatives: TopTokens  # [n, S, Q]


class DecodeState(NamedTuple):
    """The state of every slot before its next tokens are decoded."""

    tokens: AnyArray  # [B] int32 the last token of its sequence
    positions: AnyArray  # [B] int32 position of that token; -1 in an idle slot
    step: AnyArray  # [B] int32 number of the token to draw, 0 = the first after the prompt
    table: AnyArray  # [B, E] int32 the pages of its sequence
    adapter_slot: AnyArray  # [B] int32; on a CPU, each decode slot has its own
    rows: RowParams
    edits: LogitEdits
    masks: TokenMasks  # of the first token of the dispatch
    top: Scalar  # bool: whether a decode slot asks for the most likely ids
    steps: Scalar  # int32: the tokens to decode, 1 to U


class Decoded(NamedTuple):
    """The result of one dispatch; what follows its last step is undefined."""

    pages: Pages
    tokens: Int[Array, "U B"]
    logprobs: Float[Array, "U B"]
    top: TopTokens  # [U, B, Q]


class Programs:
    """The sampler's part of a process's programs.

    The key of programs with adapters is the rank bucket; the key of the others is ``()``.
    """

    def __init__(
        self,
        programs: ProgramRegistry,
        model: Decoder,
        static_shapes: StaticShapes,
        *,
        slots: int,
        pages: int,
    ) -> None:
        self.blocks = static_shapes.prefill_tokens // static_shapes.block
        self.block = static_shapes.block
        self.table_width = table_width(static_shapes.context_length, static_shapes.block)
        self.context_length = static_shapes.context_length
        self.vocab_size = model.config.vocab_size
        self.put = programs.mesh.put
        dtype = model.unembedding().dtype
        self.adapter_slots = adapter_slot_count(slots, is_shared=scans_layers())
        make_bank = partial(empty_adapters, slots=self.adapter_slots)
        make_pages = partial(_empty_pages, model.config, pages, static_shapes.block, dtype)
        use = "samples, by rank bucket"
        paged, unstacked, adapters = parts_of_sampling(model.config, programs.mesh)
        given = paged, unstacked, adapters, WHOLE
        add = partial(programs.add_program, use=use)
        parts = Parts(given, (paged, WHOLE))
        self.prefill = add("prefill", _prefill, model=model, donate=(0,), parts=parts)
        parts = Parts((WHOLE, adapters, WHOLE, WHOLE), WHOLE)
        self.score = add("score", _score, model=model, parts=parts)
        parts = Parts(given, Decoded(paged, WHOLE, WHOLE, WHOLE))  # type: ignore[arg-type]
        self.decode = add("decode", _decode, model=model, donate=(0,), parts=parts)
        parts = Parts((adapters, WHOLE, WHOLE), adapters, on_each=False)
        self.set_slot_adapter = add("set_slot_adapter", set_slot_adapter, donate=(0,), parts=parts)
        parts = Parts((WHOLE,), adapters, on_each=False)
        self.empty_adapters = add("empty_bank", make_bank, parts=parts)
        add = partial(programs.add_program, use="samples, all of them")
        parts = Parts((paged, WHOLE, WHOLE), paged, on_each=False)
        self.copy = add("copy", _copy, donate=(0,), parts=parts)
        parts = Parts((), paged, on_each=False)
        self.empty_pages = add("empty_pages", make_pages, parts=parts)
        self.layers: Program | None = None
        if not scans_layers():
            parts = Parts((), unstacked, on_each=False)
            self.layers = add("unstacked", _unstacked, model=model, parts=parts)
        self._declare(model, static_shapes.rank_buckets, slots, jax.eval_shape(make_pages))

    def _declare(
        self, model: Decoder, rank_buckets: tuple[int, ...], slots: int, pages: Any
    ) -> None:
        """Declare everything that sampling can ever call. ``pages`` is a ``Pages`` of specs."""
        config, shapes = model.config, target_shapes(model.config)
        index = _spec((), np.int32)
        weights = ()
        if self.layers is not None:
            weights = jax.eval_shape(partial(_unstacked, model))
            self.layers.declare(())
        hidden = _spec((self.blocks, self.block, config.hidden), pages.k[0].dtype)
        blocks = no_blocks(self.blocks, self.block, self.table_width)
        score_request = no_score_request(self.blocks, self.block)
        self.empty_pages.declare(())
        self.copy.declare((), pages, index, index)
        for order, rank in enumerate(rank_buckets):
            adapter = adapter_specs(shapes, rank)
            adapters = jax.eval_shape(
                partial(empty_adapters, slots=self.adapter_slots), adapter.weights
            )
            state = no_slots(slots, self.table_width, self.context_length, self.vocab_size)
            self.prefill.declare(rank, pages, weights, adapters, blocks, order=order)
            self.decode.declare(rank, pages, weights, adapters, state, order=order)
            self.score.declare(rank, hidden, adapters, blocks.slot, score_request, order=order)
            self.set_slot_adapter.declare(rank, adapters, index, adapter, order=order)
            self.empty_adapters.declare(rank, adapter.weights, order=order)


def no_rows(slots: int) -> RowParams:
    """Return greedy rows without limits: the cheapest to draw."""
    return RowParams(
        seed=np.zeros((slots, 2), np.uint32),
        sample=np.zeros(slots, np.int32),
        temperature=np.zeros(slots, np.float32),
        top_k=np.full(slots, -1, np.int32),
        top_p=np.ones(slots, np.float32),
    )


def no_slots(slots: int, width: int, length: int, vocab: int) -> DecodeState:
    """Return the state of idle decode slots, for up to ``length`` drawn tokens in each."""
    return DecodeState(
        tokens=np.zeros(slots, np.int32),
        positions=np.full(slots, -1, np.int32),
        step=np.zeros(slots, np.int32),
        table=np.zeros((slots, width), np.int32),
        adapter_slot=np.zeros(slots, np.int32),
        rows=no_rows(slots),
        edits=no_edits(slots, length),
        masks=no_masks(slots, vocab),
        top=np.bool_(False),
        steps=np.int32(STEPS_PER_DISPATCH),
    )


def no_blocks(blocks: int, size: int, width: int) -> Blocks:
    """Return unused blocks."""
    return Blocks(
        tokens=np.zeros((blocks, size), np.int32),
        start=np.full(blocks, -size, np.int32),
        table=np.zeros((blocks, width), np.int32),
        slot=np.zeros(blocks, np.int32),
    )


def no_score_request(blocks: int, size: int) -> PromptScoreRequest:
    """Return blocks about which nothing is asked."""
    return PromptScoreRequest(
        ids=np.full((blocks, size, 1 + MAX_TOP_TOKENS), -1, np.int32),
        top=np.zeros(blocks, np.bool_),
        alternatives=np.zeros(blocks, np.bool_),
        seed=np.zeros((blocks, 2), np.uint32),
        positions=np.zeros((blocks, size), np.int32),
        temperature=np.zeros(blocks, np.float32),
    )


def _prefill(
    model: Decoder, pages: Pages, weights: tuple[Any, ...], adapters: DecodeAdapters, blocks: Blocks
) -> tuple[Pages, Float[Array, "n S D"]]:
    """Fill a page with the keys and values of each block; return hidden states, to be scored.

    A block may follow another block of its prompt in the same chunk.
    """
    size = blocks.tokens.shape[1]
    start, slot = jnp.asarray(blocks.start), jnp.asarray(blocks.slot)
    if scans_layers():
        layers: Any = model.stacked(adapters.of_layer(0)._replace(slot=slot))  # the only pair
    else:
        layers = _unstacked_layers(weights, adapters, slot)
    positions = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    view = Paged(positions, jnp.asarray(blocks.table), pages, layers)
    hidden, pages = model.continued(jnp.asarray(blocks.tokens), view)
    return pages, hidden


def _score(
    model: Decoder,
    hidden: Float[Array, "n S D"],
    adapters: DecodeAdapters,
    slot: Int[Array, " n"],
    asked: PromptScoreRequest,
) -> PromptScores:
    """Score a chunk's hidden states, one block's logits at a time; logits never reach the host."""
    unembed = adapters.of_unembedding()

    def block(given: Any) -> PromptScores:
        hidden, slot, asked = given
        mine = LoraRows(
            *jax.tree.map(lambda x: x[slot][None], (unembed.a, unembed.b, unembed.scale))
        )
        logits = model.logits(hidden[None], mine)[0]
        count = logits.shape[0]
        temperature = jnp.broadcast_to(asked.temperature, (count,))
        alternatives = _if(
            asked.alternatives,
            lambda: TopTokens(
                *draw_alternatives(logits, asked.seed, asked.positions, temperature, MAX_TOP_TOKENS)
            ),
        )
        top = _if(asked.top, lambda: _top(logits, jnp.ones(count, jnp.float32)))
        return PromptScores(token_logprobs(logits, asked.ids), top, alternatives)

    scores: PromptScores = jax.lax.map(block, (hidden, slot, jax.tree.map(jnp.asarray, asked)))
    return scores


def _unstacked(model: Decoder) -> tuple[Any, ...]:
    """Return each layer's own weights: a second copy of the base model's layers."""
    return tuple(layer.weights for layer in model.unstacked(None))


def _unstacked_layers(
    weights: tuple[Any, ...], adapters: DecodeAdapters, slot: Array | None
) -> tuple[Layer, ...]:
    """Return each layer's own weights with its adapters, as ``Paged.layers`` takes them."""
    return tuple(
        Layer(mine, adapters.of_layer(index)._replace(slot=slot))
        for index, mine in enumerate(weights)
    )


def _decode(
    model: Decoder,
    pages: Pages,
    weights: tuple[Any, ...],
    adapters: DecodeAdapters,
    slots: DecodeState,
) -> Decoded:
    """Decode the next tokens of every slot; the results of idle decode slots are to be ignored."""
    positions, step = jnp.asarray(slots.positions), jnp.asarray(slots.step)
    temperature, table = jnp.asarray(slots.rows.temperature), jnp.asarray(slots.table)
    if scans_layers():
        # An idle slot takes part in computing another's adapter, so that no more are read.
        slot = jnp.where(
            positions < 0, slots.adapter_slot[jnp.argmax(positions)], slots.adapter_slot
        )
        lora, unembed = adapters.of_tokens(slot)
        layers: Any = model.stacked(lora)
    else:
        layers, unembed = _unstacked_layers(weights, adapters, None), adapters.of_unembedding()

    def one(number: Array, before: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, pages, recent, scored, top = before
        at = jnp.where(positions < 0, -1, positions + number)
        hidden, pages = model.continued(tokens[:, None], Paged(at[:, None], table, pages, layers))
        logits = model.logits(hidden, unembed)[:, 0]
        drawable = edited(logits, slots.edits, step, recent)
        tokens = draw(drawable, step + number, slots.rows)
        masks = slots.masks._replace(asked=jnp.asarray(slots.masks.asked) & (number == 0))
        tokens = redrawn(tokens, drawable, step + number, slots.rows, masks)
        logprobs = drawn_logprobs(logits, temperature, tokens)
        chosen = _if(slots.top, lambda: _top(logits, temperature))
        top = jax.tree.map(lambda all_, mine: all_.at[number].set(mine), top, chosen)
        recent = recent.at[:, number].set(tokens)
        return tokens, pages, recent, scored.at[number].set(logprobs), top

    most = STEPS_PER_DISPATCH, len(step)
    ids = *most, min(MAX_TOP_TOKENS, model.config.vocab_size)
    top = TopTokens(jnp.zeros(ids, jnp.int32), jnp.zeros(ids, jnp.float32))
    recent, scored = no_recent(*reversed(most)), jnp.zeros(most, jnp.float32)
    first = jnp.asarray(slots.tokens), pages, recent, scored, top
    with jax.named_scope("steps"):
        _, pages, recent, scored, top = jax.lax.fori_loop(0, slots.steps, one, first)
    return Decoded(pages, recent.T, scored, top)


def _copy(pages: Pages, source: Int[Array, ""], target: Int[Array, ""]) -> Pages:
    """Return the pages with a copy of page ``source`` in place of page ``target``."""

    def copied(x: Array) -> Array:
        axis = x.ndim - 4  # pages of several layers have an axis before
        page = jax.lax.dynamic_index_in_dim(x, source, axis, keepdims=False)
        updated: Array = jax.lax.dynamic_update_index_in_dim(x, page, target, axis)
        return updated

    return Pages(*jax.tree.map(copied, tuple(pages)))


def _empty_pages(config: ModelConfig, pages: int, size: int, dtype: DTypeLike) -> Pages:
    heads, width = config.kv_heads, config.head_dim
    stacks = ((config.layers,),) if scans_layers() else ((),) * config.layers
    return Pages(
        k=tuple(jnp.zeros((*stack, pages, heads, width, size), dtype) for stack in stacks),
        v=tuple(jnp.zeros((*stack, pages, heads, size, width), dtype) for stack in stacks),
    )


def _top(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> TopTokens:
    return TopTokens(*top_logprobs(logits, temperature, min(MAX_TOP_TOKENS, logits.shape[-1])))


def _if(asked: AnyArray | Scalar, choices: Callable[[], TopTokens]) -> TopTokens:
    """Return the choices if they are asked for, or zeros at next to no cost."""
    shapes = jax.eval_shape(choices)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    with jax.named_scope("top_tokens"):
        chosen: TopTokens = jax.lax.cond(jnp.asarray(asked), choices, lambda: nothing)
    return chosen


def _spec(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return the spec of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
