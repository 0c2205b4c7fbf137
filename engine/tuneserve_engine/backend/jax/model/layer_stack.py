"""Whole sequences through the decoder's layers, chunk by chunk.

A micro-batch is laid out in blocks; a chunk is a fixed number of blocks. Every matrix product
has the shape of one chunk, and the number of chunks is known only at run time, unless a worker's
micro-batches are one chunk. So one program serves every length, and the bits of a request do not
depend on what else is in the micro-batch.

Dimension key: L layers, n blocks, S tokens of a block, c blocks of a chunk, D hidden, N query
heads, K key/value heads, G = N / K, H head_dim, J slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.attention.base import Attended, AttentionGradient, Visibility
from tuneserve_engine.backend.jax.attention.divided import (
    Divided,
    attend_divided,
    attend_divided_backward,
)
from tuneserve_engine.backend.jax.attention.packed import (
    attend_blocks,
    attend_blocks_backward,
    key_blocks,
    query_blocks,
    token_rows,
)
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.block import (
    AFTER,
    BEFORE,
    Layer,
    Rope,
    after_attention,
    before_attention,
    whole_layer,
)
from tuneserve_engine.backend.jax.model.block_lora import BlockLora
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.target import target_platform
from tuneserve_engine.core.backend_options import Remat

Sliced = tuple[dict[str, Array], Int[Array, ""]]
"""The weights of one layer, and its number."""


class PackedTokens(NamedTuple):
    """The part of a micro-batch that the layers read. ``slot`` is each block's adapter slot.

    With ``divided``, attention is that of a micro-batch of which each device has some blocks.
    """

    positions: Int[Array, "n S"]
    segment_ids: Int[Array, "n S"]  # -1 on padding
    start: Int[Array, " n"]  # the first block that this block's tokens see
    blocks: Int[Array, ""]  # number of used blocks
    slot: Int[Array, " n"]
    divided: Divided | None = None

    def seen(self) -> Visibility:
        return Visibility(self.segment_ids, self.positions, self.start, self.blocks)


class Attention(NamedTuple):
    """Queries, keys and values in blocks, and the result of attention."""

    q: Float[Array, "_ K GS H"]
    k: Float[Array, "_ K S H"]
    v: Float[Array, "_ K S H"]
    attended: Any  # Attended; may hold other layers than q, k and v


@dataclass(frozen=True)
class LayerStack:
    """The layers of a base model and the way to run them."""

    config: ModelConfig
    weights: dict[str, Array]  # [L, ...]
    rope: Callable[[Array], Rope]
    chunk: int  # c
    is_one_chunk: bool  # whether a micro-batch is at most one chunk
    remat: Remat

    def scan(
        self, layer: Callable[[Any, Sliced], Any], state: Any, *, reverse: bool = False
    ) -> Any:
        """Return the state after ``layer(state, sliced)`` for every layer, first or last one first.

        If devices share the weights, those of the next layer are gathered beside a layer: XLA may
        do both at once.
        """
        numbers = jnp.arange(self.config.layers, dtype=jnp.int32)
        shapes = layer_shapes(self.config)
        if all(x.shape[1:] == shapes[name] for name, x in self.weights.items()):
            done, _ = jax.lax.scan(
                lambda state, sliced: (layer(state, sliced), None),
                state,
                (self.weights, numbers),
                reverse=reverse,
            )
            return done

        def gathered(number: Array) -> dict[str, Array]:
            part = {
                name: jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
                for name, x in self.weights.items()
            }
            return whole_layer(self.config, part)

        def step(carry: tuple[Any, dict[str, Array]], number: Array) -> Any:
            state, weights = carry
            next_number = number - 1 if reverse else number + 1
            ahead = gathered(jnp.clip(next_number, 0, self.config.layers - 1))
            return (layer(state, (weights, number)), ahead), None

        first = gathered(numbers[-1 if reverse else 0])
        (done, _), _ = jax.lax.scan(step, (state, first), numbers, reverse=reverse)
        return done

    def score(
        self, x: Float[Array, "n S D"], packed: PackedTokens, adapter_slots: LoraRows | None
    ) -> Float[Array, "n S D"]:
        """Return hidden states after the last layer, without a backward pass.

        They are undefined after the last used block.
        """
        if not self.config.layers:
            return x  # a scan traces its body even for 0 layers, and the body reads the first one
        blank = blank_attention(self.config, x.shape[0], x.shape[1], x.dtype)

        def layer(carry: Any, sliced: Sliced) -> Any:
            x, y, attention = carry
            run = LayerPass(self, packed, adapter_slots, *sliced)
            attention = run.attend(run.project_all(x, 0, attention, 0), 0, 0)
            # Two buffers: if a loop reads and writes one, XLA copies all of it, chunk by chunk.
            y = run.each_chunk(lambda at, y: run.finish(x, at, attention, y), y)
            return y, x, attention

        x, *_ = self.scan(layer, (x, x, blank))
        return x


@dataclass(frozen=True)
class LayerPass:
    """One layer on one micro-batch: its two functions on a chunk, and its attention on all of it.

    The index of a chunk is its first block. Buffers hold m blocks; ``base`` is the first block of
    this layer.
    """

    stack: LayerStack
    packed: PackedTokens
    adapter_slots: LoraRows | None  # [L, J, ...]
    weights: dict[str, Array]
    number: Int[Array, ""]

    def each_chunk(self, body: Callable[[Array, Any], Any], state: Any) -> Any:
        """Run ``body(first block, state)`` for every used chunk, or for the only one.

        There is no loop for the only one. Then products read a layer's weights where they are, and
        a GPU does not wait for the host to read a loop's end.
        """
        size = self.stack.chunk
        if self.stack.is_one_chunk and self.packed.positions.shape[0] == size:
            return body(jnp.int32(0), state)
        count = (self.packed.blocks + size - 1) // size
        with jax.named_scope("chunks"):
            return jax.lax.fori_loop(0, count, lambda i, state: body(i * size, state), state)

    def part(self, blocks: Array, at: Array) -> Array:
        """Return the chunk's blocks."""
        return jax.lax.dynamic_slice_in_dim(blocks, at, self.stack.chunk)

    def lora(self, at: Array, groups: Sequence[Sequence[str]]) -> LoraRows | BlockLora | None:
        """Return each block's own adapter for these groups of projections, at this layer."""
        if self.adapter_slots is None:
            return None
        targets = [name for names in groups for name in names]
        a, b, scale, _ = self.adapter_slots
        a, b = ({name: x[name] for name in targets} for x in (a, b))
        size = self.packed.positions.shape[1]
        if block_lora.is_used(*self.adapter_slots.layers(), size):
            dtype = self.weights[targets[0]].dtype
            blank = block_lora.blank_factors(a, b, groups, (self.stack.chunk, size), dtype)
            return BlockLora(a, b, scale, self.packed.slot, at, self.number, blank)
        slot = self.part(self.packed.slot, at)

        def take(stacked: dict[str, Array]) -> dict[str, Array]:
            return {name: x[self.number, slot] for name, x in stacked.items()}

        return LoraRows(take(a), take(b), scale[slot])

    def rope(self, at: Array) -> Rope:
        return self.stack.rope(self.part(self.packed.positions, at))

    def before(self, x: Array, layer: Layer, rope: Rope) -> tuple[Array, Array, Array]:
        """Return queries, keys and values of a chunk, in blocks."""
        q, k, v = before_attention(self.stack.config, layer, x, rope)
        return query_blocks(q, self.stack.config.kv_heads), key_blocks(k), key_blocks(v)

    def after(self, x: Array, attended: Array, layer: Layer) -> Array:
        """Return the layer's output of a chunk; ``attended`` is in blocks."""
        rows = token_rows(attended, x.shape[1])
        return after_attention(self.stack.config, layer, x, rows)

    def layer(self, at: Array, groups: Sequence[Sequence[str]]) -> Layer:
        """Return the layer as the chunk computes these groups of projections."""
        return Layer(self.weights, self.lora(at, groups))

    def project_all(self, x: Array, x_base: Any, into: Attention, base: Any) -> Attention:
        """Write queries, keys and values of all chunks into ``into``."""

        def one(at: Array, into: Attention) -> Attention:
            qkv = self.before(self.part(x, x_base + at), self.layer(at, BEFORE), self.rope(at))
            return write_qkv(into, base + at, qkv)

        return self.each_chunk(one, into)  # type: ignore[no-any-return]

    def attend(self, attention: Attention, base: Any, attended_base: Any) -> Attention:
        """Return ``attention`` with the result of attention."""
        qkv, into, packed = attention[:3], attention.attended, self.packed
        bases = {"base": base, "attended_base": attended_base}
        if packed.divided is None:
            attended = attend_blocks(*qkv, packed.seen(), into, **bases)
        else:
            blocks = packed.slot.shape[0]
            attended = attend_divided(*qkv, packed.divided, into, blocks=blocks, **bases)
        return attention._replace(attended=attended)

    def attend_backward(
        self, attention: Attention, gradient: Array, into: AttentionGradient, bases: dict[str, Any]
    ) -> AttentionGradient:
        """Return the gradients of q, k and v, from that of attention's result.

        ``bases`` are ``base`` and ``attended_base``.
        """
        packed = self.packed
        if packed.divided is None:
            return attend_blocks_backward(*attention, gradient, packed.seen(), into, **bases)
        return attend_divided_backward(*attention, gradient, packed.divided, into, **bases)

    def finish(self, x: Array, at: Array, attention: Attention, into: Array) -> Array:
        """Return ``into`` with the layer's output of the chunk."""
        attended = self.part(attention.attended.out, at)
        return write_blocks(into, at, self.after(self.part(x, at), attended, self.layer(at, AFTER)))


