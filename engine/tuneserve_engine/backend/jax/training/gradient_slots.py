"""Gradients of requests, added block by block in buffers that outlive every batch.

Dimension key: L layers, J slots of requests, n blocks; the rest of a shape is the weight's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tuneserve_engine.backend.jax.target import target_platform


class BlockOwners(NamedTuple):
    """The slot of the request that each block adds its gradient to.

    ``is_first`` marks a request's first block in the micro-batch, which overwrites what an earlier
    one left. ``is_used`` is False on blocks that belong to no request.
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

    The blocks of a request lie one after another. They are added in order, and each request's sum
    is written once: it has the same bits whatever lies before and behind its blocks, on every
    device. Gradients that must not be added (a neighbour's NaN, or stale content) are dropped by
    selection, not by multiplication.
    """
    slot, first, used = blocks
    count = slot.shape[0]
    goes_on = used[1:] & used[:-1] & (slot[1:] == slot[:-1])
    is_last = used & ~jnp.append(goes_on, False)
    added = dict(buffers)
    for name, gradient in gradients.items():
        old = buffers[name][layer, slot]
        sums: list[Array] = []
        for block in range(count):
            before = jnp.where(goes_on[block - 1], sums[-1], old[block]) if block else old[0]
            sums.append(jnp.where(first[block], gradient[block], before + gradient[block]))
        if target_platform() == "gpu":
            # Otherwise XLA computes each sum anew from the first block on, all in one kernel.
            sums = list(jax.lax.optimization_barrier(tuple(sums)))  # type: ignore[no-untyped-call]
        # An index out of range is dropped; no index occurs twice.
        where = jnp.where(is_last, slot, buffers[name].shape[1] + jnp.arange(count))
        added[name] = (
            buffers[name].at[layer, where].set(jnp.stack(sums), mode="drop", unique_indices=True)
        )
    return added


def add_to_slot(
    buffers: dict[str, Array], gradients: dict[str, Array], slot: Int[Array, ""]
) -> dict[str, Array]:
    """Return the buffers, [1, J, ...] each, with gradients, [...], added to one slot of each."""
    return {
        name: buffer.at[0, slot].add(gradients[name], unique_indices=True)
        for name, buffer in buffers.items()
    }
