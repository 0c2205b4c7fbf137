"""Attention over pages by a Pallas kernel for GPUs (Triton); ``paged`` has the XLA loop.

The loop of ``paged`` launches a dozen small kernels per round and gathers pages before it reads
them. Here, one program reads the pages of one row and one key/value head in place, up to the row's
last position. A row of one position is split into parts of whole pages, so that few rows fill a
GPU. The split depends on the number of rows, which never changes, and on the row's own length, so
the row's bits do not depend on its neighbours.

Tests run the kernel in interpret mode, and ``make gpu-compile`` compiles it.

Dimension key: as in ``paged``; X tiles of a row, M queries of a tile (of one head, or of the heads
that read one key/value head), C parts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.attention.base import UNSEEN
from tuneserve_engine.backend.jax.attention.rotate_gpu import Within
from tuneserve_engine.backend.jax.specs import spec

_LEAST_TILE = 16
"""The fewest rows and columns that tensor cores multiply."""
_PROGRAMS, _MOST_PARTS = 512, 8
"""Rows of one position are split into parts until this many programs fill the GPU."""


class Place(NamedTuple):
    """The place of the rows' pages and queries, as in ``paged.attend_pages``."""

    table: Int[Array, "B J"]
    layer: Int[Array, ""]
    positions: Int[Array, "B T"]


def fits(keys: Float[Array, "P K H S"]) -> bool:
    """Return whether the kernel takes these pages: powers of two, in bfloat16.

    Exact products of float32 would not run on tensor cores.
    """
    sizes = keys.shape[2:]
    is_tiled = all(size >= _LEAST_TILE and size == pl.next_power_of_2(size) for size in sizes)
    return is_tiled and keys.dtype == jnp.bfloat16


def attend(  # noqa: PLR0913
    q: Float[Array, "B T N H"],
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    table: Int[Array, "B J"],
    positions: Int[Array, "B T"],
    within: Within | None = None,
    *,
    interpret: bool,
) -> Float[Array, "B T NH"]:
    """See ``paged.attend_pages``. Weights are rounded to the dtype of the values."""
    count, length, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    if length == 1:  # one tile per key/value head: its query heads
        tiles = q.reshape(count, kv_heads, heads // kv_heads, head_dim)
    else:  # one tile per query head: all of the row's positions
        tiles = q.transpose(0, 2, 1, 3)
    # By the heads of all devices: the parts decide the order of sums.
    all_heads = (within and within.kv_heads) or kv_heads
    parts = min(max(_PROGRAMS // (count * all_heads), 1), _MOST_PARTS) if length == 1 else 1
    number, layers = within[:2] if within else (jnp.int32(0), 1)
    at = Place(table, number, positions)
    parted = _call(tiles, keys, values, at, keys.shape[0] // layers, parts, interpret)
    out = _merged(*parted, dtype=q.dtype, interpret=interpret)
    if length > 1:
        out = out.transpose(0, 2, 1, 3)
    return out.reshape(count, length, heads * head_dim)


def _merged(
    out: Float[Array, "B X C M H"],
    top: Float[Array, "B X C M"],
    total: Float[Array, "B X C M"],
    *,
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "B X M H"]:
    """Return the attention over all parts from the softmax of each."""
    count, tiles, _, rows, head_dim = out.shape
    call = pl.pallas_call(
        _merge_kernel,
        grid=(count, tiles),
        out_shape=spec((count, tiles, rows, head_dim), dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
    )
    with jax.named_scope("merged_attention"):
        merged: Array = call(out, top, total)
    return merged


def _merge_kernel(out: Any, top: Any, total: Any, merged: Any) -> None:
    row, tile = (pl.program_id(axis) for axis in range(2))
    held = top.shape[3]
    query = jnp.minimum(jnp.arange(pl.next_power_of_2(held), dtype=jnp.int32), held - 1)
    parts = range(top.shape[2])
    tops = [top[row, tile, part, query] for part in parts]
    highest = tops[0]
    for each in tops[1:]:
        highest = jnp.maximum(highest, each)
    shares = [jnp.exp(each - highest) for each in tops]
    sums = [total[row, tile, part, query] * shares[part] for part in parts]
    results = [out[row, tile, part, query] * shares[part][:, None] for part in parts]
    below, above = sum(sums[1:], sums[0]), sum(results[1:], results[0])
    below = jnp.where(below > 0, below, 1.0)
    merged[row, tile, query] = (above / below[:, None]).astype(merged.dtype)


def _call(  # noqa: PLR0913
    tiles: Float[Array, "B X M H"],
    keys: Float[Array, "P K H S"],
    values: Float[Array, "P K S H"],
    at: Place,
    layer_pages: int,
    parts: int,
    interpret: bool,
) -> Any:
    count, per_row, rows, head_dim = tiles.shape
    sums = spec((count, per_row, parts, rows), jnp.float32)
    out = spec((*sums.shape, head_dim), jnp.float32)
    call = pl.pallas_call(
        partial(_kernel, layer_pages=layer_pages),
        grid=(count, per_row, parts),
        out_shape=[out, sums, sums],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )
    with jax.named_scope("paged_attention"):
        return call(tiles, keys, values, at)


def _kernel(  # noqa: PLR0913
    tiles: Any,
    keys: Any,
    values: Any,
    at: Any,
    out: Any,
    top_out: Any,
    total_out: Any,
    *,
    layer_pages: int,
) -> None:
    row, tile, part = (pl.program_id(axis) for axis in range(3))
    head = tile // (tiles.shape[1] // keys.shape[1])
    size = values.shape[2]
    scale = tiles.shape[3] ** -0.5
    held = tiles.shape[2]
    # The tile's size is a power of two: the last query is computed several times.
    room = max(pl.next_power_of_2(held), _LEAST_TILE)
    query = jnp.minimum(jnp.arange(room, dtype=jnp.int32), held - 1)
    mine = tiles[row, tile, query]
    limit = at.positions[row, jnp.minimum(query, at.positions.shape[1] - 1)]
    end = limit.max()
    # A dispatch may decode past the context's end: those tokens are dropped, and have no page.
    pages = jnp.minimum((end + size) // size, at.table.shape[1])
    each = (pages + out.shape[2] - 1) // out.shape[2]

    def add(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, result = sums
        page = at.table[row, number] + at.layer[...] * layer_pages
        position = number * size + jnp.arange(size, dtype=jnp.int32)
        scores = _product(mine, keys[page, head]) * scale
        scores = jnp.where(position[None, :] <= limit[:, None], scores, UNSEEN)
        new_top = jnp.maximum(top, scores.max(-1))
        kept, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        # Positions after this sequence's end may hold an earlier one's NaN, and 0 x NaN is NaN.
        read = values[page, head]
        read = jnp.where((position <= end)[:, None], read, jnp.zeros_like(read))
        more = _product(weights, read)
        return new_top, total * kept + weights.sum(-1), result * kept[:, None] + more

    rows = mine.shape[0]
    nothing = jnp.full(rows, UNSEEN, jnp.float32), jnp.zeros(rows, jnp.float32)
    first = part * each
    behind = jnp.minimum(first + each, pages)
    start = (*nothing, jnp.zeros(mine.shape, jnp.float32))
    top, total, result = lax.fori_loop(first, behind, add, start)
    out[row, tile, part, query] = result
    top_out[row, tile, part, query], total_out[row, tile, part, query] = top, total


def _product(x: Float[Array, "I J"], y: Float[Array, "J K"]) -> Float[Array, "I K"]:
    """Return the product in float32, with x in y's dtype."""
    return jnp.dot(
        x.astype(y.dtype),
        y,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
