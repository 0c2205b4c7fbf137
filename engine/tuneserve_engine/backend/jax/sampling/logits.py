"""From logits to tokens and logprobs: pure, row by row, with every option a traced value.

Dimension key: B rows, V vocabulary, K ids or draws per row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from tuneserve_engine.backend.jax.sampling.exact_draw import inverse_cdf

AnyArray = Array | np.ndarray[Any, np.dtype[Any]]

_SAMPLES, _ALTERNATIVES, REDRAWS = 0, 1, 1 << 30
"""The families of draws. They are added to twice a number: of samples (up to 256) and of their
redraws, or of positions, so no two draws have the same counter."""
_TINY = float(np.finfo(np.float32).tiny)


class RowParams(NamedTuple):
    """The sampling options of each row: arrays, so that no value of them compiles anything."""

    seed: AnyArray  # [B, 2] uint32, high half first
    sample: AnyArray  # [B] int32 index of the sample within its request
    temperature: AnyArray  # [B] float32, 0 = greedy
    top_k: AnyArray  # [B] int32, below 1 = all
    top_p: AnyArray  # [B] float32, 1 = all


def seed_halves(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the seed's low 64 bits as key data; negative seeds count in two's complement."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], dtype=np.uint32)


def draw(
    logits: Float[Array, "B V"],
    step: Int[Array, " B"],
    rows: RowParams,
    *,
    stream: int = _SAMPLES,
) -> Int[Array, " B"]:
    """Return each row's token number ``step``.

    It depends on the row's seed, sample index, step and logits alone. Temperature 0 takes the most
    likely token. Draws of another ``stream`` are independent.
    """
    temperature = jnp.asarray(rows.temperature)
    weights = jnp.exp(at_temperature(logits, temperature))
    weights = nucleus(logits, weights, jnp.asarray(rows.top_k), jnp.asarray(rows.top_p))
    words = jax.vmap(_words, in_axes=(0, None, 0, 0))(
        jnp.asarray(rows.seed), stream, jnp.asarray(rows.sample), step
    )
    drawn = inverse_cdf(weights, *words)
    return jnp.where(temperature > 0, drawn, _argmax(logits))


def drawn_logprobs(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"], tokens: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Return the logprob of each row's token at its temperature; temperature 0 counts as 1.

    It is that of the whole distribution: before top-k and top-p.
    """
    return token_logprobs(at_temperature(logits, temperature), tokens[:, None])[:, 0]


def at_temperature(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Return ``(logits - max) / temperature``; temperature 0 counts as 1. The largest is exactly 0.

    Logits are shifted before the division, so that a temperature near 0 gives -inf and never NaN.
    """
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, _TINY), 1.0)
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor[:, None]


def nucleus(
    logits: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Return the weights of the tokens that may be drawn, and 0 for the others.

    Drawable tokens are the top-k by logit and, of their distribution, the nucleus of top-p.
    """
    vocab = logits.shape[-1]
    limits_k = (top_k > 0) & (top_k < vocab)
    limits_p = top_p < 1

    def by_count() -> Array:
        count = jnp.where(limits_k, top_k, vocab).astype(jnp.float32)
        return keep_largest(logits, jnp.ones_like(logits), count) | ~limits_k[:, None]

    def by_mass() -> Array:
        left = jnp.where(kept, weights, 0.0)
        mass = jnp.maximum(top_p, _TINY) * jnp.sum(left, axis=-1)
        largest = keep_largest(jnp.where(kept, logits, -jnp.inf), left, mass)
        both: Array = kept & (largest | ~limits_p[:, None])
        return both

    # Sorting a vocabulary costs hundreds of log-sum-exps: only batches that ask pay for a search.
    # Without one, a branch copies its result, which is why that is no array of floats.
    with jax.named_scope("top_k"):
        everything = partial(jnp.ones, logits.shape, jnp.bool_)
        kept = jax.lax.cond(jnp.any(limits_k), by_count, everything)
    with jax.named_scope("top_p"):
        kept = jax.lax.cond(jnp.any(limits_p), by_mass, lambda: kept)
    return jnp.where(kept, weights, 0.0)


def keep_largest(
    logits: Float[Array, "B V"], mass: Float[Array, "B V"], target: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Keep the fewest tokens, largest logits first, whose mass reaches the target.

    Ties are kept by lowest id; tied logits must have equal mass. The smallest kept logit is found
    bit by bit, not by sorting.
    """
    keys = _ascending_bits(logits)

    def narrow(bit: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(31) - bit.astype(jnp.uint32)))
        reached = jnp.sum(jnp.where(keys >= candidate[:, None], mass, 0.0), axis=-1) >= target
        return jnp.where(reached, candidate, threshold)

    threshold: Array = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(logits.shape[:1], jnp.uint32))
    above, tied = keys > threshold[:, None], keys == threshold[:, None]
    missing = target - jnp.sum(jnp.where(above, mass, 0.0), axis=-1)
    earlier_ties = (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) - 1).astype(jnp.float32)
    return above | (tied & (earlier_ties * mass < missing[:, None]))


def _ascending_bits(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Return unsigned integers in the order of the floats; both zeros map to one integer."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def token_logprobs(logits: Float[Array, "B V"], ids: Int[Array, "B K"]) -> Float[Array, "B K"]:
    """Return the log-softmax at the ids; 0 where an id is negative."""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    picked = jnp.take_along_axis(shifted, jnp.maximum(ids, 0), axis=-1)
    return jnp.where(ids >= 0, picked - total, 0.0)


def top_logprobs(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"], k: int
) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """Return the k most likely ids of each row, best first, ties by lowest id; k is static."""
    scaled = at_temperature(logits, temperature)
    _, ids = jax.lax.top_k(scaled, k)
    return ids, token_logprobs(scaled, ids)


def draw_alternatives(
    logits: Float[Array, "B V"],
    seed: UInt32[Array, " 2"],
    position: Int[Array, " B"],
    temperature: Float[Array, " B"],
    k: int,
) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """Return k independent draws per row and their logprobs at the temperature; k is static.

    Draw d at a position depends on (seed, position, d, logits) alone, whatever k is.
    """
    scaled = at_temperature(logits, temperature)
    index = jnp.arange(k, dtype=jnp.int32)
    per_row = jax.vmap(_words, in_axes=(None, None, 0, None))
    words = jax.vmap(per_row, in_axes=(None, None, None, 0), out_axes=1)(
        seed, _ALTERNATIVES, position, index
    )
    drawn = jax.vmap(inverse_cdf, in_axes=(None, 1, 1), out_axes=1)(jnp.exp(scaled), *words)
    ids = jnp.where(temperature[:, None] > 0, drawn, _argmax(logits)[:, None])
    return ids, token_logprobs(scaled, ids)


def _words(seed: Array, stream: int, outer: Array, inner: Array) -> tuple[Array, Array]:
    """Return 64 random bits, a function of the arguments, as two words.

    The generator is applied once, to a counter made of the numbers. Deriving a key for each number
    would cost four times the work and four times the time to compile it.
    """
    counter = jnp.stack([2 * outer + stream, inner]).astype(jnp.uint32)
    bits = threefry_2x32(seed, counter)
    return bits[0], bits[1]


def _argmax(x: Array) -> Array:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)
