"""Attention of a packed micro-batch, block by block.

Blocks that the mask excludes as a whole are never computed, and no score outlives its block.

Online softmax as in FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithms 1 and 2). In the
forward pass, a query block takes the keys of each of its datums in windows of S tokens, counted
from the datum's first token: the result for a token has the same bits wherever its datum begins. In
the backward pass, query block i meets the key blocks ``start[i]`` to i, and bits depend on these
blocks only: not on their place in the micro-batch, its other content or its capacity.

Dimension key: n blocks of the micro-batch, S tokens of a block; m blocks of the buffer that holds
its queries, l of those that hold its keys and values (l = m without ``own``), a of those that
hold the results of attention (buffers of several micro-batches or layers: ``base`` and
``attended_base`` are the first blocks of this one); K key/value heads, each read by G query heads
(GS rows, head by head), N = K*G query heads; H head_dim.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.attention.base import (
    UNSEEN,
    Attended,
    AttentionGradient,
    OwnBlocks,
    Visibility,
    Windows,
    next_window,
    sees_window,
    windows,
)
from tuneserve_engine.backend.jax.target import target_platform

Implementation = Literal["blocks", "kernels"]
"""XLA loops, which run on CPUs, or Pallas kernels, which run on GPUs."""
_Sums = tuple[Array, Array, Array]


def query_blocks(q: Float[Array, "n S N H"], key_heads: int) -> Float[Array, "n K GS H"]:
    """Group query heads by the key head that they read."""
    n, s, heads, h = q.shape
    grouped = q.reshape(n, s, key_heads, heads // key_heads, h)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(n, key_heads, -1, h)


def key_blocks(k: Float[Array, "n S K H"]) -> Float[Array, "n K S H"]:
    """Arrange keys or values by head."""
    return k.transpose(0, 2, 1, 3)


def token_rows(out: Float[Array, "n K GS H"], block: int) -> Float[Array, "n S NH"]:
    """Put each token's heads side by side again; ``block`` is S."""
    n, key_heads, _, h = out.shape
    heads = out.reshape(n, key_heads, -1, block, h)
    return heads.transpose(0, 3, 1, 2, 4).reshape(n, block, -1)


def attend_blocks(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "l K S H"],
    v: Float[Array, "l K S H"],
    seen: Visibility,
    into: Attended,
    *,
    base: Int[Array, ""] | int = 0,
    attended_base: Int[Array, ""] | int = 0,
    own: OwnBlocks | None = None,
    implementation: Implementation | None = None,
) -> Attended:
    """Write ``softmax(q k / sqrt(H)) v`` to the micro-batch's used blocks of ``into``; return
    ``into``.

    Scores, softmax and sums are float32. With ``own``, the blocks are those of a device. Without
    ``implementation``, the device decides.
    """
    if (implementation or _usual()) == "kernels":
        from tuneserve_engine.backend.jax.attention import packed_gpu

        return packed_gpu.attend(
            q, k, v, seen, into,
            base=base, attended_base=attended_base, own=own, interpret=not _on_gpu(),
        )  # fmt: skip

    seen_by = windows(seen)
    begin, used, key_base = (0, seen.blocks, base) if own is None else (*own[:2], 0)

    def attend(i: Array, into: Attended) -> Attended:
        rows, at = _scaled(_block(q, base + i)), begin + i
        mine = Windows(*(each[at] for each in seen_by))

        def add(state: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
            first, (top, total, out) = state
            scores = _scores(rows, _window_of(k, key_base, first, at), sees_window(mine, first))
            new_top = jnp.maximum(top, scores.max(-1))
            kept, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
            more = jnp.einsum("KQS,KSH->KQH", weights, _window_of(v, key_base, first, at))
            after = next_window(seen_by.end, first, at)
            return after, (new_top, total * kept + weights.sum(-1), out * kept[..., None] + more)

        nothing = jnp.full(rows.shape[:-1], UNSEEN), jnp.zeros(rows.shape[:-1])
        state = mine.first[0], (*nothing, jnp.zeros_like(rows))
        behind = (at + 1) * seen.segment_ids.shape[1]
        _, (top, total, out) = lax.while_loop(lambda state: state[0] < behind, add, state)
        return Attended(
            _put(into.out, attended_base + i, out / total[..., None]),
            _put(into.logsumexp, attended_base + i, top + jnp.log(total)),
        )

    result: Attended = lax.fori_loop(0, used, attend, into)
    return result


def attend_blocks_backward(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "l K S H"],
    v: Float[Array, "l K S H"],
    attended: Attended,
    gradient: Float[Array, "n K GS H"],
    seen: Visibility,
    into: AttentionGradient,
    *,
    base: Int[Array, ""] | int = 0,
    attended_base: Int[Array, ""] | int = 0,
    own: OwnBlocks | None = None,
    implementation: Implementation | None = None,
) -> AttentionGradient:
    """Write gradients of q, k and v, from the output's, to the used blocks of ``into``.

    With ``own``, the gradients of k and v are a device's part of a sum over devices, and ``into``
    has zeros for them.
    """
    if (implementation or _usual()) == "kernels":
        from tuneserve_engine.backend.jax.attention import packed_gpu

        return packed_gpu.attend_backward(
            q, k, v, attended, gradient, seen, into,
            base=base, attended_base=attended_base, own=own, interpret=not _on_gpu(),
        )  # fmt: skip

    begin, used, key_base = (0, seen.blocks, base) if own is None else (*own[:2], 0)

    # The block on the diagonal gets no code of its own, although such code could set what others
    # add to: outside the inner loop, XLA CPU does not vectorise the masked exponentials (126 us
    # instead of 13).
    def attend(i: Array, sums: AttentionGradient) -> AttentionGradient:
        rows, of_out, at = _scaled(_block(q, base + i)), _block(gradient, i), begin + i
        logsumexp = _block(attended.logsumexp, attended_base + i)
        shared = (of_out * _block(attended.out, attended_base + i)).sum(-1)

        def add(j: Array, sums: _Sums) -> _Sums:
            of_rows, of_k, of_v = sums
            keys = _block(k, key_base + j)
            scores = _scores(rows, keys, _sees(seen, at, j))
            weights = jnp.exp(scores - logsumexp[..., None])
            of_weights = jnp.einsum("KQH,KSH->KQS", of_out, _block(v, key_base + j))
            of_scores = weights * (of_weights - shared[..., None])
            return (
                of_rows + jnp.einsum("KQS,KSH->KQH", of_scores, keys),
                _accumulate(of_k, at, j, jnp.einsum("KQS,KQH->KSH", of_scores, rows)),
                _accumulate(of_v, at, j, jnp.einsum("KQS,KQH->KSH", weights, of_out)),
            )

        start = jnp.zeros_like(rows), sums.k, sums.v
        of_rows, of_k, of_v = lax.fori_loop(seen.start[at], at + 1, add, start)
        return AttentionGradient(_put(sums.q, i, _scaled(of_rows)), of_k, of_v)

    wide = into._replace(k=into.k.astype(jnp.float32), v=into.v.astype(jnp.float32))
    sums: AttentionGradient = lax.fori_loop(0, used, attend, wide)
    return sums._replace(k=sums.k.astype(into.k.dtype), v=sums.v.astype(into.v.dtype))


