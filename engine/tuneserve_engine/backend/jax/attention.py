"""Attention of a stream of datums to themselves, block by block: what the mask excludes as a whole
is never computed, and no score outlives its block.

An online softmax (FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithms 1 and 2).
Forwards, a query block takes the keys of each of its datums in windows of S tokens, counted from
the datum's first: what attention gives a token has the same bits wherever its datum begins.
Backwards, query block i meets the key blocks ``start[i]`` to i, and bits depend on these blocks and
nothing else: neither their place in the stream, nor its other content, nor its capacity.

Dimension key: n blocks of the stream, S tokens of a block; m blocks of the buffers that hold its
queries, keys and values, a of those that hold what attention gave (several streams' or layers':
``base`` and ``attended_base`` say where this one's begin); K key/value heads, each read by G query
heads (GS rows, head by head), N = K*G query heads; H head_dim.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Implementation = Literal["blocks", "kernels"]
"""XLA loops, which is what a CPU runs; or Pallas kernels, which is what a GPU runs."""

UNSEEN = -1e30
"""Score of what the mask excludes: finite, so that no row is without a maximum."""

_Sums = tuple[Array, Array, Array]


class Visibility(NamedTuple):
    """Which tokens see which: those of their own datum up to their own position.

    A datum's tokens lie behind one another, in the order of their positions. Padding has ``datum``
    -1 and position 0; it sees padding of its own block, so that it gives finite numbers.
    """

    datum: Int[Array, "n S"]
    position: Int[Array, "n S"]
    start: Int[Array, " n"]  # the first block that a block attends to; never falls
    blocks: Int[Array, ""]  # used ones; what lies behind them is neither read nor written


class Windows(NamedTuple):
    """What each token sees, in tokens of the stream: its datum's from the first one up to itself.
    Padding of a block counts as a datum whose tokens all see one another."""

    first: Int[Array, "*n S"]  # key that it sees
    last: Int[Array, "*n S"]
    end: Int[Array, "*n S"]  # of its datum in its block: the first token behind it


class Attended(NamedTuple):
    """What attention gives, and what its reverse pass needs of it."""

    out: Float[Array, "a K GS H"]
    logsumexp: Float[Array, "a K GS"]  # of the scaled scores, natural


class AttentionGradient(NamedTuple):
    q: Float[Array, "n K GS H"]
    k: Float[Array, "n K S H"]
    v: Float[Array, "n K S H"]


def query_blocks(q: Float[Array, "n S N H"], key_heads: int) -> Float[Array, "n K GS H"]:
    """Groups query heads by the key head that they read."""
    n, s, heads, h = q.shape
    grouped = q.reshape(n, s, key_heads, heads // key_heads, h)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(n, key_heads, -1, h)


def key_blocks(k: Float[Array, "n S K H"]) -> Float[Array, "n K S H"]:
    """Keys, or values, by head."""
    return k.transpose(0, 2, 1, 3)


def token_rows(out: Float[Array, "n K GS H"], block: int) -> Float[Array, "n S NH"]:
    """Each token's heads side by side again; ``block`` is S."""
    n, key_heads, _, h = out.shape
    heads = out.reshape(n, key_heads, -1, block, h)
    return heads.transpose(0, 3, 1, 2, 4).reshape(n, block, -1)


