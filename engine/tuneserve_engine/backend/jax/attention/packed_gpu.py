"""Attention of a packed micro-batch as Pallas kernels for GPUs (Triton); ``packed`` has the XLA
loops.

JAX's own kernel (``jax.experimental.pallas.ops.gpu.attention.mha``) takes segment ids, but visits
every key up to a query's own: packing saves no time, and a NaN of one datum reaches the others as
0 * NaN. Here the loops end where the mask does.

Tests run these kernels in interpret mode, and ``make gpu-compile`` compiles them for an H200, for
every head_dim to 128 and groups of 1 to 8 query heads. Products of float32 are exact (no TF32).
With bfloat16, the weights and the gradient of the scores are rounded for their products, as in
FlashAttention. Heads are padded to a power of two.

Dimension key: as in ``packed``. Kernels take whole buffers, with queries as [m, N, S, H].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

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

_LEAST_HEAD_DIM = 16
"""The smallest head_dim of a tile that tensor cores multiply."""


class _Layout(NamedTuple):
    """The micro-batch as a kernel sees it: references to whole arrays."""

    scale: Any  # [] scale of the scores
    blocks: Any  # [] used blocks of queries
    keys: Any  # [] used blocks of keys
    base: Any  # [] the first block of queries
    key_base: Any  # []
    attended_base: Any  # []
    first: Any  # [] the number of the first block of queries among the blocks of keys
    start: Any  # [n]
    stop: Any  # [n] the block after the last query block that meets a key block
    segment_ids: Any  # [n, S]
    position: Any  # [n, S]
    windows: Any  # Windows


def attend(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "l K S H"],
    v: Float[Array, "l K S H"],
    seen: Visibility,
    into: Attended,
    *,
    base: Int[Array, ""] | int,
    attended_base: Int[Array, ""] | int,
    own: OwnBlocks | None = None,
    interpret: bool,
) -> Attended:
    """See ``packed.attend_blocks``."""
    block, head_dim = k.shape[2:]
    heads = partial(_heads, block=block)
    out, logsumexp = _call(
        _forward_kernel,
        _layout(seen, head_dim, base, attended_base, own),
        (_padded(heads(q)), _padded(k), _padded(v)),
        (_padded(heads(into.out)), heads(into.logsumexp)),
        blocks=seen.start.shape[0] if own is None else own.size,
        interpret=interpret,
    )
    return Attended(
        out[..., :head_dim].reshape(into.out.shape), logsumexp.reshape(into.logsumexp.shape)
    )


def attend_backward(  # noqa: PLR0913
    q: Float[Array, "m K GS H"],
    k: Float[Array, "l K S H"],
    v: Float[Array, "l K S H"],
    attended: Attended,
    gradient: Float[Array, "n K GS H"],
    seen: Visibility,
    into: AttentionGradient,
    *,
    base: Int[Array, ""] | int,
    attended_base: Int[Array, ""] | int,
    own: OwnBlocks | None = None,
    interpret: bool,
) -> AttentionGradient:
    """See ``packed.attend_blocks_backward``."""
    n, (block, head_dim) = gradient.shape[0], k.shape[2:]
    heads = partial(_heads, block=block)
    mine = lax.dynamic_slice_in_dim(attended.out, attended_base, n)
    shared = (gradient.astype(jnp.float32) * mine.astype(jnp.float32)).sum(-1)
    layout = _layout(seen, head_dim, base, attended_base, own)
    arrays = (
        _padded(heads(q)),
        _padded(k),
        _padded(v),
        heads(attended.logsumexp),
        _padded(heads(gradient)),
        heads(shared),
    )
    call = partial(_call, layout=layout, arrays=arrays, interpret=interpret)
    with jax.named_scope("attention_backward"):
        (of_q,) = call(_query_kernel, into=(_padded(heads(into.q)),), blocks=n)
        into_keys = _padded(into.k), _padded(into.v)
        of_k, of_v = call(_key_kernel, into=into_keys, blocks=seen.start.shape[0])
    return AttentionGradient(
        of_q[..., :head_dim].reshape(into.q.shape), of_k[..., :head_dim], of_v[..., :head_dim]
    )


def _forward_kernel(layout: _Layout, arrays: Any, _into: Any, out: Any, sums: Any) -> None:
    q, k, v = arrays
    i, head = pl.program_id(0), pl.program_id(1)
    key_head = head // (q.shape[1] // k.shape[1])

    @pl.when(i < layout.blocks[...])
    def run() -> None:
        rows, at = q[layout.base[...] + i, head], layout.first[...] + i
        mine = Windows(*(each[at] for each in layout.windows))

        def add(state: tuple[Array, Any]) -> tuple[Array, Any]:
            first, (top, total, result) = state
            key = _window_at(layout, first, at)
            keys, values = (x[key[0], key_head, key[1]] for x in (k, v))
            scores = _product(rows, keys, 1, 1) * layout.scale[...]
            scores = jnp.where(sees_window(mine, first), scores, UNSEEN)
            new_top = jnp.maximum(top, scores.max(-1))
            kept, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
            more = _product(weights, values, 1, 0)
            after = next_window(layout.windows.end, first, at)
            return after, (new_top, total * kept + weights.sum(-1), result * kept[:, None] + more)

        size = rows.shape[0]
        nothing = jnp.full(size, UNSEEN, jnp.float32), jnp.zeros(size, jnp.float32)
        state = layout.windows.first[at, 0], (*nothing, jnp.zeros(rows.shape, jnp.float32))
        behind = (at + 1) * size
        _, (top, total, result) = lax.while_loop(lambda state: state[0] < behind, add, state)
        out[layout.attended_base[...] + i, head] = (result / total[:, None]).astype(out.dtype)
        sums[layout.attended_base[...] + i, head] = top + jnp.log(total)


def _window_at(layout: _Layout, first: Array, i: Array) -> tuple[Array, Array]:
    """Return block and offset of each token of a window; tokens after block i become its last."""
    size = layout.segment_ids.shape[1]
    token = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), (i + 1) * size - 1)
    return layout.key_base[...] + token // size, token % size


def _query_kernel(layout: _Layout, arrays: Any, _into: Any, of_q: Any) -> None:
    """Compute the gradient of one query block, from all key blocks that it meets."""
    i, head = pl.program_id(0), pl.program_id(1)
    key_head = head // (arrays[0].shape[1] // arrays[1].shape[1])

    @pl.when(i < layout.blocks[...])
    def run() -> None:
        def add(j: Array, total: Array) -> Array:
            keys, _, of_scores = _backward_tile(layout, arrays, (i, head), (j, key_head))
            return total + _product(of_scores, keys, 1, 0)

        nothing, at = jnp.zeros(of_q.shape[2:], jnp.float32), layout.first[...] + i
        total = lax.fori_loop(layout.start[at], at + 1, add, nothing)
        of_q[i, head] = (total * layout.scale[...]).astype(of_q.dtype)


def _key_kernel(layout: _Layout, arrays: Any, _into: Any, of_k: Any, of_v: Any) -> None:
    """Compute the gradients of one block of keys and values, from all query blocks it meets."""
    q, _, _, _, gradient, _ = arrays
    j, key_head = pl.program_id(0), pl.program_id(1)
    groups = q.shape[1] // of_k.shape[1]

    @pl.when(j < layout.keys[...])
    def run() -> None:
        def add(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
            # A loop: if it is unrolled, every head of the group keeps its tiles in shared memory,
            # and the compiler refuses groups of four and more at a head_dim of 128.
            def add_head(head: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
                by_k, by_v = totals
                at = i, key_head * groups + head
                _, weights, of_scores = _backward_tile(layout, arrays, at, (j, key_head))
                by_k += _product(of_scores, q[layout.base[...] + i, at[1]], 0, 0)
                by_v += _product(weights, gradient[at], 0, 0)
                return by_k, by_v

            both: tuple[Array, Array] = lax.fori_loop(0, groups, add_head, totals)
            return both

        nothing = jnp.zeros(of_k.shape[2:], jnp.float32)
        # Queries are the device's own: from the first one that meets the block, to the last.
        begin = jnp.maximum(j - layout.first[...], 0)
        end = jnp.minimum(layout.stop[j] - layout.first[...], layout.blocks[...])
        by_k, by_v = lax.fori_loop(begin, end, add, (nothing, nothing))
        of_k[j, key_head] = (by_k * layout.scale[...]).astype(of_k.dtype)
        of_v[j, key_head] = by_v.astype(of_v.dtype)


def _backward_tile(
    layout: _Layout,
    arrays: Any,
    query: tuple[Any, Any],
    key: tuple[Any, Any],
) -> tuple[Array, Array, Array]:
    """Return keys, weights and the gradient of the scaled scores of two (block, head) pairs."""
    q, k, v, logsumexp, gradient, shared = arrays
    (i, head), (j, key_head) = query, key
    keys = k[layout.key_base[...] + j, key_head]
    scores = _scores(q[layout.base[...] + i, head], keys, layout, i, j)
    weights = jnp.exp(scores - logsumexp[layout.attended_base[...] + i, head][:, None])
    of_weights = _product(gradient[i, head], v[layout.key_base[...] + j, key_head], 1, 1)
    return keys, weights, weights * (of_weights - shared[i, head][:, None])


def _scores(rows: Array, keys: Array, layout: _Layout, i: Any, j: Any) -> Float[Array, "S S"]:
    at = layout.first[...] + i
    same = layout.segment_ids[at][:, None] == layout.segment_ids[j][None, :]
    sees = same & (layout.position[at][:, None] >= layout.position[j][None, :])
    return jnp.where(sees, _product(rows, keys, 1, 1) * layout.scale[...], UNSEEN)


def _product(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """Contract an axis of each factor, in float32, with x in y's dtype."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _call(  # noqa: PLR0913
    kernel: Callable[..., None],
    layout: _Layout,
    arrays: tuple[Array, ...],
    into: tuple[Array, ...],
    *,
    blocks: int,
    interpret: bool,
) -> Any:
    """Run the kernel for every block and head of ``into``, and return ``into`` overwritten."""
    first = len(jax.tree.leaves((layout, arrays)))
    # Exact float32 products take place in registers. Compiled code is smaller with eight warps than
    # with four, which is a prediction only: eight have not been timed on a GPU.
    warps = 8 if arrays[0].dtype == jnp.float32 else 4
    return pl.pallas_call(
        kernel,
        grid=(blocks, into[0].shape[1]),
        out_shape=[jax.eval_shape(lambda x: x, x) for x in into],
        input_output_aliases={first + index: index for index in range(len(into))},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
    )(layout, arrays, into)


