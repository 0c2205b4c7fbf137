"""The arithmetic of one decoder layer, free of modules and state.

Dimension key: B rows, T query positions, S key positions, D hidden, N query heads, K key/value
heads, G = N / K, H head_dim, F outputs of a projection.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.model.config import Llama3Scaling
from tuneserve_engine.backend.jax.target import target_platform


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*B D"]:
    """Apply root-mean-square normalisation over the last axis, in float32; return x's dtype."""

    def normed(x: Array) -> Array:
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)

    def scaled(x: Array) -> Array:
        return normed(x) * _along_last(weight, x.ndim)

    is_decoding = x.shape[1:2] == (1,)  # its logprobs are not those of training in any case
    if is_decoding or target_platform() != "gpu":
        return scaled(x)
    # XLA makes one kernel of a norm alone, unless the backward pass keeps the root. A kernel that
    # does more adds in another order, and the logprobs of training would differ from those of
    # scoring.
    normed = jax.checkpoint(normed, prevent_cse=False)
    return _materialised(scaled(_materialised(x)))


@jax.custom_jvp
def _materialised(x: Array) -> Array:
    """Return x, which no kernel computes together with what comes after."""
    behind: Array = jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
    return behind


@_materialised.defjvp
def _tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _materialised(*primals), tangents[0]


def _along_last(vector: Float[Array, " D"], ndim: int) -> Array:
    """Return the vector with leading axes of 1, so that it broadcasts without rank promotion."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def add_bias(x: Float[Array, "*B F"], bias: Float[Array, " F"] | None) -> Float[Array, "*B F"]:
    """Return ``x + bias`` in x's dtype, or x itself if the projection has no bias."""
    return x if bias is None else x + _along_last(bias.astype(x.dtype), x.ndim)


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: Llama3Scaling | None
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return RoPE's angle per position and pair, [H/2]; Llama 3.1's scaling as in transformers."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if scaling is None:
        return base
    wavelength = 2 * math.pi / base
    longest_kept = scaling.original_context_length / scaling.high_freq_factor
    shortest_stretched = scaling.original_context_length / scaling.low_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = (scaling.original_context_length / wavelength - scaling.low_freq_factor) / span
    blended = (1 - kept) * base / scaling.factor + kept * base
    stretched = np.where(wavelength > shortest_stretched, base / scaling.factor, blended)
    return np.where(wavelength < longest_kept, base, stretched).astype(np.float32)


def rope_tables(
    positions: Int[Array, "B T"], frequencies: Float[Array, " H2"]
) -> tuple[Float[Array, "B T 1 H2"], Float[Array, "B T 1 H2"]]:
    """Return cosine and sine of every position's angles, float32, to broadcast over heads."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H2"], sin: Float[Array, "B T 1 H2"]
) -> Float[Array, "B T N H"]:
    """Rotate each head's halves as pairs (``rotate_half``), in float32; return x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)
