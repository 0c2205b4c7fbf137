"""LoRA of micro-batches by Pallas kernels for GPUs (Triton), which read adapters in their slots.

Gathering the adapter of every block of tokens would write and read as many copies as there are
blocks, all in float32. Here, a program multiplies the tokens of one block with a part of the
block's adapter. One kernel contracts tokens with the A of all projections that have the same input,
in parts whose number depends on the shapes alone. Another expands the sum of the parts with B, adds
the products with the base weights, and rounds. The backward pass does the same with B and A. It
leaves the gradients of adapters as factors, which ``training.gradient_kernels`` multiplies.

A block's bits do not depend on its neighbours, and NaN in one adapter does not reach the blocks of
another. With tokens in bfloat16, tensor cores multiply: a float32 factor is split into three
numbers of bfloat16. With tokens in float32, products are exact products of float32.

Tests run the kernels in interpret mode, and ``make gpu-compile`` compiles them in bfloat16.

Dimension key: L layers, J adapter slots, n blocks of a micro-batch, c blocks of a chunk, S tokens
of a block, D inputs of a projection, F its outputs, R rank bucket, W ranks padded to a tile, P
projections with the same input, C parts of D or F.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tuneserve_engine.backend.jax.model.exact_product import product
from tuneserve_engine.backend.jax.model.tile import TILE, padded_rank
from tuneserve_engine.backend.jax.specs import spec
from tuneserve_engine.backend.jax.target import target_platform

RANKS = 32
"""Ranks that a program handles at once."""
_PART_TILES, _PARTS = 8, 32
"""The least tiles of a part of the widest projection, and the most parts. More parts keep more of a
GPU busy; each costs a sum per token."""
LOW = "lora_low"
"""The name of ``Factors.low`` as a value that the backward pass may read."""
_LEAST_SIZE = 16  # Triton multiplies no smaller matrices


class Factors(NamedTuple):
    """The gradients of the adapters of projections with one input, not yet multiplied.

    A block's gradient of A is ``xᵀ by_low``, and that of B is ``lowᵀ by_outs``.
    """

    x: Float[Array, "c S _"]
    low: Float[Array, "_ c S W"]  # scale · (x A) of each projection
    by_low: Float[Array, "_ c S W"]  # the gradient by x A
    by_outs: tuple[Float[Array, "c S _"], ...]


class BlockLora(NamedTuple):
    """The adapters of a chunk's blocks, in slots. Block i uses slot ``slot[at + i]``.

    ``a[target]`` is [L, J, D, R] and ``b[target]`` is [L, J, R, F], of which ``layer`` is used.
    ``factors`` has an item for each group of projections with one input, named after the first of
    them. Its values are never read. The gradient by them is the factors of the adapters' gradients.
    """

    a: dict[str, Array]
    b: dict[str, Array]
    scale: Float[Array, " J"]
    slot: Int[Array, " n"]
    at: Int[Array, ""]
    layer: Int[Array, ""]
    factors: dict[str, Factors]

    @property
    def trained(self) -> dict[str, Factors]:
        return self.factors

    @property
    def constants(self) -> "BlockLora":
        return self._replace(factors={})

    def with_trained(self, trained: dict[str, Factors]) -> "BlockLora":
        return self._replace(factors=trained)


def is_used(a: dict[str, Array], b: dict[str, Array], size: int) -> bool:
    """Return whether the kernels compute these adapters, in blocks of ``size`` tokens."""
    return _is_gpu() and fits(a, b, size)


def fits(a: dict[str, Array], b: dict[str, Array], size: int) -> bool:
    """Return whether the kernels take these shapes, [..., D, R] and [..., R, F]."""
    widths = [x.shape[-2] for x in a.values()] + [x.shape[-1] for x in b.values()]
    is_tile = size >= _LEAST_SIZE and pl.next_power_of_2(size) == size
    return is_tile and all(width % TILE == 0 for width in widths)


def blank_factors(
    a: dict[str, Array],
    b: dict[str, Array],
    groups: Sequence[Sequence[str]],
    tokens: tuple[int, int],
    dtype: DTypeLike,
) -> dict[str, Factors]:
    """Return zeros for the ``factors`` of a ``BlockLora``, for ``tokens`` = (c, S) of ``dtype``."""

    def blank(names: Sequence[str]) -> Factors:
        width = padded_rank(a[names[0]].shape[-1])
        low = jnp.zeros((len(names), *tokens, width), jnp.float32)
        x = jnp.zeros((*tokens, a[names[0]].shape[-2]), dtype)
        by_outs = [jnp.zeros((*tokens, b[name].shape[-1]), dtype) for name in names]
        return Factors(x, low, low, tuple(by_outs))

    return {names[0]: blank(names) for names in groups}


def add_deltas(
    outs: Sequence[Float[Array, "c S _"]],
    x: Float[Array, "c S D"],
    names: Sequence[str],
    lora: BlockLora,
) -> list[Float[Array, "c S _"]]:
    """Return each projection's float32 product plus ``scale · (x A) B``, rounded to x's dtype."""
    group = GroupLora(
        [lora.a[name] for name in names],
        [lora.b[name] for name in names],
        lora.scale,
        ChunkSlots(lora.slot, lora.at, lora.layer),
    )
    return _add_deltas(list(outs), x, group, lora.factors[names[0]])


class ChunkSlots(NamedTuple):
    """Block i of a chunk uses ``slot[at + i]`` of ``layer``, or no adapter if that is below 0."""

    slot: Any  # [n]
    at: Any  # []
    layer: Any  # []


class GroupLora(NamedTuple):
    """The adapters of projections with one input, [L, J, D, R] and [L, J, R, F] each."""

    a: list[Array]
    b: list[Array]
    scale: Array
    place: ChunkSlots


def low_of(x: Float[Array, "c S D"], group: GroupLora, dtype: DTypeLike) -> Float[Array, "P c S W"]:
    """Return each projection's ``scale · (x A)``, undefined where a block uses no adapter.

    ``dtype`` is that of the base model.
    """
    return _scaled(_contract([x], group.a, group, dtype, ranks_last=True), group)


def by_low_of(
    by_outs: Sequence[Float[Array, "c S _"]], group: GroupLora, dtype: DTypeLike
) -> Float[Array, "P c S W"]:
    """Return the gradient by ``x A`` of each projection, from the gradients by their outputs."""
    return _scaled(_contract(list(by_outs), group.b, group, dtype, ranks_last=False), group)


def add_outputs(
    bases: Sequence[Float[Array, "c S _"]],
    low: Float[Array, "P c S W"],
    group: GroupLora,
    out_dtype: DTypeLike,
    dtype: DTypeLike,
) -> list[Float[Array, "c S _"]]:
    """Return each projection's base plus ``low B``, in ``out_dtype``.

    Bases of the same dtype are donated. They keep the blocks that use no adapter.
    """
    shapes = [spec(base.shape, out_dtype) for base in bases]
    return _expand(low, group.b, group, list(bases), shapes, dtype, ranks_last=False)


def add_input(
    base: Float[Array, "c S D"] | None,
    by_low: Float[Array, "P c S W"],
    group: GroupLora,
    out: jax.ShapeDtypeStruct,
    dtype: DTypeLike,
) -> Float[Array, "c S D"]:
    """Return the base plus the sum of ``by_low Aᵀ`` over the projections: as ``add_outputs``."""
    bases = [] if base is None else [base]
    (by_x,) = _expand(by_low, group.a, group, bases, [out], dtype, ranks_last=True)
    return by_x


@jax.custom_vjp
def _add_deltas(
    outs: list[Array], x: Array, group: GroupLora, factors: Factors
) -> list[Float[Array, "c S _"]]:
    return _forward(outs, x, group, factors)[0]


def _forward(
    outs: list[Array], x: Array, group: GroupLora, factors: Factors
) -> tuple[list[Array], Any]:
    del factors
    low: Array = checkpoint_name(low_of(x, group, x.dtype), LOW)  # type: ignore[no-untyped-call]
    return add_outputs(outs, low, group, x.dtype, x.dtype), (x, low, group)


def _reverse(kept: Any, by_outs: list[Array]) -> tuple[list[Array], Array, None, Factors]:
    x, low, group = kept
    by_low = by_low_of(by_outs, group, x.dtype)
    by_x = add_input(None, by_low, group, spec(x.shape, x.dtype), x.dtype)
    by_products = [each.astype(jnp.float32) for each in by_outs]
    return by_products, by_x, None, Factors(x, low, by_low, tuple(by_outs))


_add_deltas.defvjp(_forward, _reverse)


def _scaled(parts: Float[Array, "P C c S W"], group: GroupLora) -> Float[Array, "P c S W"]:
    """Return the sum of the parts, in order, times the scale of each block's adapter."""
    place = group.place
    slot = lax.dynamic_slice_in_dim(place.slot, place.at, parts.shape[2])
    total = parts[:, 0]
    for part in range(1, parts.shape[1]):
        total = total + parts[:, part]
    return total * group.scale[slot][None, :, None, None]


