"""Products with the errors of float32, within a Pallas kernel."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array


def product(x: Array, y: Array, x_axis: int, y_axis: int, dtype: DTypeLike) -> Array:
    """Contract an axis of each factor, in float32, for a base model of ``dtype``.

    With bfloat16, the products of the parts of float32 factors are added, the smallest first. The
    parts left out are less than 2⁻²² of the product.
    """
    axes = (((x_axis,), (y_axis,)), ((), ()))
    if dtype == jnp.float32:
        exact: Array = lax.dot_general(
            x, y, axes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return exact
    xs, ys = _bfloat16_parts(x), _bfloat16_parts(y)
    pairs = [
        (i, j) for i in range(len(xs)) for j in range(len(ys)) if i + j < max(len(xs), len(ys))
    ]
    products = [
        lax.dot_general(xs[i], ys[j], axes, preferred_element_type=jnp.float32)
        for i, j in sorted(pairs, key=sum, reverse=True)
    ]
    return sum(products[1:], products[0])


def _bfloat16_parts(x: Array) -> list[Array]:
    """Return three numbers of bfloat16 whose sum is x, each rounded from what is left of x."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3):
        # By bits: XLA may leave out a rounding to bfloat16, and then nothing would be left of x.
        bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
        rounded = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        part = jnp.where(jnp.isnan(x), x, rounded)  # the addition may carry NaN over to zero
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
