"""The shapes of a decoder's weights, and how devices divide them. Needs no JAX: plans use it."""

from math import gcd

from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.model.tile import TILE
from tuneserve_engine.core.adapter import ATTENTION, MLP


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of one layer; a projection is [d_in, d_out]."""
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


def most_parts(config: ModelConfig) -> dict[str, int]:
    """Return the number of parts into which the outputs of each projection can be divided at most.

    Devices share these outputs. A sum over a product's inputs is never divided, so its bits do not
    depend on the number of devices. The heads of a device are whole, with their keys and values,
    and so are the tiles that kernels compute. All other weights are whole on each device.
    """
    keys = gcd(config.kv_heads, _units(config.kv_heads * config.head_dim))
    parts = dict.fromkeys(ATTENTION[:3], keys) | {ATTENTION[3]: _units(config.hidden)}
    return (
        parts
        | dict.fromkeys(MLP[:2], _units(config.intermediate))
        | {MLP[2]: _units(config.hidden)}
    )


def _units(width: int) -> int:
    return width // TILE if width % TILE == 0 else width
