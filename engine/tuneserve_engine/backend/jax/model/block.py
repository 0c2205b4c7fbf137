"""One decoder layer as two functions of tokens, before and after attention, free of modes.

Dimension key: B rows (or blocks), T positions, D hidden, F outputs of a projection, N query heads,
K key/value heads, H head_dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tuneserve_engine.backend.jax.mesh import own, whole
from tuneserve_engine.backend.jax.model import block_lora
from tuneserve_engine.backend.jax.model.block_lora import BlockLora
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.layers import add_bias, apply_rope, rms_norm
from tuneserve_engine.backend.jax.model.lora import LoraRows, lora_delta, wide_product
from tuneserve_engine.backend.jax.model.shared_lora import SharedLora, add_deltas
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes
from tuneserve_engine.core.adapter import ATTENTION, MLP

DOTS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "attended_residual",
    "gate_proj",
    "up_proj",
    block_lora.LOW,
)
"""Names of values that cost a product and that the backward pass may read."""

_QKV, _GATE_UP = ATTENTION[:3], MLP[:2]
BEFORE, AFTER = (_QKV,), (ATTENTION[3:], _GATE_UP, MLP[2:])
"""The projections before attention, and those after it, in groups with one input each."""

Lora = LoraRows | SharedLora | BlockLora
"""The adapters of rows, in the forms that a device and a program take."""


class Layer(NamedTuple):
    """One layer: its weights, named as in ``layer_shapes``, and its adapters."""

    weights: dict[str, Array]
    lora: Lora | None


Rope = tuple[Array, Array]
"""The cosine and the sine, each [B, T, 1, H/2]."""
QueriesKeysValues = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]


def whole_layer(config: ModelConfig, weights: dict[str, Array]) -> dict[str, Array]:
    """Return a layer's weights, gathered from all devices where this one has a part."""
    shapes = layer_shapes(config)
    return {name: whole(x, shapes[name][-1]) for name, x in weights.items()}


def before_attention(
    config: ModelConfig, layer: Layer, x: Float[Array, "B T D"], rope: Rope
) -> QueriesKeysValues:
    """Return queries, keys and values of the layer's input; RoPE rotates queries and keys."""
    weights = layer.weights

    def heads(y: Array, norm: str | None) -> Array:
        y = y.reshape(*y.shape[:2], -1, config.head_dim)
        if norm is None:
            return y
        if config.qk_norm:
            y = rms_norm(y, weights[norm], eps=config.rms_eps)
        return apply_rope(y, *rope)

    q, k, v = project_input(config, layer, x)
    return heads(q, "q_norm"), heads(k, "k_norm"), heads(v, None)


def project_input(config: ModelConfig, layer: Layer, x: Float[Array, "B T D"]) -> list[Array]:
    """Return queries, keys and values of the layer's input, before their norms and RoPE."""
    normed = rms_norm(x, layer.weights["input_norm"], eps=config.rms_eps)
    return project_all(normed, _QKV, layer)


def after_attention(
    config: ModelConfig, layer: Layer, x: Float[Array, "B T D"], attended: Float[Array, "B T NH"]
) -> Float[Array, "B T D"]:
    """Return the layer's output from its input and attention's output, heads side by side."""
    out = whole(project(attended, "o_proj", layer), x.shape[-1])
    x = _named(x + out, "attended_residual")
    normed = rms_norm(x, layer.weights["post_attention_norm"], eps=config.rms_eps)
    gate, up = project_all(normed, _GATE_UP, layer)
    return x + whole(project(jax.nn.silu(gate) * up, "down_proj", layer), x.shape[-1])


def project(x: Float[Array, "B T D"], name: str, layer: Layer) -> Float[Array, "B T F"]:
    """Apply a linear projection, its bias if it has one, and each row's adapter if it trains it.

    The terms are added in float32 and rounded once. Of a weight that several devices share, the
    device's own outputs are returned.
    """
    x = whole(x, layer.weights[name].shape[0])
    (out,) = _rounded(plus_lora([_product(x, name, layer)], x, (name,), layer.lora), x, (name,))
    return out


def project_all(
    x: Float[Array, "B T D"], names: Sequence[str], layer: Layer
) -> list[Float[Array, "B T _"]]:
    """Apply linear projections as ``project`` does, together if kernels read the adapters.

    Otherwise one after the other: their gradients are added in the order of these operations.
    """
    if layer.lora is None or isinstance(layer.lora, LoraRows):
        return [project(x, name, layer) for name in names]
    products = [_product(x, name, layer) for name in names]
    return _rounded(plus_lora(products, x, names, layer.lora), x, names)


def _product(x: Float[Array, "B T D"], name: str, layer: Layer) -> Float[Array, "B T F"]:
    out = wide_product("BTD,DF->BTF", x, layer.weights[name])
    bias = layer.weights.get(f"{name}_bias")
    return out if bias is None else add_bias(out, own(bias, out.shape[-1]))


def _rounded(outs: Sequence[Array], x: Array, names: Sequence[str]) -> list[Array]:
    return [_named(out.astype(x.dtype), name) for name, out in zip(names, outs, strict=True)]


def _named(x: Array, name: str) -> Array:
    named: Array = checkpoint_name(x, name)  # type: ignore[no-untyped-call]
    return named


def plus_lora(
    outs: Sequence[Float[Array, "B T _"]],
    x: Float[Array, "B T D"],
    names: Sequence[str],
    lora: Lora | None,
) -> list[Float[Array, "B T _"]]:
    """Return the projections' outputs, float32, each plus each row's own delta.

    If kernels read the adapters, they are rounded to x's dtype.
    """
    if lora is None:
        return list(outs)
    if isinstance(lora, BlockLora):
        return block_lora.add_deltas(outs, x, names, lora)
    if isinstance(lora, SharedLora):
        return plus_shared(outs, x, names, lora, x.dtype)
    scale = lora.of_row(lora.scale)
    return [
        out + lora_delta(x, lora.of_row(lora.a[name]), lora.of_row(lora.b[name]), scale)
        if name in lora.a
        else out
        for name, out in zip(names, outs, strict=True)
    ]


def plus_shared(
    outs: Sequence[Array],
    x: Float[Array, "B 1 D"],
    names: Sequence[str],
    lora: SharedLora,
    dtype: DTypeLike,
) -> list[Float[Array, "B 1 _"]]:
    """Return ``outs`` plus the deltas of adapters that rows share, rounded to ``dtype``."""
    rows = [out[:, 0] for out in outs]
    return [out[:, None] for out in add_deltas(rows, x[:, 0], names, lora, dtype)]