def _contract(
    lefts: list[Float[Array, "c S _"]],
    banks: list[Array],
    group: GroupLora,
    dtype: DTypeLike,
    *,
    ranks_last: bool,
) -> Float[Array, "P C c S W"]:
    """Return the parts of each token's product with its block's matrix in each bank.

    A bank is [L, J, D, R] if its ranks are last, or else [L, J, R, F]. A single left factor serves
    all banks.
    """
    blocks, size, _ = lefts[0].shape
    width = padded_rank(banks[0].shape[-1 if ranks_last else -2])
    tiles = max(left.shape[2] for left in lefts) // TILE
    parts = min(max(tiles // _PART_TILES, 1), _PARTS)
    steps = width // min(width, RANKS)
    kernel = partial(
        _contract_kernel,
        slots=group.scale.shape[0],
        steps=steps,
        dtype=dtype,
        ranks_last=ranks_last,
    )
    call = pl.pallas_call(
        kernel,
        grid=(blocks, parts, len(banks) * steps),
        out_shape=spec((len(banks), parts, blocks, size, width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=target_platform() != "gpu",
    )
    with jax.named_scope("block_lora_contract"):
        out: Array = call(lefts, [flat(bank) for bank in banks], group.place)
    return out


def _contract_kernel(  # noqa: PLR0913
    lefts: list[Any],
    banks: list[Any],
    place: ChunkSlots,
    out: Any,
    *,
    slots: int,
    steps: int,
    dtype: DTypeLike,
    ranks_last: bool,
) -> None:
    block, part, number = (pl.program_id(axis) for axis in range(3))
    slot = place.slot[place.at[...] + block]
    tokens = jnp.arange(out.shape[3], dtype=jnp.int32)[:, None]
    step = out.shape[4] // steps
    ranks = (number % steps) * step + jnp.arange(step, dtype=jnp.int32)

    def run(index: int, left: Any, bank: Any) -> None:
        chunks = left.shape[2] // TILE
        each = pl.cdiv(chunks, out.shape[1])
        begin, end = part * each, jnp.minimum((part + 1) * each, chunks)
        matrix = place.layer[...] * slots + slot

        def add(chunk: Array, total: Array) -> Array:
            columns = chunk * TILE + jnp.arange(TILE, dtype=jnp.int32)
            right = _load(bank, matrix, columns, ranks, ranks_last=ranks_last)
            mine = left[block, tokens, columns[None, :]]
            return total + product(mine, right, 1, 0 if ranks_last else 1, dtype)

        nothing = jnp.zeros((out.shape[3], step), jnp.float32)
        total = lax.fori_loop(begin, end, add, nothing)
        out[index, part, block, tokens, ranks[None, :]] = total

    for index, bank in enumerate(banks):
        left = lefts[index % len(lefts)]
        is_mine = (number // steps == index) & (slot >= 0)
        pl.when(is_mine)(partial(run, index, left, bank))


def _expand(  # noqa: PLR0913
    low: Float[Array, "P c S W"],
    banks: list[Array],
    group: GroupLora,
    bases: list[Float[Array, "c S _"]],
    shapes: list[jax.ShapeDtypeStruct],
    dtype: DTypeLike,
    *,
    ranks_last: bool,
) -> list[Float[Array, "c S _"]]:
    """Return each base plus the product of its ``low`` and its bank.

    With one result and several banks, that is the sum of all products.
    """
    are_in_place = bool(bases) and bases[0].dtype == shapes[0].dtype
    first = 1 + len(banks)
    call = pl.pallas_call(
        partial(_expand_kernel, slots=group.scale.shape[0], dtype=dtype, ranks_last=ranks_last),
        grid=(low.shape[1], sum(shape.shape[2] // TILE for shape in shapes)),
        out_shape=shapes,
        input_output_aliases={first + i: i for i in range(len(bases)) if are_in_place},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=target_platform() != "gpu",
    )
    with jax.named_scope("block_lora_expand"):
        return list(call(low, [flat(bank) for bank in banks], bases, group.place))


def _expand_kernel(  # noqa: PLR0913
    low: Any,
    banks: list[Any],
    bases: list[Any],
    place: ChunkSlots,
    *outs: Any,
    slots: int,
    dtype: DTypeLike,
    ranks_last: bool,
) -> None:
    block, number = (pl.program_id(axis) for axis in range(2))
    slot = place.slot[place.at[...] + block]
    size, width = low.shape[2:]
    tokens = jnp.arange(size, dtype=jnp.int32)[:, None]
    step = min(width, RANKS)

    def run(index: int, behind: int) -> None:
        out = outs[index]
        columns = (number - behind) * TILE + jnp.arange(TILE, dtype=jnp.int32)
        matrix = place.layer[...] * slots + slot

        def add(term: int, chunk: Array, total: Array) -> Array:
            ranks = chunk * step + jnp.arange(step, dtype=jnp.int32)
            right = _load(banks[term], matrix, columns, ranks, ranks_last=ranks_last)
            left = low[term, block, tokens, ranks[None, :]]
            return total + product(left, right, 1, 1 if ranks_last else 0, dtype)

        total = jnp.zeros((size, TILE), jnp.float32)
        for term in [index] if len(outs) > 1 else range(len(banks)):
            total = lax.fori_loop(0, width // step, partial(add, term), total)
        if bases:
            total = bases[index][block, tokens, columns[None, :]] + total
        out[block, tokens, columns[None, :]] = total.astype(out.dtype)

    behind = 0
    for index, out in enumerate(outs):
        end = behind + out.shape[2] // TILE
        is_mine = (number >= behind) & (number < end) & (slot >= 0)
        pl.when(is_mine)(partial(run, index, behind))
        behind = end


def _load(bank: Any, matrix: Array, columns: Array, ranks: Array, *, ranks_last: bool) -> Array:
    """Return a tile of a matrix, [columns, ranks] if its ranks are last, with zeros as padding."""
    if ranks_last:
        is_held = jnp.broadcast_to(ranks[None, :] < bank.shape[2], (TILE, ranks.shape[0]))
        at = bank.at[matrix, columns[:, None], ranks[None, :]]
    else:
        is_held = jnp.broadcast_to(ranks[:, None] < bank.shape[1], (ranks.shape[0], TILE))
        at = bank.at[matrix, ranks[:, None], columns[None, :]]
    tile: Array = triton.load(at, mask=is_held, other=0.0)
    return tile


def flat(bank: Array) -> Array:
    """Return slots of all layers as one axis."""
    return bank.reshape(-1, *bank.shape[-2:])


def _is_gpu() -> bool:
    """Return whether to use the kernels. Elsewhere JAX would run them itself, which takes long."""
    return target_platform() == "gpu"
