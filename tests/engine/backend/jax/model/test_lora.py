"""The product with an adapter, alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuneserve_engine.backend.jax.model.lora import lora_delta, wide_product

SCALE = 32 / 3  # alpha 32 at rank 3; the nearest bfloat16 is 0.2 % larger
ONE = jnp.ones((1, 1, 1))


def delta(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lora_delta)(x, ONE, ONE, jnp.float32([SCALE])))


def test_in_bfloat16_only_the_input_is_rounded():
    x = np.arange(128, 256).reshape(1, 128, 1)  # all are exact in bfloat16
    want = (x * np.float64(np.float32(SCALE))).astype(np.float32)
    np.testing.assert_array_equal(delta(x.astype(jnp.bfloat16)), want, strict=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_explicit_gradient_equals_autodiff(dtype: jnp.dtype):
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    x, a, b, scale = draw(3, 5, 7), draw(3, 7, 4), draw(3, 4, 6), draw(3)
    x = x.astype(dtype)
    by_out = draw(3, 5, 6)

    def plain(x: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) @ a) * scale[:, None, None] @ b

    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *args: jax.vjp(plain, *args)[1](by_out))(x, a, b, scale)
        got = jax.jit(lambda *args: jax.vjp(lora_delta, *args)[1](by_out))(x, a, b, scale)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        relative = 1e-6 if mine.dtype == jnp.float32 else 2.0**-8
        np.testing.assert_allclose(
            mine.astype(np.float32), theirs.astype(np.float32), rtol=relative, atol=1e-5
        )


def test_a_wide_product_is_rounded_once_and_its_gradient_has_the_factors_dtype():
    x = jnp.asarray(np.arange(129, 193).reshape(1, 1, 64), jnp.bfloat16)
    w = jnp.ones((64, 1), jnp.bfloat16)

    def rounded(x: jax.Array) -> jax.Array:
        return (wide_product("BTD,DF->BTF", x, w) + 0.75).astype(jnp.bfloat16)

    out, pull = jax.vjp(rounded, x)
    assert float(out[0, 0, 0]) == float(jnp.bfloat16(sum(range(129, 193)) + 0.75))
    (by_x,) = pull(jnp.full((1, 1, 1), 3, jnp.bfloat16))
    np.testing.assert_array_equal(by_x, jnp.full(x.shape, 3, jnp.bfloat16), strict=True)
    text = str(jax.make_jaxpr(pull)(out))
    assert "dot_general" in text and "preferred_element_type=float32" not in text


def test_in_float32_nothing_is_converted():
    traced = jax.make_jaxpr(lora_delta)(ONE, ONE, ONE, jnp.float32([SCALE]))
    assert "dot_general" in str(traced) and "convert_element_type" not in str(traced)
