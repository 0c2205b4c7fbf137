"""Attention of a stream of datums to themselves, block by block: what the mask excludes as a whole
is never computed, and no score outlives its block.

Query block i meets the key blocks ``start[i]`` to i with an online softmax (FlashAttention-2,
https://arxiv.org/abs/2307.08691, algorithms 1 and 2). What a block's bits depend on is the blocks
that it attends to and nothing else: neither their place in the stream, nor its other content, nor
its capacity.

Dimension key: n blocks of the stream, S tokens of a block; K key/value heads, each read by G query
heads (G*S rows, head by head), N = K*G query heads; H head_dim.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_UNSEEN = -1e30
"""Score of what the mask excludes: finite, so that no row is without a maximum."""


class Visibility(NamedTuple):
    """Which tokens see which: those of their own datum up to their own position.

    Padding has ``datum`` -1 and position 0; it sees padding of its own block, so that it gives
    finite numbers.
    """

    datum: Int[Array, "n S"]
    position: Int[Array, "n S"]
    start: Int[Array, " n"]  # the first block that a block attends to; never falls
    blocks: Int[Array, ""]  # used ones; what lies behind them is neither read nor written


class Attended(NamedTuple):
    """What attention gives, and what its reverse pass needs of it."""

    out: Float[Array, "n K GS H"]
    logsumexp: Float[Array, "n K GS"]  # of the scaled scores, natural


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


def attend_blocks(
    q: Float[Array, "n K GS H"],
    k: Float[Array, "n K S H"],
    v: Float[Array, "n K S H"],
    seen: Visibility,
    into: Attended,
) -> Attended:
    """``softmax(q k / sqrt(H)) v``, written over the used blocks of ``into``."""

    def attend(i: Array, into: Attended) -> Attended:
        rows = _wide(q[i])

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = sums
            scores = _scores(rows, _wide(k[j]), seen, i, j)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            kept = jnp.exp(top - new_top)
            out = out * kept[..., None] + jnp.einsum("kqs,ksh->kqh", weights, _wide(v[j]))
            return new_top, total * kept + weights.sum(-1), out

        nothing = jnp.full(rows.shape[:-1], _UNSEEN), jnp.zeros(rows.shape[:-1])
        top, total, out = lax.fori_loop(seen.start[i], i + 1, add, (*nothing, jnp.zeros_like(rows)))
        return Attended(
            into.out.at[i].set((out / total[..., None]).astype(q.dtype)),
            into.logsumexp.at[i].set(top + jnp.log(total)),
        )

    return lax.fori_loop(0, seen.blocks, attend, into)


def attend_blocks_backward(
    q: Float[Array, "n K GS H"],
    k: Float[Array, "n K S H"],
    v: Float[Array, "n K S H"],
    attended: Attended,
    gradient: Float[Array, "n K GS H"],
    seen: Visibility,
    into: AttentionGradient,
) -> AttentionGradient:
    """Gradients of q, k and v from that of the output, written over the used blocks of ``into``."""
    scale = q.shape[-1] ** -0.5

    def attend(i: Array, into: AttentionGradient) -> AttentionGradient:
        rows, rows_gradient = _wide(q[i]), _wide(gradient[i])
        logsumexp = attended.logsumexp[i]
        shared = (rows_gradient * _wide(attended.out[i])).sum(-1)

        def parts(j: Array) -> tuple[Array, Array, Array]:
            keys = _wide(k[j])
            weights = jnp.exp(_scores(rows, keys, seen, i, j) - logsumexp[..., None])
            of_weights = jnp.einsum("kqh,ksh->kqs", rows_gradient, _wide(v[j]))
            of_scores = weights * (of_weights - shared[..., None]) * scale
            return (
                jnp.einsum("kqs,ksh->kqh", of_scores, keys),
                jnp.einsum("kqs,kqh->ksh", of_scores, rows),
                jnp.einsum("kqs,kqh->ksh", weights, rows_gradient),
            )

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_q, of_k, of_v = sums
            more_q, more_k, more_v = parts(j)
            return of_q + more_q, of_k.at[j].add(more_k), of_v.at[j].add(more_v)

        sums = jnp.zeros_like(rows), into.k, into.v
        of_q, of_k, of_v = lax.fori_loop(seen.start[i], i, add, sums)
        more_q, more_k, more_v = parts(i)
        # The first contribution to a block comes from itself, so what was there is written over.
        return AttentionGradient(
            into.q.at[i].set(of_q + more_q), of_k.at[i].set(more_k), of_v.at[i].set(more_v)
        )

    return lax.fori_loop(0, seen.blocks, attend, into)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _scores(
    rows: Float[Array, "K GS H"],
    keys: Float[Array, "K S H"],
    seen: Visibility,
    i: Int[Array, ""],
    j: Int[Array, ""],
) -> Float[Array, "K GS S"]:
    """Scaled scores of query block i with key block j."""
    scores = jnp.einsum("kqh,ksh->kqs", rows, keys) * rows.shape[-1] ** -0.5
    return jnp.where(_sees(seen, i, j, rows.shape[1] // keys.shape[1]), scores, _UNSEEN)


def _sees(
    seen: Visibility, i: Int[Array, ""], j: Int[Array, ""], groups: int
) -> Bool[Array, "1 GS S"]:
    same = seen.datum[i][:, None] == seen.datum[j][None, :]
    earlier = seen.position[i][:, None] >= seen.position[j][None, :]
    return jnp.tile(same & earlier, (groups, 1))[None]
