"""Gradients of adapters by a Pallas kernel for GPUs (Triton), multiplied and added in one step.

``gradient_slots.add_blocks`` takes the gradient of each block, written by a product per block. This
kernel takes the factors of the gradients, and a program adds a part of the gradient of all blocks
of a request, one after the other, in registers. The gradient slot is read and written once. A
request's bits depend neither on the blocks around its own nor on how chunks divide them.

Dimension key: as in ``model.block_lora``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tuneserve_engine.backend.jax.model.block_lora import RANKS, Factors
from tuneserve_engine.backend.jax.model.exact_product import product
from tuneserve_engine.backend.jax.model.tile import TILE
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners


class Runs(NamedTuple):
    """The blocks of a chunk that belong to one request lie in a run.

    ``end`` of a run's first block is the block behind its last one, and 0 of any other block.
    Only blocks that ``adds`` are added.
    """

    slot: Int[Array, " n"]
    is_first: Bool[Array, " n"]
    end: Int[Array, " n"]
    adds: Bool[Array, " n"]


def runs_of(owners: BlockOwners, chunk: int) -> Runs:
    """Return the runs of a micro-batch whose chunks have ``chunk`` blocks."""
    slot, is_first, is_used = owners
    count = slot.shape[0]
    block = jnp.arange(count, dtype=jnp.int32)
    same = is_used[1:] & is_used[:-1] & (slot[1:] == slot[:-1])
    goes_on = jnp.append(False, same) & (block % chunk != 0)
    breaks = jnp.append(jnp.where(goes_on, count, block), count)
    end = lax.cummin(breaks, reverse=True)[1:]
    return Runs(slot, is_first, jnp.where(is_used & ~goes_on, end, 0).astype(jnp.int32), is_used)


def add_factors(
    buffers: tuple[dict[str, Array], dict[str, Array]],
    groups: Sequence[tuple[Sequence[str], Factors]],
    layer: Int[Array, ""],
    runs: Runs,
    at: Int[Array, ""],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the buffers of A, [L, J, D, R], and of B, [L, J, R, F], with gradients added.

    Each group of projections has the factors of the chunk from block ``at`` on. The first block of
    a request overwrites the layer's gradient in its slot.
    """
    a, b = (dict(side) for side in buffers)
    for names, factors in groups:
        x, low, by_low, by_outs = factors
        place = runs, at, layer
        of_a, of_b = ([side[name] for name in names] for side in (a, b))
        of_a = add_products([x], by_low, of_a, place, x.dtype, ranks_last=True)
        of_b = add_products(by_outs, low, of_b, place, x.dtype, ranks_last=False)
        a |= zip(names, of_a, strict=True)
        b |= zip(names, of_b, strict=True)
    return a, b


def add_products(  # noqa: PLR0913
    wides: Sequence[Float[Array, "c S _"]],
    low: Float[Array, "P c S W"],
    buffers: list[Array],
    place: tuple[Runs, Array, Array],
    dtype: DTypeLike,
    *,
    ranks_last: bool,
) -> list[Array]:
    """Return the buffers, donated, plus the products of wide and low factors of each run.

    A buffer is [L, J, D, R] if its ranks are last, or else [L, J, R, F]. ``dtype`` is that of the
    base model. The place is the runs, the chunk's first block and the layer.
    """
    flat = [each.reshape(-1, *each.shape[-2:]) for each in buffers]
    steps = low.shape[3] // min(low.shape[3], RANKS)
    tiles = sum(each.shape[1 if ranks_last else 2] // TILE for each in flat)
    given = list(wides), low, place
    first = len(jax.tree.leaves(given))
    call = pl.pallas_call(
        partial(
            _kernel, slots=buffers[0].shape[1], steps=steps, dtype=dtype, ranks_last=ranks_last
        ),
        grid=(low.shape[1], tiles * steps),
        out_shape=[spec(each.shape, each.dtype) for each in flat],
        input_output_aliases={first + index: index for index in range(len(flat))},
        # Three stages took 0.9 times as long as two on an H200; 8 warps or narrower tiles, longer.
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=jax.default_backend() != "gpu",
    )
    with jax.named_scope("block_lora_gradient"):
        added = call(*given, flat)
    return [new.reshape(old.shape) for new, old in zip(added, buffers, strict=True)]


def _kernel(  # noqa: PLR0913
    wides: list[Any],
    low: Any,
    place: tuple[Any, Any, Any],
    _into: list[Any],
    *buffers: Any,
    slots: int,
    steps: int,
    dtype: DTypeLike,
    ranks_last: bool,
) -> None:
    runs, at, layer = place
    first, number = pl.program_id(0), pl.program_id(1)
    behind_run = runs.end[at[...] + first] - at[...]
    tokens = jnp.arange(low.shape[2], dtype=jnp.int32)[:, None]
    step = low.shape[3] // steps
    ranks = (number % steps) * step + jnp.arange(step, dtype=jnp.int32)[None, :]

    def run(index: int, buffer: Any, behind: int) -> None:
        wide = wides[index % len(wides)]
        columns = (number // steps - behind) * TILE + jnp.arange(TILE, dtype=jnp.int32)
        matrix = layer[...] * slots + runs.slot[at[...] + first]

        def add(block: Array, total: Array) -> Array:
            left = wide[block, tokens, columns[None, :]]
            more = product(left, low[index, block, tokens, ranks], 0, 0, dtype)
            return jnp.where(runs.adds[at[...] + block], total + more, total)

        rank = buffer.shape[2 if ranks_last else 1]
        is_held = jnp.broadcast_to(ranks < rank, (TILE, step))
        both = (columns[:, None], ranks) if ranks_last else (ranks, columns[:, None])
        here = buffer.at[matrix, *both]
        old = triton.load(here, mask=is_held, other=0.0)
        total = jnp.where(runs.is_first[at[...] + first], 0.0, old)
        total = lax.fori_loop(first, behind_run, add, total)
        triton.store(here, total, mask=is_held)

    behind = 0
    for index, buffer in enumerate(buffers):
        end = behind + buffer.shape[1 if ranks_last else 2] // TILE
        mine = number // steps
        is_mine = (mine >= behind) & (mine < end) & (behind_run > first)
        pl.when(is_mine)(partial(run, index, buffer, behind))
        behind = end
