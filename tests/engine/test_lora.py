"""The product with an adapter, alone."""

import jax
import jax.numpy as jnp
import numpy as np

from tuneserve_engine.backend.jax.lora import lora_delta

SCALE = 32 / 3  # of alpha 32 at rank 3; the nearest bfloat16 is 0.2 % larger
ONE = jnp.ones((1, 1, 1))


def delta(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lora_delta)(x, ONE, ONE, jnp.float32([SCALE])))


def test_in_bfloat16_each_result_is_rounded_once_and_the_scale_is_not():
    x = np.arange(128, 256).reshape(1, 128, 1)  # all of them are bfloat16
    want = (x * np.float64(np.float32(SCALE))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(delta(x.astype(jnp.bfloat16)), want, strict=True)


def test_in_float32_nothing_is_converted():
    traced = jax.make_jaxpr(lora_delta)(ONE, ONE, ONE, jnp.float32([SCALE]))
    assert "dot_general" in str(traced) and "convert_element_type" not in str(traced)
