"""One decoder for Llama 3.x, Qwen2.5 and Qwen3: layer weights stacked, one way through the layers.

Dimension key: L layers, B rows, T positions, D hidden, V vocabulary, N query heads, K key/value
heads, H head_dim, C cache capacity in positions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.adapters import UNEMBED
from tuneserve_engine.backend.jax.lora import LoraRows
from tuneserve_engine.backend.jax.models.block import (
    Layer,
    QueriesKeysValues,
    Rope,
    after_attention,
    before_attention,
    layer_shapes,
    plus_lora,
)
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.layers import (
    attend,
    inverse_frequencies,
    rms_norm,
    rope_tables,
)
from tuneserve_engine.backend.jax.stack import Remat, Stack, Stream
from tuneserve_engine.backend.jax.tape import TrainingPass, Workspace

_INIT_STD = 0.02  # as every supported architecture's initializer_range


class KVCache(NamedTuple):
    """Keys and values of positions 0 .. C-1, an array per layer: a stacked cache carried through a
    loop over layers is copied at every step (1.2-2.9 times slower on CPU)."""

    k: tuple[Array, ...]  # L of [B, K, H, C]
    v: tuple[Array, ...]  # L of [B, K, C, H]

    @property
    def capacity(self) -> int:
        return int(self.v[0].shape[2])


class Decoding(NamedTuple):
    """One token of every row, after what the cache holds."""

    positions: Int[Array, "B 1"]
    cache: KVCache
    layers: tuple[Layer, ...]


class Taped(NamedTuple):
    """A forward pass in training mode, ready for ``run.reverse``."""

    run: TrainingPass
    space: Workspace


class Decoder(nnx.Module):
    """The base model. ``train()`` makes passes over streams leave a tape, as ``remat`` says;
    ``eval()``, the mode at construction, makes them leave nothing. ``block`` and ``chunk_blocks``
    are the shapes of streams.

    Its weights: ``embed`` [V, D], ``layers[name]`` [L, *layer_shapes(config)[name]], ``final_norm``
    [D] and, unless tied, ``unembed`` [V, D].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """Random weights; under ``nnx.eval_shape``, their shapes only."""

        def weight(name: str, shape: tuple[int, ...]) -> nnx.Param[Array]:
            if name.endswith("norm"):
                return nnx.Param(jnp.ones(shape, dtype))
            if name.endswith("bias"):
                return nnx.Param(jnp.zeros(shape, dtype))
            return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * _INIT_STD)

        self.config = config
        self.deterministic = True  # the attribute that nnx's train() and eval() set
        self.remat: Remat = "dots"
        self.block = 64
        self.chunk_blocks = 4
        table = (config.vocab_size, config.hidden)
        stacked = {name: (config.layers, *shape) for name, shape in layer_shapes(config).items()}
        self.embed = weight("embed", table)
        self.layers = nnx.Dict({name: weight(name, shape) for name, shape in stacked.items()})
        self.final_norm = weight("final_norm", (config.hidden,))
        self.unembed = None if config.tied_embeddings else weight("unembed", table)

    def __call__(self, tokens: Int[Array, "B T"], lora: LoraRows | None) -> Float[Array, "B T D"]:
        """Final-normed hidden states; position t sees positions 0 .. t of its own row."""
        length = tokens.shape[1]
        hidden, _ = self._rows(tokens, lora, keep_cache=False)
        return self.final(hidden.reshape(tokens.shape[0], -1, self.config.hidden)[:, :length])

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lora: LoraRows | None,
        capacity: int,
        length: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """``__call__`` and the cache after it, with room for ``capacity`` positions (static).

        A row shorter than T is padded at its end: decoding starts at the row's own length and
        overwrites what the padding left in the cache before any position sees it. With one row,
        ``length`` says how long it is, and padding costs nothing.
        """
        count, padded = tokens.shape
        if capacity < padded:
            raise ValueError(f"{padded} positions do not fit a cache of {capacity}")
        hidden, kept = self._rows(tokens, lora, keep_cache=True, length=length)
        assert kept is not None
        keys, values = (
            x.reshape(x.shape[0], count, -1, *x.shape[2:]).transpose(0, 1, 3, 2, 4, 5) for x in kept
        )  # [L, B, K, T / S, S, H]
        keys, values = (
            x.reshape(*x.shape[:3], -1, x.shape[5])[:, :, :, :padded] for x in (keys, values)
        )
        none = (0, 0)
        room = (0, capacity - padded)
        cache = KVCache(
            k=tuple(jnp.pad(k.transpose(0, 1, 3, 2), (none, none, none, room)) for k in keys),
            v=tuple(jnp.pad(v, (none, none, room, none)) for v in values),
        )
        return self.final(hidden.reshape(count, -1, self.config.hidden)[:, :padded]), cache

    def decode(
        self,
        tokens: Int[Array, " B"],
        positions: Int[Array, " B"],
        cache: KVCache,
        layers: tuple[Layer, ...],
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """One token per row, written at the row's position, attending to the cache up to there.

        ``layers`` are those of ``unstacked``. A row whose position is not below the capacity writes
        nothing: a finished row idles so.
        """
        x = self.embedded(tokens[:, None])
        hidden, updated = self.forward_layers(x, Decoding(positions[:, None], cache, layers), None)
        assert isinstance(updated, KVCache)
        return self.final(hidden)[:, 0], updated

    def forward_layers(
        self,
        x: Float[Array, "B T D"],
        view: Stream | Decoding,
        lora: LoraRows | None,
        *,
        keep_cache: bool = False,
        space: Workspace | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The only way through the layers: hidden states before the final norm, and what is left.

        Decoding, every layer updates its own array of the cache: the updated cache. A stream in
        evaluation mode: its keys and values, if asked for. A stream in training mode goes through
        ``space``, whose tape serves the backward pass: a ``Taped``.
        """
        if isinstance(view, Decoding):
            return self._decode_layers(x, view)
        stack = self.stack()
        if self.deterministic:
            return stack.score(x, view, lora, keep_cache=keep_cache)
        assert lora is not None and space is not None, "training needs adapters and a workspace"
        run = TrainingPass(stack, view, lora)
        hidden, tape = run.forward(space.tape, x)
        return hidden, Taped(run, space._replace(tape=tape))

    def stack(self) -> Stack:
        """The layers, as programs on streams see them."""
        weights = {name: weight[...] for name, weight in self.layers.items()}
        return Stack(self.config, weights, self._rope, self.chunk_blocks, self.remat)

    def _rows(
        self,
        tokens: Int[Array, "B T"],
        lora: LoraRows | None,
        *,
        keep_cache: bool,
        length: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "n S D"], Any]:
        """Rows as a stream of one datum each, behind one another."""
        count, padded = tokens.shape
        size = self.block
        each = -(-padded // size)
        places = jnp.arange(each * size, dtype=jnp.int32)
        places = jnp.broadcast_to(places[None, :], (count, each * size))
        real = places < (padded if length is None else length)
        datum = jnp.where(real, jnp.arange(count, dtype=jnp.int32)[:, None], -1)
        slot = jnp.arange(count, dtype=jnp.int32)
        if lora is not None and lora.slot is not None:
            slot = lora.slot
        used = count * each if length is None else (length + size - 1) // size
        room = -(count * each) % self.chunk_blocks

        def blocks(rows: Array) -> Array:
            return jnp.pad(rows.reshape(count * each, size), ((0, room), (0, 0)))

        ids = blocks(jnp.pad(tokens, ((0, 0), (0, each * size - padded))))
        per_block = jnp.pad(jnp.repeat(jnp.arange(count, dtype=jnp.int32), each), (0, room))
        stream = Stream(
            positions=blocks(jnp.where(real, places, 0)),
            datum=blocks(datum),
            start=per_block * each,
            blocks=jnp.int32(used),
            slot=slot[per_block],
        )
        hidden, kept = self.forward_layers(
            self.embedded(ids),
            stream,
            None if lora is None else lora._replace(slot=None),
            keep_cache=keep_cache,
        )
        n = count * each
        return hidden[:n], None if kept is None else tuple(x[:, :n] for x in kept)

    def unstacked(self, lora: LoraRows | None) -> tuple[Layer, ...]:
        """Every layer's own arrays. A program that decodes is given them by another one: XLA copies
        a slice of stacked weights before it multiplies with it, and a program that slices and
        decodes copies the whole model in each call (half the speed on CPU)."""
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

    def _decode_layers(
        self, x: Float[Array, "B 1 D"], view: Decoding
    ) -> tuple[Float[Array, "B 1 D"], KVCache]:
        rope = self._rope(view.positions)
        keys, values = list(view.cache.k), list(view.cache.v)
        for index, layer in enumerate(view.layers):
            qkv = before_attention(self.config, layer, x, rope)
            attended, keys[index], values[index] = _attend_to_cache(
                view.positions, keys[index], values[index], qkv
            )
            x = after_attention(self.config, layer, x, attended.reshape(*x.shape[:2], -1))
        return x, KVCache(tuple(keys), tuple(values))

    def logits(self, hidden: Float[Array, "B T D"], lora: LoraRows | None) -> Float[Array, "B T V"]:
        """Float32 logits of final-normed hidden states, each row under its own adapter."""
        # dot_general on the table as it lies: with a transposed copy and bfloat16 weights, XLA CPU
        # keeps two float32 copies of the head.
        out = jax.lax.dot_general(
            hidden,
            self.unembedding(),
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return plus_lora(out, hidden.astype(jnp.float32), UNEMBED, lora)

    def unembedding(self) -> Float[Array, "V D"]:
        """The output table; the embedding itself where the two are tied."""
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


def _attend_to_cache(
    positions: Int[Array, "B 1"], keys: Array, values: Array, qkv: QueriesKeysValues
) -> tuple[Array, Array, Array]:
    """Writes each row's new key and value at its position, then attends to the cache up to it."""
    q, k, v = qkv
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    index = jnp.arange(values.shape[2], dtype=jnp.int32)
    visible = index[None, None, :] <= positions[:, :, None]
    keys = keys.at[rows, :, :, positions[:, 0]].set(k[:, 0], mode="drop")
    values = values.at[rows, :, positions[:, 0], :].set(v[:, 0], mode="drop")
    return attend(q, keys, values, visible), keys, values
