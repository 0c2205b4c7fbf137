"""The visibility of tokens in a packed sequence, and the results of attention."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

UNSEEN = -1e30
"""The score of keys that the mask excludes: finite, so that every row has a maximum."""


class Visibility(NamedTuple):
    """The mask of a micro-batch: a token sees the tokens of its own datum up to its own position.

    The tokens of a datum are contiguous, in the order of their positions. Padding has ``datum`` -1
    and position 0; it sees the padding of its own block, so that its results are finite.
    """

    segment_ids: Int[Array, "n S"]
    position: Int[Array, "n S"]
    start: Int[Array, " n"]  # the first block that a block attends to; never decreases
    blocks: Int[Array, ""]  # number of used blocks; later blocks are neither read nor written


class OwnBlocks(NamedTuple):
    """A device's own blocks of a micro-batch that several devices divide among them.

    Blocks are numbered over all devices: ``Visibility`` is that of all blocks, and keys and values
    are those of all blocks, from block 0 of their buffers on. Queries and results are the device's.
    """

    first: Int[Array, ""]  # the number of the device's first block
    blocks: Int[Array, ""]  # its used blocks
    size: int  # the blocks for which it has room


class Windows(NamedTuple):
    """The tokens of the micro-batch that each token sees: its datum's, from the first up to itself.

    The padding of a block counts as a datum whose tokens all see one another.
    """

    first: Int[Array, "*n S"]  # the first key that the token sees
    last: Int[Array, "*n S"]  # the last key that it sees
    end: Int[Array, "*n S"]  # the first token after the part of its datum that is in its block


class Attended(NamedTuple):
    """The result of attention, and what its backward pass needs of the result."""

    out: Float[Array, "a K GS H"]
    logsumexp: Float[Array, "a K GS"]  # natural, of the scaled scores


class AttentionGradient(NamedTuple):
    q: Float[Array, "n K GS H"]
    k: Float[Array, "n K S H"]
    v: Float[Array, "n K S H"]


def windows(seen: Visibility) -> Windows:
    """Return the first and last visible key of each token, and the end of its datum's part."""
    n, size = seen.segment_ids.shape
    token = jnp.arange(n * size, dtype=jnp.int32).reshape(n, size)
    block = token[:, :1]
    is_padding = seen.segment_ids < 0
    # The count is of the token's datum in its block. Padding comes last in a block.
    count = (seen.segment_ids[:, :, None] == seen.segment_ids[:, None, :]).sum(-1, dtype=jnp.int32)
    first = jnp.where(is_padding, block + size - count, token - seen.position)
    end = jnp.maximum(first, block) + count
    return Windows(first, jnp.where(is_padding, end - 1, token), end)


def sees_window(mine: Windows, first: Int[Array, ""]) -> Bool[Array, "S S"]:
    """Return which of the S keys from the micro-batch's token ``first`` on a block's tokens see.

    ``mine`` are the windows of the block's tokens. Only the first datum of this key window counts:
    later datums have key windows of their own.
    """
    key = first + jnp.arange(mine.first.shape[0], dtype=jnp.int32)
    return (key[None, :] <= mine.last[:, None]) & (mine.first <= first)[:, None]


def next_window(end: Any, first: Int[Array, ""], i: Any) -> Int[Array, ""]:
    """Return the first token of query block i's next window: of the same datum, or of the next.

    ``end`` is the ``end`` of all windows, or a reference to it.
    """
    size = end.shape[1]
    return jnp.minimum(first + size, end[i, jnp.maximum(first - i * size, 0)])
