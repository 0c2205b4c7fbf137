"""Gradients of adapters by a Pallas kernel for GPUs (Triton), multiplied and added in one step.

``gradient_slots.add_blocks`` takes the gradient of each block, written by a product per block. This
kernel takes the factors of the gradients, and a program adds a part of the gradient of all blocks
of a request, one after the other, in registers. The gradient slot is read and written once. A
request's bits depend neither on the blocks around its own nor on how chunks divide them.

One call adds the gradients of many matrices: a program for each part of each of them keeps a GPU
busy, where those of one matrix would not.

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
from tuneserve_engine.backend.jax.target import target_platform
from tuneserve_engine.backend.jax.training.gradient_slots import BlockOwners

_LANES = 2
"""The programs that share a part's requests in a chunk, by turns."""


class Runs(NamedTuple):
    """The blocks of a chunk that belong to one request lie in a run.

    ``begins`` lists the first blocks of a chunk's runs, from the chunk's first place on.
    ``in_chunk`` of a block is the number of its chunk's runs. ``end`` of a run's first block is the
    block behind its last one, and 0 of any other block. If ``adds`` is given, only blocks where it
    is True are added.
    """

    slot: Int[Array, " n"]
    is_first: Bool[Array, " n"]
    begins: Int[Array, " n"]
    in_chunk: Int[Array, " n"]
    end: Int[Array, " n"]
    adds: Bool[Array, " n"] | None = None


class Term(NamedTuple):
    """A product to add to a buffer: the numbers of its factors, and the projection in the low one.

    The buffer is [L, J, D, R] if its ranks are last, or else [L, J, R, F].
    """

    wide: int
    low: int
    projection: int
    ranks_last: bool


def runs_of(owners: BlockOwners, chunk: int) -> Runs:
    """Return the runs of a micro-batch whose chunks have ``chunk`` blocks."""
    slot, is_first, is_used = owners
    count = slot.shape[0]
    block = jnp.arange(count, dtype=jnp.int32)
    same = is_used[1:] & is_used[:-1] & (slot[1:] == slot[:-1])
    goes_on = jnp.append(False, same) & (block % chunk != 0)
    breaks = jnp.append(jnp.where(goes_on, count, block), count)
    end = lax.cummin(breaks, reverse=True)[1:]
    end = jnp.where(is_used & ~goes_on, end, 0).astype(jnp.int32)
    begins = jnp.sort(jnp.where(end > 0, block, count).reshape(-1, chunk), axis=1).reshape(-1)
    runs = jnp.repeat((end > 0).reshape(-1, chunk).sum(1, dtype=jnp.int32), chunk)
    return Runs(slot, is_first, begins, runs, end)


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
    wides: list[Array] = []
    lows: list[Array] = []
    of_a: list[Term] = []
    of_b: list[Term] = []
    for names, factors in groups:
        for index in range(len(names)):
            of_a.append(Term(len(wides), len(lows) + 1, index, ranks_last=True))
            of_b.append(Term(len(wides) + 1 + index, len(lows), index, ranks_last=False))
        wides += [factors.x, *factors.by_outs]
        lows += [factors.low, factors.by_low]
    targets = [name for names, _ in groups for name in names]
    into = [side[name] for side in (a, b) for name in targets]
    added = add_products(wides, lows, [*of_a, *of_b], into, (runs, at, layer), wides[0].dtype)
    a |= zip(targets, added[: len(targets)], strict=True)
    b |= zip(targets, added[len(targets) :], strict=True)
    return a, b


def add_products(  # noqa: PLR0913
    wides: Sequence[Float[Array, "c S _"]],
    lows: Sequence[Float[Array, "_ c S W"]],
    terms: Sequence[Term],
    buffers: list[Array],
    place: tuple[Runs, Array, Array],
    dtype: DTypeLike,
) -> list[Array]:
    """Return the buffers, donated, plus the products of wide and low factors of each run.

    ``terms`` has an item per buffer. ``dtype`` is that of the base model. The place is the runs,
    the chunk's first block and the layer.
    """
    flat = [each.reshape(-1, *each.shape[-2:]) for each in buffers]
    width = lows[0].shape[3]
    steps = width // min(width, RANKS)
    tiles = sum(
        each.shape[1 if term.ranks_last else 2] // TILE
        for each, term in zip(flat, terms, strict=True)
    )
    given = list(wides), list(lows), place
    first = len(jax.tree.leaves(given))
    call = pl.pallas_call(
        partial(_kernel, terms=terms, slots=buffers[0].shape[1], steps=steps, dtype=dtype),
        grid=(min(_LANES, lows[0].shape[1]), tiles * steps),
        out_shape=[spec(each.shape, each.dtype) for each in flat],
        input_output_aliases={first + index: index for index in range(len(flat))},
        # Three stages took 0.9 times as long as two on an H200; 8 warps or narrower tiles, longer.
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=target_platform() != "gpu",
    )
    with jax.named_scope("block_lora_gradient"):
        added = call(*given, flat)
    return [new.reshape(old.shape) for new, old in zip(added, buffers, strict=True)]


def _kernel(  # noqa: PLR0913
    wides: list[Any],
    lows: list[Any],
    place: tuple[Any, Any, Any],
    _into: list[Any],
    *buffers: Any,
    terms: Sequence[Term],
    slots: int,
    steps: int,
    dtype: DTypeLike,
) -> None:
    runs, at, layer = place[0], place[1][...], place[2][...]
    lane, number = pl.program_id(0), pl.program_id(1)
    tokens = jnp.arange(lows[0].shape[2], dtype=jnp.int32)[:, None]
    step = lows[0].shape[3] // steps
    ranks = (number % steps) * step + jnp.arange(step, dtype=jnp.int32)[None, :]
    lanes = min(_LANES, lows[0].shape[1])
    mine = (runs.in_chunk[at] - lane + lanes - 1) // lanes

    def run(term: Term, buffer: Any, behind: int) -> None:
        wide, low = wides[term.wide], lows[term.low]
        columns = (number // steps - behind) * TILE + jnp.arange(TILE, dtype=jnp.int32)
        rank = buffer.shape[2 if term.ranks_last else 1]
        is_held = jnp.broadcast_to(ranks < rank, (TILE, step))
        both = (columns[:, None], ranks) if term.ranks_last else (ranks, columns[:, None])

        def add_block(block: Array, total: Array) -> Array:
            left = wide[block, tokens, columns[None, :]]
            more = product(left, low[term.projection, block, tokens, ranks], 0, 0, dtype)
            if runs.adds is None:
                return total + more
            return jnp.where(runs.adds[at + block], total + more, total)

        def add_run(index: Array, _: None) -> None:
            first = runs.begins[at + lane + index * lanes]
            here = buffer.at[layer * slots + runs.slot[first], *both]
            old = triton.load(here, mask=is_held, other=0.0)
            total = jnp.where(runs.is_first[first], 0.0, old)
            begin, end = first - at, runs.end[first] - at
            total = lax.fori_loop(begin, end, add_block, total)
            triton.store(here, total, mask=is_held)

        lax.fori_loop(0, mine, add_run, None)

    behind = 0
    for term, buffer in zip(terms, buffers, strict=True):
        end = behind + buffer.shape[1 if term.ranks_last else 2] // TILE
        is_mine = (number // steps >= behind) & (number // steps < end)
        pl.when(is_mine)(partial(run, term, buffer, behind))
        behind = end
