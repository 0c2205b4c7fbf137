"""Exact draws of an id, by 64 random bits from weights in fixed point: all sums are integers.

Float32 has 24 bits: a running sum over a vocabulary in float32 loses whole ids, and a uniform
number of 24 bits cannot reach them. Here weights have 44 bits behind the point. Wide numbers are
*limbs*: 16 bits each, in uint32, the lowest first, along a leading axis.

Dimension key: B rows, V vocabulary, S blocks of the vocabulary, W block width, P limbs.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 128
_HALF = 22
"""Bits of each half of a weight: a sum over a block of halves fits 32 bits."""
_LIMBS = 4
"""The number of limbs of a sum: 64 bits hold sums over up to 2^20 ids of weight 1."""
_LOW = 0xFFFF


def inverse_cdf(
    weights: Float[Array, "B V"], high: UInt32[Array, " B"], low: UInt32[Array, " B"]
) -> Int[Array, " B"]:
    """Return the id at which each row's running sum of weights passes its share of their total.

    The share is ``(high, low) / 2^64``. Weights are at most 1.

    An id of weight 0 is never drawn. Every id of positive weight is drawn for some numbers: its
    weight counts as at least 2^-44. Sums of blocks are searched first, then one block. Without any
    positive weight (NaN logits), the result is still an id of the vocabulary.
    """
    rows, vocab = weights.shape
    assert vocab < 2 ** (16 * _LIMBS - 2 * _HALF), "the sum of all weights would not fit"
    blocks = -(-vocab // _BLOCK)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab)))
    halves = _halves(padded.reshape(rows, blocks, _BLOCK))
    running = _running(_limbs(*(half.sum(-1, dtype=jnp.uint32) for half in halves)))
    goal = _share(jnp.stack([low & _LOW, low >> 16, high & _LOW, high >> 16]), running[..., -1])
    block = _first_past(running, goal)
    inside = (jnp.take_along_axis(half, block[:, None, None], axis=1)[:, 0] for half in halves)
    before = _entry(running, jnp.maximum(block - 1, 0))
    before = jnp.where((block > 0)[None, :], before, 0)
    offset = _first_past(_running(_limbs(*inside)), _minus(goal, before))
    return jnp.minimum(block * _BLOCK + offset, vocab - 1)


def _halves(weights: Float[Array, "..."]) -> tuple[Array, Array]:
    """Return the lower and the upper half of each weight's 44 bits."""
    scaled = jnp.where(weights > 0, weights, 0) * jnp.float32(2**_HALF)
    whole = jnp.floor(scaled)
    upper = whole.astype(jnp.int32).astype(jnp.uint32)
    # The difference is exact, and so is its product.
    lower = ((scaled - whole) * jnp.float32(2**_HALF)).astype(jnp.int32).astype(jnp.uint32)
    is_least = (weights > 0) & (upper == 0) & (lower == 0)
    return jnp.where(is_least, jnp.uint32(1), lower), upper


def _limbs(lower: UInt32[Array, "..."], upper: UInt32[Array, "..."]) -> UInt32[Array, "P ..."]:
    """Return ``lower + 2^22 upper`` for numbers below 2^30."""
    return _carried(
        jnp.stack(
            [
                lower & _LOW,
                (lower >> 16) + ((upper & 0x3FF) << (_HALF - 16)),
                upper >> (32 - _HALF) & _LOW,
                upper >> (48 - _HALF),
            ]
        )
    )


def _carried(limbs: UInt32[Array, "P ..."]) -> UInt32[Array, "P ..."]:
    """Return the same number with limbs of 16 bits; overflow of the last limb is dropped."""
    carry = jnp.zeros_like(limbs[0])
    out = []
    for limb in limbs:
        total = limb + carry
        out.append(total & _LOW)
        carry = total >> 16
    return jnp.stack(out)


def _running(parts: UInt32[Array, "P B S"]) -> UInt32[Array, "P B S"]:
    """Return running sums of up to 2^16 numbers."""
    return _carried(jnp.cumsum(parts, axis=-1, dtype=jnp.uint32))


def _share(random: UInt32[Array, "P B"], total: UInt32[Array, "P B"]) -> UInt32[Array, "P B"]:
    """Return ``random * total / 2^64``, rounded down, and so below the total."""
    columns = [jnp.zeros_like(total[0]) for _ in range(2 * _LIMBS)]
    for i in range(_LIMBS):
        for j in range(_LIMBS):
            product = random[i] * total[j]
            columns[i + j] += product & _LOW
            columns[i + j + 1] += product >> 16
    return _carried(jnp.stack(columns))[_LIMBS:]


def _minus(x: UInt32[Array, "P B"], y: UInt32[Array, "P B"]) -> UInt32[Array, "P B"]:
    """Return the difference ``x - y``, where x is at least y."""
    borrow = jnp.zeros_like(x[0])
    out = []
    for mine, other in zip(x, y, strict=True):
        left = mine + jnp.uint32(1 << 16) - other - borrow
        out.append(left & _LOW)
        borrow = 1 - (left >> 16)
    return jnp.stack(out)


def _first_past(running: UInt32[Array, "P B S"], goal: UInt32[Array, "P B"]) -> Int[Array, " B"]:
    """Return the first index whose running sum is above the goal; 0 if there is none."""
    return jnp.argmax(_above(running, goal[..., None]), axis=-1).astype(jnp.int32)


def _above(x: UInt32[Array, "P B S"], y: UInt32[Array, "P B 1"]) -> Bool[Array, "B S"]:
    above = jnp.zeros(x.shape[1:], bool)
    for mine, other in zip(x, y, strict=True):
        above = (mine > other) | ((mine == other) & above)
    return above


def _entry(x: UInt32[Array, "P B S"], index: Int[Array, " B"]) -> UInt32[Array, "P B"]:
    """Return each row's own entry."""
    return jnp.take_along_axis(x, index[None, :, None], axis=-1)[..., 0]
