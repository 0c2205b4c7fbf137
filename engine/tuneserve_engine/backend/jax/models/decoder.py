"""One decoder for Llama 3.x, Qwen2.5 and Qwen3: layer weights stacked, one way through the layers.

Dimension key: L layers, B rows, T positions, D hidden, V vocabulary, N query heads, K key/value
heads, H head_dim, C cache capacity in positions.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.adapters import UNEMBED
from tuneserve_engine.backend.jax.lora import LoraRows, lora_delta
from tuneserve_engine.backend.jax.models.config import ModelConfig
from tuneserve_engine.backend.jax.models.layers import (
    add_bias,
    apply_rope,
    attend,
    inverse_frequencies,
    rms_norm,
    rope_tables,
)

_INIT_STD = 0.02  # as every supported architecture's initializer_range


class KVCache(NamedTuple):
    """Keys and values of positions 0 .. C-1, an array per layer: a stacked cache carried through a
    loop over layers is copied at every step (1.2-2.9 times slower on CPU)."""

    k: tuple[Array, ...]  # L of [B, K, H, C]
    v: tuple[Array, ...]  # L of [B, K, C, H]

    @property
    def capacity(self) -> int:
        return int(self.v[0].shape[2])


class Layer(NamedTuple):
    """One layer: its weights by the names of ``layer_shapes``, its adapters without L."""

    weights: dict[str, Array]
    lora: LoraRows | None


Rope = tuple[Array, Array]
"""Cosine and sine, each [B, T, 1, H/2]."""
KeysValues = tuple[Array, Array]
"""One layer's part of a cache: [B, K, H, C] and [B, K, C, H]."""
Attention = Callable[[Array, Array, Array], tuple[Array, KeysValues]]
"""From q, k, v, each [B, T, heads, H], the output [B, T, N, H] and the part of the cache."""


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of one layer; a projection is [d_in, d_out]."""
    hidden, inner, head = config.hidden, config.intermediate, config.head_dim
    queries, keys = config.heads * head, config.kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "post_attention_norm": (hidden,),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    if config.attention_bias:
        shapes |= {"q_proj_bias": (queries,), "k_proj_bias": (keys,), "v_proj_bias": (keys,)}
    if config.output_bias:
        shapes["o_proj_bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"gate_proj_bias": (inner,), "up_proj_bias": (inner,)}
        shapes["down_proj_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    return shapes


class Decoder(nnx.Module):
    """The base model. ``train()`` makes the backward pass recompute each layer from its input;
    ``eval()``, the mode at construction, lets autodiff keep what it wants.

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
        table = (config.vocab_size, config.hidden)
        stacked = {name: (config.layers, *shape) for name, shape in layer_shapes(config).items()}
        self.embed = weight("embed", table)
        self.layers = nnx.Dict({name: weight(name, shape) for name, shape in stacked.items()})
        self.final_norm = weight("final_norm", (config.hidden,))
        self.unembed = None if config.tied_embeddings else weight("unembed", table)

    def __call__(self, tokens: Int[Array, "B T"], lora: LoraRows | None) -> Float[Array, "B T D"]:
        """Final-normed hidden states; position t sees positions 0 .. t of its own row."""
        hidden, _ = self.forward_layers(self._embed(tokens), _from_start(tokens), lora)
        return self._final_norm(hidden)

    def prefill(
        self, tokens: Int[Array, "B T"], lora: LoraRows | None, capacity: int
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """``__call__`` and the cache after it, with room for ``capacity`` positions (static).

        A row shorter than T is padded at its end: decoding starts at the row's own length and
        overwrites what the padding left in the cache before any position sees it.
        """
        room = capacity - tokens.shape[1]
        if room < 0:
            raise ValueError(f"{tokens.shape[1]} positions do not fit a cache of {capacity}")
        x, positions = self._embed(tokens), _from_start(tokens)
        hidden, kept = self.forward_layers(x, positions, lora, keep_cache=True)
        assert kept is not None
        none = (0, 0)
        cache = KVCache(
            k=tuple(jnp.pad(k, (none, none, none, (0, room))) for k in kept.k),
            v=tuple(jnp.pad(v, (none, none, (0, room), none)) for v in kept.v),
        )
        return self._final_norm(hidden), cache

    def decode(
        self,
        tokens: Int[Array, " B"],
        positions: Int[Array, " B"],
        cache: KVCache,
        lora: LoraRows | None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """One token per row, written at the row's position, attending to the cache up to there.

        A row whose position is not below the capacity writes nothing: a finished row idles so.
        """
        x = self._embed(tokens[:, None])
        hidden, updated = self.forward_layers(x, positions[:, None], lora, cache=cache)
        assert updated is not None
        return self._final_norm(hidden)[:, 0], updated

    def forward_layers(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        lora: LoraRows | None,
        *,
        keep_cache: bool = False,
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """The only way through the layers: hidden states before the final norm.

        Without a cache, a scan whose rows attend to themselves; ``keep_cache`` returns their keys
        and values. With a cache, T is 1 and every layer updates its own array of it.
        """
        rope = self._rope(positions)
        weights = {name: weight[...] for name, weight in self.layers.items()}
        stacked = (weights, ({}, {}) if lora is None else lora.layers())

        def run(x: Array, sliced: Any, attention: Attention) -> tuple[Array, KeysValues]:
            weights, (a, b) = sliced
            layer = Layer(weights, None if lora is None else lora._replace(a=a, b=b))
            return block(self.config, layer, x, rope, attention)

        if cache is not None:
            updated: list[KeysValues] = []
            for index, old in enumerate(zip(cache.k, cache.v, strict=True)):
                sliced = jax.tree.map(itemgetter(index), stacked)
                x, new = run(x, sliced, _cached_attention(positions, old))
                updated.append(new)
            k, v = zip(*updated, strict=True)
            return x, KVCache(k, v)

        causal = _causal_attention(x.shape[1])

        def body(x: Array, sliced: Any) -> tuple[Array, KeysValues | None]:
            x, kept = run(x, sliced, causal)
            return x, kept if keep_cache else None

        if not self.deterministic:
            body = jax.checkpoint(body, prevent_cse=False)  # a scan needs no barrier against CSE
        x, kept = jax.lax.scan(body, x, stacked)
        return x, None if kept is None else KVCache(tuple(kept[0]), tuple(kept[1]))

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
        return _plus_lora(out, hidden.astype(jnp.float32), UNEMBED, lora)

    def unembedding(self) -> Float[Array, "V D"]:
        """The output table; the embedding itself where the two are tied."""
        return (self.embed if self.unembed is None else self.unembed)[...]

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.embed[...], tokens, axis=0)

    def _final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(x, self.final_norm[...], eps=self.config.rms_eps)

    def _rope(self, positions: Int[Array, "B T"]) -> Rope:
        config = self.config
        frequencies = inverse_frequencies(
            config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling
        )
        return rope_tables(positions, jnp.asarray(frequencies))


def block(
    config: ModelConfig,
    layer: Layer,
    x: Float[Array, "B T D"],
    rope: Rope,
    attention: Attention,
) -> tuple[Float[Array, "B T D"], KeysValues]:
    """The hidden states after one layer, and what ``attention`` keeps of it."""
    weights = layer.weights

    def heads(normed: Array, name: str, norm: str | None) -> Array:
        y = project(normed, name, layer)
        y = y.reshape(*y.shape[:2], -1, config.head_dim)
        if norm is None:
            return y
        if config.qk_norm:
            y = rms_norm(y, weights[norm], eps=config.rms_eps)
        return apply_rope(y, *rope)

    normed = rms_norm(x, weights["input_norm"], eps=config.rms_eps)
    q = heads(normed, "q_proj", "q_norm")
    k = heads(normed, "k_proj", "k_norm")
    v = heads(normed, "v_proj", None)
    attended, kept = attention(q, k, v)
    x = x + project(attended.reshape(*x.shape[:2], -1), "o_proj", layer)
    normed = rms_norm(x, weights["post_attention_norm"], eps=config.rms_eps)
    gate = jax.nn.silu(project(normed, "gate_proj", layer))
    up = project(normed, "up_proj", layer)
    return x + project(gate * up, "down_proj", layer), kept


def project(x: Float[Array, "B T D"], name: str, layer: Layer) -> Float[Array, "B T F"]:
    """A linear projection with its bias, if it has one, and each row's adapter, if it trains it."""
    out = jnp.einsum("BTD,DF->BTF", x, layer.weights[name])
    out = add_bias(out, layer.weights.get(f"{name}_bias"))
    return _plus_lora(out, x, name, layer.lora)


def _plus_lora(
    out: Float[Array, "B T F"], x: Float[Array, "B T D"], name: str, lora: LoraRows | None
) -> Float[Array, "B T F"]:
    if lora is None or name not in lora.a:
        return out
    a, b, scale = lora.of_row(lora.a[name]), lora.of_row(lora.b[name]), lora.of_row(lora.scale)
    return out + lora_delta(x, a, b, scale)


def _from_start(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)


def _causal_attention(length: int) -> Attention:
    """Rows attend to themselves; keeps their keys and values in the cache's layout."""
    index = jnp.arange(length, dtype=jnp.int32)
    visible = index[None, :, None] >= index[None, None, :]

    def attention(q: Array, k: Array, v: Array) -> tuple[Array, KeysValues]:
        k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        return attend(q, k, v, visible), (k, v)

    return attention


def _cached_attention(positions: Int[Array, "B 1"], old: KeysValues) -> Attention:
    """Writes each row's new key and value at its position, then attends to the cache up to it."""
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    index = jnp.arange(old[1].shape[2], dtype=jnp.int32)
    visible = index[None, None, :] <= positions[:, :, None]

    def attention(q: Array, k: Array, v: Array) -> tuple[Array, KeysValues]:
        keys = old[0].at[rows, :, :, positions[:, 0]].set(k[:, 0], mode="drop")
        values = old[1].at[rows, :, positions[:, 0], :].set(v[:, 0], mode="drop")
        return attend(q, keys, values, visible), (keys, values)

    return attention
