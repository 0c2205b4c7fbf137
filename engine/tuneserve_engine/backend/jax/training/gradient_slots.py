"""Gradients of requests, added block by block in buffers that outlive every batch.

Dimension key: L layers, J slots of requests, n blocks; the rest of a shape is the weight's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class BlockOwners(NamedTuple):
    """The slot of the request that each block adds its gradient to.

    ``is_first`` marks a request's first block in the batch, which overwrites what an earlier batch
    left. ``is_used`` is False on blocks that belong to no request.
    """

    slot: Int[Array, " n"]
    is_first: Bool[Array, " n"]
    is_used: Bool[Array, " n"]

    def part(self, start: Int[Array, ""], count: int) -> "BlockOwners":
        """Return ``count`` blocks (static) from ``start`` on."""
        return BlockOwners(*(jax.lax.dynamic_slice_in_dim(x, start, count) for x in self))


def add_blocks(
    buffers: dict[str, Array],
    gradients: dict[str, Array],
    layer: Int[Array, ""],
    blocks: BlockOwners,
) -> dict[str, Array]:
    """Return the buffers, [L, J, ...] each, with every block's gradient, [n, ...], added.

    Blocks are added one after the other, in order. A request's sum has the same bits whatever lies
    between its blocks, on every device. Gradients that must not be added (a neighbour's NaN, or
    stale content) are dropped by selection, not by multiplication.
    """
    zero = jnp.int32(0)
    layer = jnp.asarray(layer, jnp.int32)

    def add(index: Array, buffers: dict[str, Array]) -> dict[str, Array]:
        slot, first, used = (x[index] for x in blocks)
        updated = dict(buffers)
        for name, gradient in gradients.items():
            buffer = buffers[name]
            at = (layer, slot, zero, zero)
            old = jax.lax.dynamic_slice(buffer, at, (1, 1, *buffer.shape[2:]))
            new = gradient[index][None, None]
            total = jnp.where(first, new, jnp.where(used, old + new, old))
            updated[name] = jax.lax.dynamic_update_slice(buffer, total, at)
        return updated

    added: dict[str, Array] = jax.lax.fori_loop(0, blocks.slot.shape[0], add, buffers)
    return added
