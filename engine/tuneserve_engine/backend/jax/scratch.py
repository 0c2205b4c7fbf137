"""Gradients of requests, block by block, in buffers that outlive every unit.

Dimension key: L layers, J slots of requests, n blocks; the rest of a shape is the weight's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class BlockSlots(NamedTuple):
    """Whose gradient each block adds to. ``is_first``: the request's first block in the unit, which
    overwrites what an earlier unit left; ``is_used`` is False on blocks that are nobody's."""

    slot: Int[Array, " n"]
    is_first: Bool[Array, " n"]
    is_used: Bool[Array, " n"]

    def part(self, start: Int[Array, ""], count: int) -> "BlockSlots":
        """``count`` blocks (static) from ``start`` on."""
        return BlockSlots(*(jax.lax.dynamic_slice_in_dim(x, start, count) for x in self))


def add_blocks(
    buffers: dict[str, Array],
    gradients: dict[str, Array],
    layer: Int[Array, ""],
    blocks: BlockSlots,
) -> dict[str, Array]:
    """The buffers, [L, J, ...] each, with every block's gradient, [n, ...], added at its place.

    One block after the other, in their order: a request's sum has the same bits whatever lies
    between its blocks, and on every device. Selection, not multiplication, drops what is not to be
    added: a neighbour's NaN, or stale content.
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