def write_blocks(buffer: Array, at: Any, value: Array) -> Array:
    """Return the buffer with ``value`` written from index ``at`` of its first axis on."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, value, at, 0)


def write_qkv(into: Attention, at: Any, qkv: tuple[Array, Array, Array]) -> Attention:
    q, k, v = (
        _row_major(write_blocks(buffer, at, x))
        for buffer, x in zip((into.q, into.k, into.v), qkv, strict=True)
    )
    return into._replace(q=q, k=k, v=v)


def _row_major(buffer: Array) -> Array:
    """Return the buffer, laid out as attention reads it.

    On a GPU, XLA would give it the layout of the written blocks, and transpose all of it in every
    layer.
    """
    if target_platform() != "gpu":
        return buffer
    layout = Layout(tuple(range(buffer.ndim)))
    laid_out: Array = with_layout_constraint(buffer, layout)  # type: ignore[no-untyped-call]
    return laid_out


def attention_shapes(config: ModelConfig, blocks: int, size: int, dtype: DTypeLike) -> Any:
    """Return the shapes of an ``Attention`` of ``blocks`` blocks."""
    kv, head = config.kv_heads, config.head_dim
    rows = config.heads // kv * size
    keys = spec((blocks, kv, size, head), dtype)
    queries = spec((blocks, kv, rows, head), dtype)
    sums = spec((blocks, kv, rows), jnp.float32)
    return Attention(queries, keys, keys, Attended(queries, sums))


def blank_attention(config: ModelConfig, blocks: int, size: int, dtype: DTypeLike) -> Attention:
    """Return zeros in the shapes of ``attention_shapes``."""
    shapes = attention_shapes(config, blocks, size, dtype)
    blank: Attention = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return blank
