"""LoRA adapters as the decoder takes them.

Dimension key: L layers, J slots, B rows, D inputs of a projection, F its outputs, R rank bucket.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from tuneserve_engine.core.adapter import UNEMBED


class LoraRows(NamedTuple):
    """The adapters of one micro-batch: row b uses slot ``slot[b]``, or slot b if ``slot`` is None.

    ``a[target]`` is [L, J, D, R] and ``b[target]`` is [L, J, R, F]; those of ``unembed`` have no L.
    A row of the base model uses a slot of zeros. Different ranks share the class R by zero padding:
    a padded column of A and row of B are zero, get a zero gradient, and so stay zero.
    """

    a: dict[str, Array]
    b: dict[str, Array]
    scale: Float[Array, " J"]
    slot: Int[Array, " B"] | None = None

    def of_row(self, stacked: Array) -> Array:
        """Gather [J, ...] to [B, ...]."""
        return stacked if self.slot is None else stacked[self.slot]

    @property
    def trained(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The part with respect to which a backward pass differentiates."""
        return self.a, self.b

    @property
    def constants(self) -> Any:
        """All that a backward pass reads and does not differentiate."""
        return self.scale

    def with_trained(self, trained: tuple[dict[str, Array], dict[str, Array]]) -> "LoraRows":
        return self._replace(a=trained[0], b=trained[1])

    def of_layer(self, number: Int[Array, ""]) -> "LoraRows":
        """Return the adapters of one layer."""

        def take(stacked: Array) -> Array:
            # With an axis of length 1, XLA would choose a layout that it has to copy all layers to.
            slots = stacked.shape[1]
            flat = stacked.reshape(-1, *stacked.shape[2:])
            return jax.lax.dynamic_slice_in_dim(flat, number * slots, slots)

        a, b = jax.tree.map(take, self.layers())
        return self._replace(a=a, b=b)

    def layers(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the per-layer adapters, A and B, which a scan over layers slices."""
        return (
            {name: x for name, x in self.a.items() if name != UNEMBED},
            {name: x for name, x in self.b.items() if name != UNEMBED},
        )


float32_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
"""An einsum of float32. A GPU would otherwise round the factors to TF32 beside a base model in
bfloat16."""


@jax.custom_vjp
def lora_delta(
    x: Float[Array, "B T D"],
    a: Float[Array, "B D R"],
    b: Float[Array, "B R F"],
    scale: Float[Array, " B"],
) -> Float[Array, "B T F"]:
    """Return ``scale · (x A) B`` with each row's own adapter, in float32 whatever x's dtype is."""
    return _delta(x, a, b, scale)[0]


def _delta(x: Array, a: Array, b: Array, scale: Array) -> tuple[Array, Any]:
    low = float32_product("BTD,BDR->BTR", x.astype(jnp.float32), a)
    out = float32_product("BTR,BRF->BTF", low * scale[:, None, None], b)
    return out, (x, a, b, scale, low)  # x in its own dtype: autodiff would keep it in float32


def _delta_reverse(kept: Any, by_out: Array) -> tuple[Array, Array, Array, Array]:
    x, a, b, scale, low = kept
    by_scaled = float32_product("BTF,BRF->BTR", by_out, b)
    by_low = by_scaled * scale[:, None, None]
    return (
        float32_product("BTR,BDR->BTD", by_low, a).astype(x.dtype),
        float32_product("BTD,BTR->BDR", x.astype(jnp.float32), by_low),
        float32_product("BTR,BTF->BRF", low * scale[:, None, None], by_out),
        float32_product("BTR,BTR->B", low, by_scaled),
    )


lora_delta.defvjp(_delta, _delta_reverse)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_product(subscripts: str, x: Array, y: Array) -> Array:
    """Return the einsum in float32, not yet rounded to the factors' dtype.

    The gradient of the value that the result is later rounded to has that value's dtype, and so
    have the products with the gradient in the backward pass.
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@partial(wide_product.defjvp, symbolic_zeros=True)
def _tangent(subscripts: str, primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> Any:
    x, y = primals
    parts = ((tangents[0], y), (x, tangents[1]))
    terms = [
        jnp.einsum(subscripts, *part).astype(jnp.float32)
        for part in parts
        if not any(isinstance(factor, SymbolicZero) for factor in part)
    ]
    return wide_product(subscripts, x, y), sum(terms[1:], terms[0])