def _window_of(
    buffer: Float[Array, "m K S H"], base: Any, first: Int[Array, ""], i: Int[Array, ""]
) -> Float[Array, "K S H"]:
    """Return keys or values of a window, in float32.

    Tokens after block i are replaced by the request's own, from block i; the mask excludes them.
    """
    size = buffer.shape[2]
    block, offset = first // size, first % size

    def aligned() -> Array:
        return _block(buffer, base + block)

    def shifted() -> Array:
        both = aligned(), _block(buffer, base + jnp.minimum(block + 1, i))
        return lax.dynamic_slice_in_dim(jnp.concatenate(both, axis=1), offset, size, axis=1)

    if buffer.dtype != jnp.float32:
        return shifted()  # conversion to float32 costs as much, and XLA fuses it with the shift
    keys: Array = lax.cond(offset == 0, aligned, shifted)
    return keys


def _usual() -> Implementation:
    return "kernels" if _on_gpu() else "blocks"


def _on_gpu() -> bool:
    return target_platform() == "gpu"


def _block(buffer: Array, i: Int[Array, ""]) -> Array:
    """Return one block, in float32."""
    block: Array = lax.dynamic_index_in_dim(buffer, i, keepdims=False)
    return block.astype(jnp.float32)


def _put(buffer: Array, i: Int[Array, ""], value: Array) -> Array:
    """Update a slice. ``at[i].set`` would also read the old block, in case i is out of bounds."""
    updated: Array = lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), i, 0)
    return updated


def _accumulate(buffer: Array, i: Int[Array, ""], j: Int[Array, ""], value: Array) -> Array:
    """Add query block i's contribution to key block j.

    Query block j contributes first: it overwrites what an earlier use of the buffer left, even NaN.
    """
    return _put(buffer, j, jnp.where(i == j, value, _block(buffer, j) + value))


def _scaled(rows: Float[Array, "K GS H"]) -> Float[Array, "K GS H"]:
    """Scale queries so that products with keys are scores; scale their gradients likewise."""
    scale: float = rows.shape[-1] ** -0.5
    return rows * scale


def _scores(
    rows: Float[Array, "K GS H"], keys: Float[Array, "K S H"], sees: Bool[Array, "S S"]
) -> Float[Array, "K GS S"]:
    scores = jnp.einsum("KQH,KSH->KQS", rows, keys)
    groups = rows.shape[1] // keys.shape[1]
    return jnp.where(jnp.tile(sees, (groups, 1))[None], scores, UNSEEN)


def _sees(seen: Visibility, i: Int[Array, ""], j: Int[Array, ""]) -> Bool[Array, "S S"]:
    """Return which tokens of query block i see which of key block j."""
    same = seen.segment_ids[i][:, None] == seen.segment_ids[j][None, :]
    return same & (seen.position[i][:, None] >= seen.position[j][None, :])