def _layout(
    seen: Visibility, head_dim: int, base: Any, attended_base: Any, own: OwnBlocks | None
) -> _Layout:
    index = jnp.arange(seen.start.shape[0], dtype=jnp.int32)
    # Starts never decrease: the used query blocks that meet block j are j to the last whose start
    # is at most j.
    meets = (seen.start[None, :] <= index[:, None]) & (index < seen.blocks)[None, :]
    stop = meets.sum(1, dtype=jnp.int32)
    first, blocks, key_base = (0, seen.blocks, base) if own is None else (*own[:2], 0)
    return _Layout(
        jnp.float32(head_dim**-0.5),
        blocks,
        seen.blocks,
        jnp.asarray(base, jnp.int32),
        jnp.asarray(key_base, jnp.int32),
        jnp.asarray(attended_base, jnp.int32),
        jnp.asarray(first, jnp.int32),
        seen.start,
        stop,
        seen.segment_ids,
        seen.position,
        windows(seen),
    )


def _heads(x: Array, *, block: int) -> Array:
    """Reshape [m, K, G*S, ...] to [m, N, S, ...]: the order of elements is the same."""
    return x.reshape(x.shape[0], -1, block, *x.shape[3:])


def _padded(x: Float[Array, "m N S H"]) -> Float[Array, "m N S P"]:
    """Pad heads with zeros up to the next head_dim that Triton takes."""
    head_dim = max(pl.next_power_of_2(x.shape[-1]), _LEAST_HEAD_DIM)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, head_dim - x.shape[-1])))
