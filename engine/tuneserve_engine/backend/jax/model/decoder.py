"""One decoder for Llama 3.x, Qwen2.5 and Qwen3, with stacked layer weights.

Dimension key: L layers, B rows, T positions, D hidden, V vocabulary, N query heads, K key/value
heads, H head_dim, E entries of a row's table, n blocks of S tokens of a micro-batch.
"""

import math
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.attention.page_table import UNUSED_PAGE
from tuneserve_engine.backend.jax.attention.paged import (
    Pages,
    attend_pages,
    rotate_position,
    rotates_by_kernel,
    write_page,
    write_position,
)
from tuneserve_engine.backend.jax.attention.rotate_gpu import Destination, HeadNorms, Within
from tuneserve_engine.backend.jax.model.block import (
    Layer,
    Rope,
    after_attention,
    before_attention,
    plus_lora,
    plus_shared,
    project_input,
)
from tuneserve_engine.backend.jax.model.block_lora import BlockLora
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.layer_stack import LayerStack, PackedTokens
from tuneserve_engine.backend.jax.model.layers import inverse_frequencies, rms_norm, rope_tables
from tuneserve_engine.backend.jax.model.lora import LoraRows
from tuneserve_engine.backend.jax.model.shared_lora import SharedLora
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes, most_parts
from tuneserve_engine.core.adapter import UNEMBED
from tuneserve_engine.core.backend_options import Remat
from tuneserve_engine.core.shapes import StaticShapes

_VECTORS = "norms and biases"
_INIT_STD = 0.02  # the initializer_range of every supported architecture


class Paged(NamedTuple):
    """Rows that continue from KV pages: one token each, or one whole page each."""

    positions: Int[Array, "B T"]  # below 0: padding, or an idle row
    table: Int[Array, "B E"]  # the pages of a row, in order
    pages: Pages
    layers: tuple[Layer, ...] | Layer
    """Each layer's own arrays, or all layers', from ``Decoder.stacked``."""


@runtime_checkable  # the tests check the types of arguments
class TrainingSpace(Protocol):
    """The buffers of a pass in training mode: ``training.tape.Workspace``."""

    def forward(
        self, stack: LayerStack, packed: PackedTokens, lora: LoraRows, x: Array
    ) -> tuple[Array, Any]:
        """Return the hidden states after the last layer, and what the backward pass needs."""
        ...


