"""LoRA adapters as the decoder sees them.

Dimension key: L layers, J slots, B rows, D inputs of a projection, F its outputs, R rank class.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tuneserve_engine.adapters import UNEMBED


class LoraRows(NamedTuple):
    """One micro-batch's adapters: row b uses slot ``slot[b]``, or slot b when ``slot`` is None.

    ``a[target]`` is [L, J, D, R], ``b[target]`` is [L, J, R, F]; ``unembed`` has no L. A row of the
    base model uses a slot of zeros. Ranks mix by zero padding to the class R: a padded column of A
    and row of B are zero, get a zero gradient, and so stay zero.
    """

    a: dict[str, Array]
    b: dict[str, Array]
    scale: Float[Array, " J"]
    slot: Int[Array, " B"] | None = None

    def of_row(self, stacked: Array) -> Array:
        """[J, ...] to [B, ...]."""
        return stacked if self.slot is None else stacked[self.slot]

    def layers(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The per-layer part: what a scan over layers takes apart."""
        return (
            {name: x for name, x in self.a.items() if name != UNEMBED},
            {name: x for name, x in self.b.items() if name != UNEMBED},
        )


def lora_delta(
    x: Float[Array, "B T D"],
    a: Float[Array, "B D R"],
    b: Float[Array, "B R F"],
    scale: Float[Array, " B"],
) -> Float[Array, "B T F"]:
    """``scale · (x A) B`` with each row's own adapter, in x's dtype."""
    low = jnp.einsum("BTD,BDR->BTR", x, a.astype(x.dtype))
    # Rounded to bfloat16, the scale would be off by up to 0.4 %, for every token the same way.
    low = (low.astype(jnp.float32) * scale[:, None, None]).astype(x.dtype)
    return jnp.einsum("BTR,BRF->BTF", low, b.astype(x.dtype))
