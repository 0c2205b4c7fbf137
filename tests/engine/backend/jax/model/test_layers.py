"""The arithmetic of a layer: normalisation, biases and rotary positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuneserve_engine.backend.jax.model.config import Llama3Scaling
from tuneserve_engine.backend.jax.model.layers import (
    add_bias,
    apply_rope,
    inverse_frequencies,
    rms_norm,
    rope_tables,
)


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x = np.random.default_rng(3).normal(size=(4, 64)).astype(jnp.bfloat16)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    got = rms_norm(jnp.asarray(x), jnp.ones(64, jnp.bfloat16), eps=1e-6)
    np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_a_norm_leaves_its_input_only_for_the_backward_pass(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dy = jnp.asarray(np.random.default_rng(4).normal(size=(2, 4, 64)), dtype)
    weight = jnp.linspace(0.5, 2, 64, dtype=dtype)

    def passes() -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
        y, pullback = jax.vjp(lambda x: rms_norm(x, weight, eps=1e-6), x)
        kept = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.size != weight.size]
        return [np.asarray(y), np.asarray(pullback(dy)[0])], kept

    want, usual = passes()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got, kept = passes()
    np.testing.assert_array_equal(got, want)
    assert kept == [x.shape] and (*x.shape[:-1], 1) in usual  # the root


def test_on_a_gpu_a_norm_is_a_kernel_of_its_own_except_in_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A barrier before it and one behind it; the backward pass has none."""

    def barriers(x: jax.Array) -> tuple[int, int]:
        def norm(x: jax.Array) -> jax.Array:
            return rms_norm(x, jnp.ones(64), eps=1e-6)

        _, pullback = jax.vjp(norm, x)
        forward, backward = (str(jax.make_jaxpr(each)(x)) for each in (norm, pullback))
        return forward.count("optimization_barrier"), backward.count("optimization_barrier")

    chunk, step = jnp.ones((2, 4, 64)), jnp.ones((2, 1, 64))
    assert barriers(chunk) == (0, 0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert barriers(chunk) == (2, 0)
    assert barriers(step) == (0, 0)


def test_annotated_shapes_are_checked_in_tests() -> None:
    with pytest.raises(TypeError, match="weight"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(1), eps=1e-6)


def test_a_bias_is_added_in_the_type_of_the_input() -> None:
    x = jnp.ones((2, 3), jnp.bfloat16)
    assert add_bias(x, None) is x
    biased = add_bias(x, jnp.asarray([1.0, 2.0, 3.0], jnp.float32))
    assert biased.dtype == jnp.bfloat16
    assert np.asarray(biased, np.float32).tolist() == [[2.0, 3.0, 4.0]] * 2


def test_frequencies_fall_by_the_root_of_theta() -> None:
    found = inverse_frequencies(6, theta=64.0, scaling=None)
    np.testing.assert_allclose(found, [1, 1 / 4, 1 / 16], rtol=1e-6)


def test_llama3_leaves_short_waves_blends_middle_ones_and_stretches_long_ones() -> None:
    """The waves have 2 pi, 8 pi and 32 pi tokens; those below 8 are kept, those above 32 not.

    Of the middle wave, (32 / (8 pi) - 1) / 3 = 0.09108 is kept:
    0.09108 * 0.25 + 0.90892 * 0.25 / 8 = 0.051174.
    """
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 32)
    found = inverse_frequencies(6, theta=64.0, scaling=scaling)
    np.testing.assert_allclose(found, [1, 0.051174, 1 / 128], rtol=1e-5)


def test_a_head_is_rotated_by_the_angle_of_its_position() -> None:
    """The pairs of a head of four numbers are its first and third, and its second and fourth."""
    frequencies = jnp.asarray([1.0, 0.1], jnp.float32)
    cos, sin = rope_tables(jnp.asarray([[0, 3]], jnp.int32), frequencies)
    x = jnp.asarray([1.0, 0.0, 0.0, 2.0], jnp.float32).reshape(1, 1, 1, 4)
    rotated = np.asarray(apply_rope(jnp.concatenate([x, x], axis=1), cos, sin))[0, :, 0]
    at_3 = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    np.testing.assert_allclose(rotated, [[1, 0, 0, 2], at_3], atol=1e-6)