def attend_blocks(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "m K S H"],
    v: Float[Array, "m K S H"],
    seen: Visibility,
    into: Attended,
    *,
    base: Int[Array, ""] | int = 0,
    attended_base: Int[Array, ""] | int = 0,
    implementation: Implementation | None = None,
) -> Attended:
    """``softmax(q k / sqrt(H)) v`` in place of the stream's used blocks of ``into``.

    Scores, softmax and sums are float32. Without ``implementation``: what suits the device.
    """
    if (implementation or _usual()) == "kernels":
        from tuneserve_engine.backend.jax import attention_kernels

        return attention_kernels.attend(
            q, k, v, seen, into, base=base, attended_base=attended_base, interpret=not _on_gpu()
        )

    seen_by = windows(seen)

    def attend(i: Array, into: Attended) -> Attended:
        rows = _scaled(_block(q, base + i))
        mine = Windows(*(each[i] for each in seen_by))

        def add(state: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
            first, (top, total, out) = state
            scores = _scores(rows, _window_of(k, base, first, i), sees_window(mine, first))
            new_top = jnp.maximum(top, scores.max(-1))
            kept, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
            more = jnp.einsum("KQS,KSH->KQH", weights, _window_of(v, base, first, i))
            after = next_window(seen_by.end, first, i)
            return after, (new_top, total * kept + weights.sum(-1), out * kept[..., None] + more)

        nothing = jnp.full(rows.shape[:-1], UNSEEN), jnp.zeros(rows.shape[:-1])
        state = mine.first[0], (*nothing, jnp.zeros_like(rows))
        behind = (i + 1) * seen.datum.shape[1]
        _, (top, total, out) = lax.while_loop(lambda state: state[0] < behind, add, state)
        return Attended(
            _put(into.out, attended_base + i, out / total[..., None]),
            _put(into.logsumexp, attended_base + i, top + jnp.log(total)),
        )

    result: Attended = lax.fori_loop(0, seen.blocks, attend, into)
    return result


def attend_blocks_backward(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "m K S H"],
    v: Float[Array, "m K S H"],
    attended: Attended,
    gradient: Float[Array, "n K GS H"],
    seen: Visibility,
    into: AttentionGradient,
    *,
    base: Int[Array, ""] | int = 0,
    attended_base: Int[Array, ""] | int = 0,
    implementation: Implementation | None = None,
) -> AttentionGradient:
    """Gradients of q, k and v from that of the output, in place of the used blocks of ``into``."""
    if (implementation or _usual()) == "kernels":
        from tuneserve_engine.backend.jax import attention_kernels

        return attention_kernels.attend_backward(
            q, k, v, attended, gradient, seen, into,
            base=base, attended_base=attended_base, interpret=not _on_gpu(),
        )  # fmt: skip

    # The block on the diagonal has no code of its own, which could set what others add to: outside
    # the inner loop, XLA CPU does not vectorise the masked exponentials (126 us instead of 13).
    def attend(i: Array, sums: AttentionGradient) -> AttentionGradient:
        rows, of_out = _scaled(_block(q, base + i)), _block(gradient, i)
        logsumexp = _block(attended.logsumexp, attended_base + i)
        shared = (of_out * _block(attended.out, attended_base + i)).sum(-1)

        def add(j: Array, sums: _Sums) -> _Sums:
            of_rows, of_k, of_v = sums
            keys = _block(k, base + j)
            scores = _scores(rows, keys, _sees(seen, i, j))
            weights = jnp.exp(scores - logsumexp[..., None])
            of_weights = jnp.einsum("KQH,KSH->KQS", of_out, _block(v, base + j))
            of_scores = weights * (of_weights - shared[..., None])
            return (
                of_rows + jnp.einsum("KQS,KSH->KQH", of_scores, keys),
                _accumulate(of_k, i, j, jnp.einsum("KQS,KQH->KSH", of_scores, rows)),
                _accumulate(of_v, i, j, jnp.einsum("KQS,KQH->KSH", weights, of_out)),
            )

        start = jnp.zeros_like(rows), sums.k, sums.v
        of_rows, of_k, of_v = lax.fori_loop(seen.start[i], i + 1, add, start)
        return AttentionGradient(_put(sums.q, i, _scaled(of_rows)), of_k, of_v)

    wide = into._replace(k=into.k.astype(jnp.float32), v=into.v.astype(jnp.float32))
    sums: AttentionGradient = lax.fori_loop(0, seen.blocks, attend, wide)
    return sums._replace(k=sums.k.astype(k.dtype), v=sums.v.astype(v.dtype))