class Decoder(nnx.Module):
    """The base model.

    After ``train()``, a pass over a micro-batch leaves a tape, as ``remat`` says; after ``eval()``,
    the mode at construction, a pass leaves nothing. ``use_shapes`` sets the shapes of
    micro-batches, each of which is at most one chunk with ``is_one_chunk``.

    The weights are ``embed`` [V, D], ``layers[name]`` [L, *layer_shapes(config)[name]],
    ``final_norm`` [D] and, unless tied, ``unembed`` [V, D]. Its metadata ``most_parts`` says how
    devices may share it: see ``DeviceMesh.part_of``.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """Create random weights; under ``nnx.eval_shape``, only their shapes."""

        parts = most_parts(config)

        def weight(name: str, shape: tuple[int, ...]) -> nnx.Param[Array]:
            most = parts.get(name)
            if name.endswith("norm"):
                return nnx.Param(jnp.ones(shape, dtype), most_parts=most)
            if name.endswith("bias"):
                return nnx.Param(jnp.zeros(shape, dtype), most_parts=most)
            values = jax.random.normal(rngs.params(), shape, dtype) * _INIT_STD
            return nnx.Param(values, most_parts=most)

        self.config = config
        self.deterministic = True  # the attribute that nnx's train() and eval() set
        self.remat: Remat = "dots"
        self.block = 64
        self.chunk_blocks = 4
        self.is_one_chunk = False
        table = (config.vocab_size, config.hidden)
        stacked = {name: (config.layers, *shape) for name, shape in layer_shapes(config).items()}
        self.embed = weight("embed", table)
        self.layers = nnx.Dict({name: weight(name, shape) for name, shape in stacked.items()})
        self.final_norm = weight("final_norm", (config.hidden,))
        self.unembed = None if config.tied_embeddings else weight("unembed", table)

    def use_shapes(self, static_shapes: StaticShapes) -> None:
        """Compute micro-batches of these shapes from now on."""
        self.block = static_shapes.block
        self.chunk_blocks = static_shapes.chunk // static_shapes.block
        self.is_one_chunk = static_shapes.is_one_chunk

    def __call__(self, tokens: Int[Array, "B T"], lora: LoraRows | None) -> Float[Array, "B T D"]:
        """Return final-normed hidden states; position t sees positions 0 .. t of its own row."""
        count, length = tokens.shape
        hidden = self._rows(tokens, lora).reshape(count, -1, self.config.hidden)
        return self.final(hidden[:, :length])

    def continued(
        self, tokens: Int[Array, "B T"], view: Paged
    ) -> tuple[Float[Array, "B T D"], Pages]:
        """Return final-normed hidden states of rows that continue from KV pages, and the pages.

        The pages returned include the keys and values of the new tokens. ``view.layers`` comes from
        ``unstacked`` or ``stacked``.
        """
        hidden, pages = self.forward_layers(self.embedded(tokens), view, None)
        return self.final(hidden), pages

    def forward_layers(
        self,
        x: Float[Array, "B T D"],
        view: PackedTokens | Paged,
        lora: LoraRows | None,
        *,
        space: TrainingSpace | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Run the layers: the only code path through them. Return hidden states and by-products.

        The hidden states are those before the final norm. The by-product depends on the mode. Rows
        that continue from KV pages: the ``Pages`` with their keys and values. A micro-batch in
        evaluation mode: None. A micro-batch in training mode runs through ``space``: what ``space``
        needs for the backward pass.
        """
        if isinstance(view, Paged):
            return self._paged_layers(x, view)
        stack = self.stack()
        if self.deterministic:
            return stack.score(x, view, lora), None
        assert lora is not None and space is not None, "training needs adapters and a workspace"
        return space.forward(stack, view, lora, x)

    def stack(self) -> LayerStack:
        """Return the layers as programs on micro-batches take them."""
        weights = {name: weight[...] for name, weight in self.layers.items()}
        shapes = self.chunk_blocks, self.is_one_chunk
        return LayerStack(self.config, weights, self._rope, *shapes, self.remat)

    def _rows(self, tokens: Int[Array, "B T"], lora: LoraRows | None) -> Float[Array, "n S D"]:
        """Run rows as a micro-batch of one datum each, one after the other."""
        count, length = tokens.shape
        size = self.block
        each = -(-length // size)
        places = jnp.arange(each * size, dtype=jnp.int32)
        places = jnp.broadcast_to(places[None, :], (count, each * size))
        real = places < length
        row = jnp.arange(count, dtype=jnp.int32)
        slot = row if lora is None or lora.slot is None else lora.slot
        room = -(count * each) % self.chunk_blocks

        def blocks(rows: Array) -> Array:
            return jnp.pad(rows.reshape(count * each, size), ((0, room), (0, 0)))

        per_block = jnp.pad(jnp.repeat(row, each), (0, room))
        packed = PackedTokens(
            positions=blocks(jnp.where(real, places, 0)),
            segment_ids=blocks(jnp.where(real, row[:, None], -1)),
            start=per_block * each,
            blocks=jnp.int32(count * each),
            slot=slot[per_block],
        )
        ids = blocks(jnp.pad(tokens, ((0, 0), (0, each * size - length))))
        adapter_slots = None if lora is None else lora._replace(slot=None)
        hidden, _ = self.forward_layers(self.embedded(ids), packed, adapter_slots)
        return hidden[: count * each]

    def stacked(self, lora: LoraRows | SharedLora | None) -> Layer:
        """Return all layers as one ``Layer``, for programs that scan them while they decode.

        All norms and biases are one array [L, _]: a scan slices each array by a kernel of its own.
        """
        weights = {name: weight[...] for name, weight in self.layers.items()}
        vectors = [weights.pop(name) for name in _vector_sizes(self.config)]
        return Layer({**weights, _VECTORS: jnp.concatenate(vectors, axis=1)}, lora)

    def unstacked(self, lora: LoraRows | None) -> tuple[Layer, ...]:
        """Return every layer's own arrays, for programs that decode.

        A separate program makes them: XLA copies a slice of stacked weights before it multiplies
        with it, so a program that slices and decodes would copy the whole model in each call (half
        the speed on CPU).
        """
        a, b = ({}, {}) if lora is None else lora.layers()

        def layer(index: int) -> Layer:
            weights = {name: weight[...][index] for name, weight in self.layers.items()}
            if lora is None:
                return Layer(weights, None)
            mine = lora._replace(
                a={name: stacked[index] for name, stacked in a.items()},
                b={name: stacked[index] for name, stacked in b.items()},
            )
            return Layer(weights, mine)

        return tuple(layer(index) for index in range(self.config.layers))

    def _paged_layers(self, x: Float[Array, "B T D"], view: Paged) -> tuple[Array, Pages]:
        if not self.config.layers:
            return x, view.pages
        rope = self._rope(view.positions)
        table, positions = view.table, view.positions
        keys, values = list(view.pages.k), list(view.pages.v)
        part = positions[:, 0] // values[0].shape[-2]
        held = (part >= 0) & (part < table.shape[1])
        found = jnp.take_along_axis(table, jnp.where(held, part, 0)[:, None], axis=1)[:, 0]
        page = jnp.where(held, found, UNUSED_PAGE)
        to = Destination(page, positions[:, 0] % values[0].shape[-2])
        if isinstance(view.layers, Layer):
            return self._loop_paged_layers(x, view, view.layers, rope, to)
        for index, layer in enumerate(view.layers):
            x, keys[index], values[index] = _paged_layer(
                self.config,
                layer,
                x,
                rope,
                keys[index],
                values[index],
                to,
                table,
                positions,
                None,
            )
        return x, Pages(tuple(keys), tuple(values))

    def _loop_paged_layers(
        self, x: Float[Array, "B T D"], view: Paged, layers: Layer, rope: Rope, to: Destination
    ) -> tuple[Array, Pages]:
        """Loop over the layers. Layer l's pages follow those of layer l - 1 in one array."""
        adapters = layers.lora
        assert not isinstance(adapters, BlockLora), "those are for micro-batches"
        sizes = _vector_sizes(self.config)
        (keys,), (values,) = view.pages
        shapes = keys.shape, values.shape

        def layer(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, keys, values = carry
            weights = {
                name: jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False)
                for name, stacked in layers.weights.items()
            }
            vectors = jnp.split(weights.pop(_VECTORS), list(accumulate(sizes.values()))[:-1])
            weights |= zip(sizes, vectors, strict=True)
            lora = None if adapters is None else adapters.of_layer(number)
            found: tuple[Array, Array, Array] = _paged_layer(
                self.config,
                Layer(weights, lora),
                x,
                rope,
                keys,
                values,
                to,
                view.table,
                view.positions,
                (number, layers.weights[_VECTORS]),
            )
            return found

        keys, values = (x.reshape(-1, *x.shape[2:]) for x in (keys, values))
        x, keys, values = jax.lax.fori_loop(0, self.config.layers, layer, (x, keys, values))
        return x, Pages((keys.reshape(shapes[0]),), (values.reshape(shapes[1]),))

    def logits(
        self, hidden: Float[Array, "B T D"], lora: LoraRows | SharedLora | None
    ) -> Float[Array, "B T V"]:
        """Return float32 logits of final-normed hidden states, each row under its own adapter."""
        # dot_general on the table as stored: with a transposed copy and bfloat16 weights, XLA CPU
        # keeps two float32 copies of the head.
        out = jax.lax.dot_general(
            hidden,
            self.unembedding(),
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if isinstance(lora, SharedLora):
            (logits,) = plus_shared([out], hidden, (UNEMBED,), lora, jnp.float32)
        else:
            (logits,) = plus_lora([out], hidden.astype(jnp.float32), (UNEMBED,), lora)
        return logits

    def unembedding(self) -> Float[Array, "V D"]:
        """Return the output table, or the embedding if the two are tied."""
        return (self.embed if self.unembed is None else self.unembed)[...]

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.embed[...], tokens, axis=0)

    def final(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(x, self.final_norm[...], eps=self.config.rms_eps)

    def _rope(self, positions: Int[Array, "B T"]) -> Rope:
        config = self.config
        frequencies = inverse_frequencies(
            config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling
        )
        return rope_tables(positions, jnp.asarray(frequencies))


def _vector_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes of the norms and biases of a layer."""
    shapes = layer_shapes(config)
    return {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 1}


def _norm_starts(config: ModelConfig) -> HeadNorms | None:
    """Return where the norms of queries and keys are among the norms and biases of a layer."""
    if not config.qk_norm:
        return None
    sizes = _vector_sizes(config)
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    return HeadNorms(starts["q_norm"], starts["k_norm"], config.rms_eps)


@partial(jax.jit, static_argnums=0)  # so that it is traced once, not once per layer
def _paged_layer(  # noqa: PLR0913
    config: ModelConfig,
    layer: Layer,
    x: Array,
    rope: Rope,
    keys: Array,
    values: Array,
    to: Destination,
    table: Array,
    positions: Array,
    stacked: tuple[Array, Array] | None,
) -> tuple[Array, Array, Array]:
    """Return the layer's output, and its pages with the keys and values of ``x``.

    If the pages are those of all layers, ``stacked`` is the layer's number, and the norms and
    biases of all layers.
    """
    within = Within(stacked[0], config.layers, stacked[1], config.kv_heads) if stacked else None
    if within is not None and x.shape[1] == 1 and rotates_by_kernel(keys):
        q, k, v = (
            each.reshape(x.shape[0], -1, config.head_dim)
            for each in project_input(config, layer, x)
        )
        norms = _norm_starts(config)
        q, keys, values = rotate_position(q, k, v, rope, keys, values, to, within, norms)
    else:
        q, k, v = before_attention(config, layer, x, rope)
        page = to.page
        if within is not None:
            page = page + within.number * (keys.shape[0] // within.layers)
        if x.shape[1] == values.shape[2]:
            keys, values = write_page(keys, values, page, k, v)
        else:
            keys, values = write_position(keys, values, page, to.offset, k[:, 0], v[:, 0])
    attended = attend_pages(q, keys, values, table, positions, within)
    return after_attention(config, layer, x, attended), keys, values
