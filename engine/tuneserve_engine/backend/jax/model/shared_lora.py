"""LoRA of decoding by two Pallas kernels for GPUs (Triton): rows share the reading of an adapter.

Gathering the adapter of every row would read an adapter once per row, all of it in float32. Here,
programs read a part of one adapter slot and multiply it with all rows of the slot, in tiles. The
first kernel multiplies the input of a few projections with each one's A, in parts over D whose
number depends on D alone. The second adds these parts in order, multiplies the sum with B, and adds
the result to the products with the base weights. So a row's bits do not depend on its neighbours,
and NaN in one adapter does not reach rows of another. With rows in bfloat16, tensor cores multiply:
a float32 factor is split into three numbers of bfloat16. With rows in float32, products are exact
products of float32.

Tests run the kernels in interpret mode, and ``make gpu-compile`` compiles them.

Dimension key: L layers, J adapter slots, B rows, D inputs of a projection, F its outputs, R rank
bucket, W ranks padded to a tile, X tiles, M rows of a tile, P projections with the same input,
C parts of D.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.model.block_lora import flat
from tuneserve_engine.backend.jax.model.exact_product import product
from tuneserve_engine.backend.jax.model.tile import TILE, padded_rank
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.target import target_platform

ROWS_PER_TILE = 16
_PART_TILES, _PARTS = (2, 1, 3, 4, 5, 6, 7, 8), 48
"""The tiles of a part of D, best first, and the most parts if D can be divided so. With longer
parts, few programs wait for many tiles: on an H200, parts of four took more than twice as long as
those of two for q, k and v of an 8B model. The second kernel adds all parts in each program."""
_RANKS = 32
"""Ranks that one program of the first kernel computes, and that are multiplied at once."""


class RowTiles(NamedTuple):
    """The rows in tiles, each of which uses one adapter slot. Every row is in one tile.

    A tile with fewer rows repeats its first row, whose result is then written several times.
    """

    slot: Int[Array, " X"]  # -1 in an unused tile
    rows: Int[Array, "X M"]


class SharedLora(NamedTuple):
    """Adapters in slots that rows share, for one token per row.

    ``a[target]`` is [L, J, R, D] and ``b[target]`` is [L, J, F, R], of which ``layer`` is used;
    those of ``unembed`` have no L.
    """

    a: dict[str, Array]
    b: dict[str, Array]
    scale: Float[Array, " J"]
    tiles: RowTiles
    layer: Int[Array, ""]

    def of_layer(self, number: Int[Array, ""]) -> "SharedLora":
        """Return the adapters of one layer. Nothing is sliced: the kernels read in place."""
        return self._replace(layer=number)


def fits(a: Array, b: Array) -> bool:
    """Return whether the kernels take these matrices, in slots [..., R, D] and [..., F, R]."""
    return a.shape[-1] % TILE == b.shape[-2] % TILE == 0


def row_tiles(slot: Int[Array, " B"], slots: int) -> RowTiles:
    """Return the tiles of rows that use these adapter slots, of which there are ``slots``."""
    rows = slot.shape[0]
    index = jnp.arange(slots, dtype=jnp.int32)
    count = (slot[None, :] == index[:, None]).sum(1, dtype=jnp.int32)
    tiles = (count + ROWS_PER_TILE - 1) // ROWS_PER_TILE
    behind = jnp.cumsum(tiles, dtype=jnp.int32)
    number = jnp.arange(slots + rows // ROWS_PER_TILE, dtype=jnp.int32)
    found = (behind[None, :] <= number[:, None]).sum(1, dtype=jnp.int32)
    mine = jnp.minimum(found, slots - 1)
    # Places among the rows in the order of their slots, which is where a slot's rows are together.
    first = (number - (behind - tiles)[mine]) * ROWS_PER_TILE
    place = first[:, None] + jnp.arange(ROWS_PER_TILE, dtype=jnp.int32)[None, :]
    place = jnp.where(place < count[mine][:, None], place, first[:, None])
    place = (jnp.cumsum(count, dtype=jnp.int32) - count)[mine][:, None] + place
    order = jnp.argsort(slot, stable=True).astype(jnp.int32)
    is_used = found < slots
    taken = order[jnp.where(is_used[:, None], place, 0)]
    return RowTiles(jnp.where(is_used, mine, -1), taken)


def add_deltas(
    outs: Sequence[Float[Array, "B _"]],
    x: Float[Array, "B D"],
    names: Sequence[str],
    lora: SharedLora,
    out_dtype: DTypeLike,
) -> list[Float[Array, "B _"]]:
    """Return each projection's float32 product plus ``scale · (x A) B`` of each row's adapter.

    They are rounded to ``out_dtype``. The dtype of x is that of the base model.
    """
    a, b = ([flat(side[name]) for name in names] for side in (lora.a, lora.b))
    return _added(outs, _low(x, a, lora), b, lora, (out_dtype, x.dtype))


def _low(
    x: Float[Array, "B D"],
    a: list[Float[Array, "LJ R D"]],
    lora: SharedLora,
) -> Float[Array, "P C B W"]:
    """Return the parts of each row's ``x A``."""
    rank, inputs = a[0].shape[1:]
    tiles = inputs // TILE
    fitting = (n for n in _PART_TILES if tiles % n == 0 and tiles // n <= _PARTS)
    each = next(fitting, 1)
    width = padded_rank(rank)
    per_projection = width // min(width, _RANKS)
    call = pl.pallas_call(
        partial(_low_kernel, slots=lora.scale.shape[0], per_projection=per_projection),
        grid=(lora.tiles.slot.shape[0], tiles // each, len(a) * per_projection),
        out_shape=spec((len(a), tiles // each, x.shape[0], width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=_is_interpreted(),
    )
    with jax.named_scope("shared_lora"):
        low: Array = call(x, a, lora.tiles, lora.layer)
    return low


def _low_kernel(  # noqa: PLR0913
    x: Any, a: list[Any], tiles: Any, layer: Any, low: Any, *, slots: int, per_projection: int
) -> None:
    tile, part, number = (pl.program_id(axis) for axis in range(3))
    rows, slot = tiles.rows[tile][:, None], tiles.slot[tile]
    each, step = x.shape[1] // TILE // low.shape[1], low.shape[3] // per_projection
    ranks = (number % per_projection) * step + jnp.arange(step, dtype=jnp.int32)

    def run(index: int, bank: Any) -> None:
        total = jnp.zeros((ROWS_PER_TILE, step), jnp.float32)
        for chunk in range(each):  # unrolled, so that all loads start at once
            columns = (part * each + chunk) * TILE + jnp.arange(TILE, dtype=jnp.int32)[None, :]
            is_held = jnp.broadcast_to(ranks[:, None] < bank.shape[1], (step, TILE))
            at = bank.at[layer[...] * slots + slot, ranks[:, None], columns]
            right = triton.load(at, mask=is_held, other=0.0)
            total = total + product(x[rows, columns], right, 1, 1, x.dtype)
        low[index, part, rows, ranks[None, :]] = total

    for index, bank in enumerate(a):
        is_mine = (number // per_projection == index) & (slot >= 0)
        pl.when(is_mine)(partial(run, index, bank))


def _added(
    outs: Sequence[Float[Array, "B _"]],
    low: Float[Array, "P C B W"],
    b: list[Float[Array, "LJ _ R"]],
    lora: SharedLora,
    dtypes: tuple[DTypeLike, DTypeLike],
) -> list[Array]:
    """Return the results, of the first dtype; the second is that of the base model."""
    out_dtype, dtype = dtypes
    call = pl.pallas_call(
        partial(_add_kernel, dtype=dtype),
        grid=(lora.tiles.slot.shape[0], sum(out.shape[1] // TILE for out in outs)),
        out_shape=[spec(out.shape, out_dtype) for out in outs],
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=_is_interpreted(),
    )
    with jax.named_scope("shared_lora"):
        return list(call(low, b, lora.scale, lora.tiles, lora.layer, list(outs)))


def _add_kernel(  # noqa: PLR0913
    low: Any,
    b: list[Any],
    scale: Any,
    tiles: Any,
    layer: Any,
    outs: list[Any],
    *added: Any,
    dtype: DTypeLike,
) -> None:
    tile, number = (pl.program_id(axis) for axis in range(2))
    rows, slot = tiles.rows[tile][:, None], tiles.slot[tile]
    parts, width = low.shape[1], low.shape[3]
    step = min(width, _RANKS)

    def run(index: int, behind: int) -> None:
        bank, out = b[index], outs[index]
        columns = (number - behind) * TILE + jnp.arange(TILE, dtype=jnp.int32)

        base = out[rows, columns[None, :]]
        delta = jnp.zeros((ROWS_PER_TILE, TILE), jnp.float32)
        for chunk in range(width // step):
            ranks = chunk * step + jnp.arange(step, dtype=jnp.int32)[None, :]
            left = low[index, 0, rows, ranks]
            for part in range(1, parts):  # unrolled, so that all loads start at once
                left = left + low[index, part, rows, ranks]
            is_held = jnp.broadcast_to(ranks < bank.shape[2], (TILE, step))
            at = bank.at[layer[...] * scale.shape[0] + slot, columns[:, None], ranks]
            right = triton.load(at, mask=is_held, other=0.0)
            delta = delta + product(left * scale[slot], right, 1, 1, dtype)
        total = base + delta
        added[index][rows, columns[None, :]] = total.astype(added[index].dtype)

    behind = 0
    for index, out in enumerate(outs):
        end = behind + out.shape[1] // TILE
        is_mine = (number >= behind) & (number < end) & (slot >= 0)
        pl.when(is_mine)(partial(run, index, behind))
        behind = end


def _is_interpreted() -> bool:
    """Return whether JAX runs the kernels itself, which takes no GPU but a long time."""
    return target_platform() != "gpu"
