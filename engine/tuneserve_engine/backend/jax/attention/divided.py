"""Attention of a micro-batch whose blocks are divided among devices.

Each device has queries, keys and values of its own blocks. It gathers the keys and values of all
devices, a layer at a time, and computes the results of its queries. In the backward pass, each
device computes its queries' part of the gradients of all keys and values. The parts are added on
the device that has the keys, in the order of the devices.

All but the last device with blocks have equally many. For programs that run on every device.

Dimension key: as in ``packed``; D devices, Dn blocks of all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.attention.base import (
    Attended,
    AttentionGradient,
    OwnBlocks,
    Visibility,
)
from tuneserve_engine.backend.jax.attention.packed import attend_blocks, attend_blocks_backward
from tuneserve_engine.backend.jax.mesh import DEVICES


class Divided(NamedTuple):
    """The blocks of all devices, as one device knows them."""

    seen: Visibility  # of all blocks
    each: Int[Array, ""]  # the used blocks of every device but the last one with blocks
    blocks: Int[Array, ""]  # the used blocks of this device

    @property
    def first(self) -> Int[Array, ""]:
        """The number of the device's first block among all blocks."""
        first: Array = lax.axis_index(DEVICES) * self.each
        return first

    def of_all(self, mine: Array) -> Array:
        """Return the used blocks of all devices, one after the other: [n, ...] to [Dn, ...].

        Undefined after the last used block.
        """
        return _joined(mine, self.each)

    def own(self, of_all: Array, blocks: int) -> Array:
        """Return the device's ``blocks`` of the blocks of all devices."""
        return lax.dynamic_slice_in_dim(of_all, self.first, blocks)

    def own_blocks(self, room: int) -> OwnBlocks:
        """Return which blocks are the device's, which has room for so many."""
        return OwnBlocks(self.first, self.blocks, room)


def divided_among_devices(mine: Visibility) -> Divided:
    """Return what all devices know, from each one's part of the visibility.

    ``mine.start`` counts the blocks of all devices.
    """
    counts = lax.all_gather(mine.blocks, DEVICES)
    each = counts[0]
    rows = [_joined(x, each) for x in (mine.segment_ids, mine.position, mine.start)]
    total = counts.sum(dtype=jnp.int32)
    number = jnp.arange(rows[2].shape[0], dtype=jnp.int32)
    segment_ids = jnp.where((number < total)[:, None], rows[0], -1)
    start = jnp.where(number < total, rows[2], number)
    return Divided(Visibility(segment_ids, rows[1], start, total), each, mine.blocks)


def attend_divided(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "m K S H"],
    v: Float[Array, "m K S H"],
    divided: Divided,
    into: Attended,
    *,
    blocks: int,
    base: Int[Array, ""] | int,
    attended_base: Int[Array, ""] | int,
) -> Attended:
    """Return the results of the device's queries; see ``packed.attend_blocks``.

    ``blocks`` is the number of blocks for which a device has room.
    """
    keys, values = (divided.of_all(lax.dynamic_slice_in_dim(x, base, blocks)) for x in (k, v))
    return attend_blocks(
        q, keys, values, divided.seen, into,
        base=base, attended_base=attended_base, own=divided.own_blocks(blocks),
    )  # fmt: skip


def attend_divided_backward(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "m K S H"],
    v: Float[Array, "m K S H"],
    attended: Attended,
    gradient: Float[Array, "n K GS H"],
    divided: Divided,
    into: AttentionGradient,
    *,
    base: Int[Array, ""] | int,
    attended_base: Int[Array, ""] | int,
) -> AttentionGradient:
    """Return the gradients of the device's queries, keys and values.

    See ``packed.attend_blocks_backward``.
    """
    blocks, each = gradient.shape[0], divided.each
    keys, values = (divided.of_all(lax.dynamic_slice_in_dim(x, base, blocks)) for x in (k, v))
    zeros = jnp.zeros(keys.shape, jnp.float32)
    parts = attend_blocks_backward(
        q, keys, values, attended, gradient, divided.seen, into._replace(k=zeros, v=zeros),
        base=base, attended_base=attended_base, own=divided.own_blocks(blocks),
    )  # fmt: skip
    return AttentionGradient(
        parts.q,
        _summed(parts.k, each, blocks).astype(into.k.dtype),
        _summed(parts.v, each, blocks).astype(into.v.dtype),
    )


def _joined(mine: Array, each: Int[Array, ""]) -> Array:
    """Return the used blocks of all devices, one after the other: [n, ...] to [Dn, ...]."""
    with jax.named_scope("divided"):
        parts = lax.all_gather(mine, DEVICES)
    joined: Array = parts.reshape(-1, *mine.shape[1:])
    for number in range(1, parts.shape[0]):  # what follows a part is overwritten by the next
        joined = lax.dynamic_update_slice_in_dim(joined, parts[number], number * each, 0)
    return joined


def _summed(parts: Float[Array, "Dn K S H"], each: Int[Array, ""], blocks: int) -> Array:
    """Return the sum over devices of their parts for this device's blocks: [n, K, S, H]."""
    count = parts.shape[0] // blocks
    of_each = [lax.dynamic_slice_in_dim(parts, to * each, blocks) for to in range(count)]
    with jax.named_scope("divided"):
        mine = lax.all_to_all(jnp.stack(of_each), DEVICES, 0, 0)  # type: ignore[no-untyped-call]
    total: Array = mine[0]
    for part in mine[1:]:
        total += part
    return total
