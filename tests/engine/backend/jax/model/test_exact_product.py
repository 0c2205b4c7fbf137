"""Products of float32 numbers in parts of bfloat16, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuneserve_engine.backend.jax.model.exact_product import product


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def numbers(rows: int, columns: int, seed: int) -> jax.Array:
    """Numbers over 60 powers of two."""
    rng = np.random.default_rng(seed)
    shape = rows, columns
    return jnp.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-30, 30, shape), jnp.float32)


@pytest.mark.parametrize("columns", [1, 8])
@pytest.mark.parametrize("is_narrow", [True, False])
def test_products_of_bfloat16_parts_are_products_of_float32(columns: int, is_narrow: bool) -> None:
    """To 2⁻²² of the sum of the terms' sizes, and 2⁻²⁴ for every addition."""
    x, y = numbers(256, columns, 0), numbers(256, columns, 1)
    left = x.astype(jnp.bfloat16) if is_narrow else x
    got = jax.jit(lambda x, y: product(x, y, 1, 1, jnp.bfloat16))(left, y)
    want, size = wide(left) @ wide(y).T, abs(wide(left)) @ abs(wide(y)).T
    assert (abs(wide(got) - want) <= (2.0**-22 + columns * 2.0**-24) * size).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000])
def test_nan_and_infinity_do_not_become_numbers(bits: int) -> None:
    """0x7FFFFFFF is what an NVIDIA GPU computes."""
    x = jax.lax.bitcast_convert_type(jnp.full((1, 1), bits, jnp.uint32), jnp.float32)
    for pair in ((x, jnp.ones((1, 1))), (jnp.ones((1, 1)), x)):
        assert not np.isfinite(product(*pair, 1, 1, jnp.bfloat16)).any()