def windows(seen: Visibility) -> Windows:
    """Where the windows of each token's datum begin and end."""
    n, size = seen.datum.shape
    token = jnp.arange(n * size, dtype=jnp.int32).reshape(n, size)
    block = token[:, :1]
    is_padding = seen.datum < 0
    # Of the token's datum in its block. Padding is the last of a block.
    count = (seen.datum[:, :, None] == seen.datum[:, None, :]).sum(-1, dtype=jnp.int32)
    first = jnp.where(is_padding, block + size - count, token - seen.position)
    end = jnp.maximum(first, block) + count
    return Windows(first, jnp.where(is_padding, end - 1, token), end)


def sees_window(mine: Windows, first: Int[Array, ""]) -> Bool[Array, "S S"]:
    """What the tokens of a block, whose windows are ``mine``, see of the S keys from the stream's
    token ``first`` on: of the datums in this window the first one's, for the others have their own.
    """
    key = first + jnp.arange(mine.first.shape[0], dtype=jnp.int32)
    return (key[None, :] <= mine.last[:, None]) & (mine.first <= first)[:, None]


def next_window(end: Any, first: Int[Array, ""], i: Any) -> Int[Array, ""]:
    """Where query block i's next window begins: of the same datum, or of the one behind it.
    ``end`` is that of all windows, or a reference to it."""
    size = end.shape[1]
    return jnp.minimum(first + size, end[i, jnp.maximum(first - i * size, 0)])


def _window_of(
    buffer: Float[Array, "m K S H"], base: Any, first: Int[Array, ""], i: Int[Array, ""]
) -> Float[Array, "K S H"]:
    """Keys or values of a window, in float32; those behind block i are any of the request's own."""
    size = buffer.shape[2]
    block, offset = first // size, first % size

    def aligned() -> Array:
        return _block(buffer, base + block)

    def shifted() -> Array:
        both = aligned(), _block(buffer, base + jnp.minimum(block + 1, i))
        return lax.dynamic_slice_in_dim(jnp.concatenate(both, axis=1), offset, size, axis=1)

    if buffer.dtype != jnp.float32:
        return shifted()  # the rounding's inverse costs as much: XLA does both in one pass
    keys: Array = lax.cond(offset == 0, aligned, shifted)
    return keys


def _usual() -> Implementation:
    return "kernels" if _on_gpu() else "blocks"


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _block(buffer: Array, i: Int[Array, ""]) -> Array:
    """One block, in float32."""
    block: Array = lax.dynamic_index_in_dim(buffer, i, keepdims=False)
    return block.astype(jnp.float32)


def _put(buffer: Array, i: Int[Array, ""], value: Array) -> Array:
    """A slice's update: ``at[i].set`` reads the old block too, to keep it if i is out of bounds."""
    updated: Array = lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), i, 0)
    return updated


def _accumulate(buffer: Array, i: Int[Array, ""], j: Int[Array, ""], value: Array) -> Array:
    """Adds query block i's contribution to key block j, whose first one is its own: what an
    earlier use of the buffer left there, NaN or not, is dropped with it."""
    return _put(buffer, j, jnp.where(i == j, value, _block(buffer, j) + value))


def _scaled(rows: Float[Array, "K GS H"]) -> Float[Array, "K GS H"]:
    """Queries so that their products with keys are scores; a score's gradient, likewise."""
    scale: float = rows.shape[-1] ** -0.5
    return rows * scale


def _scores(
    rows: Float[Array, "K GS H"], keys: Float[Array, "K S H"], sees: Bool[Array, "S S"]
) -> Float[Array, "K GS S"]:
    scores = jnp.einsum("KQH,KSH->KQS", rows, keys)
    groups = rows.shape[1] // keys.shape[1]
    return jnp.where(jnp.tile(sees, (groups, 1))[None], scores, UNSEEN)


def _sees(seen: Visibility, i: Int[Array, ""], j: Int[Array, ""]) -> Bool[Array, "S S"]:
    """Which tokens of query block i see which of key block j."""
    same = seen.datum[i][:, None] == seen.datum[j][None, :]
    return same & (seen.position[i][:, None] >= seen.position[j][None, :])
