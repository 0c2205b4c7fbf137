"""The operations of custom losses that split tensors, and choose or sort their elements."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import elementwise as each
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.indexing import getitem, indices_of, narrow
from tuneserve_engine.custom_loss.reductions import Pair, axis_of, take_along
from tuneserve_engine.custom_loss.shaping import expand, sizes_of, squeeze
from tuneserve_engine.custom_loss.tape import (
    BOOL,
    INT,
    Number,
    Tensor,
    current,
    record,
    tensor_of,
)

_MOST_PARTS = 4096  # of a split tensor


def split(
    input: Operand, /, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[Tensor, ...]:
    x = tensor_of(input)
    axis = axis_of(dim, x.shape)
    length = x.shape[axis]
    size = split_size_or_sections
    if isinstance(size, int):
        if size < 1 or -(-length // size) > _MOST_PARTS:
            raise UserError(f"split into more than {_MOST_PARTS} parts, or into parts of nothing")
        sizes = [min(size, length - at) for at in range(0, length, size)]
    else:
        sizes = list(sizes_of([size]))
        if sum(sizes) != length or min(sizes, default=0) < 0 or len(sizes) > _MOST_PARTS:
            raise UserError(
                f"split into sections that do not add up to {length}, or are more than "
                f"{_MOST_PARTS}"
            )
    ends = accumulate(sizes)
    return tuple(narrow(x, axis, end - n, n) for end, n in zip(ends, sizes, strict=True))


def chunk(input: Operand, /, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    x = tensor_of(input)
    if chunks < 1:
        raise UserError("chunk into less than 1")
    return split(x, max(-(-x.shape[axis_of(dim, x.shape)] // chunks), 1), dim)


def unbind(input: Operand, /, dim: int = 0) -> tuple[Tensor, ...]:
    x = tensor_of(input)
    return tuple(squeeze(part, dim) for part in split(x, 1, dim))


def index_select(input: Operand, /, dim: int, index: Operand) -> Tensor:
    x = tensor_of(input)
    return getitem(x, (slice(None),) * axis_of(dim, x.shape) + (Tensor(indices_of(index)),))


def gather(input: Operand, /, dim: int, index: Operand) -> Tensor:
    x, at = tensor_of(input), indices_of(index)
    if at.ndim != len(x.shape):
        raise UserError("gather needs an index with as many dimensions as the tensor")
    if not x.shape:
        return x
    axis = axis_of(dim, x.shape)
    if any(n > x.shape[i] for i, n in enumerate(at.shape) if i != axis):
        raise UserError("gather with an index that is larger than the tensor")
    return take_along(x, at, axis)


def masked_select(input: Operand, /, mask: Operand) -> Tensor:
    x, chosen = tensor_of(input), tensor_of(mask, BOOL)
    shape = np.broadcast_shapes(x.shape, chosen.shape)
    return getitem(expand(x, shape), expand(chosen, shape))


def index_add(
    input: Operand, /, dim: int, index: Operand, source: Operand, *, alpha: Number = 1
) -> Tensor:
    x = tensor_of(input)
    y = tensor_of(source, x.dtype) if alpha == 1 else each.multiply(tensor_of(source), alpha)
    if not x.shape or not y.shape:
        raise UserError("index_add of tensors without dimensions")
    axis = axis_of(dim, x.shape)
    at: tuple[Any, ...] = (slice(None),) * axis + (indices_of(index),)
    current().reserve(x.shape, x.dtype.itemsize)
    current().spend(y.array.size)
    total = x.array.copy()
    np.add.at(total, at, y.array)
    return record(total, (x, lambda g: g), (y, lambda g: g[at]))


def sort(input: Operand, /, dim: int = -1, descending: bool = False) -> Pair:
    x = tensor_of(input)
    if not x.shape:
        return Pair(x, Tensor(np.zeros((), INT)))
    axis = axis_of(dim, x.shape)
    current().reserve(x.shape)
    current().spend(x.array.size * max(x.shape[axis], 2).bit_length())
    key = -x.array if descending and x.dtype.kind == "f" else x.array
    order = np.argsort(key, axis, kind="stable")
    if descending and x.dtype.kind != "f":
        reverse = np.flip(np.argsort(np.flip(x.array, axis), axis, kind="stable"), axis)
        order = x.shape[axis] - 1 - reverse
    return Pair(take_along(x, order, axis), Tensor(order))


def argsort(input: Operand, /, dim: int = -1, descending: bool = False) -> Tensor:
    return sort(input, dim, descending).indices


def topk(input: Operand, /, k: int, dim: int = -1, largest: bool = True) -> Pair:
    x = tensor_of(input)
    ordered = sort(x, dim, largest)
    axis = axis_of(dim, x.shape)
    return Pair(*(narrow(part, axis, 0, k) for part in ordered))


def _triangle(name: str) -> Any:
    cut = getattr(np, name)

    def apply(input: Operand, /, diagonal: int = 0) -> Tensor:
        x = tensor_of(input)
        if len(x.shape) < 2:
            raise UserError(f"{name} of a tensor with less than two dimensions")
        current().reserve(x.shape, x.dtype.itemsize)
        return record(cut(x.array, diagonal), (x, lambda g: cut(g, diagonal)))

    return apply


tril, triu = _triangle("tril"), _triangle("triu")


def diff(input: Operand, /, n: int = 1, dim: int = -1) -> Tensor:
    x = tensor_of(input)
    axis = axis_of(dim, x.shape)
    for _ in range(min(n, 8)):
        length = x.shape[axis]
        x = each.subtract(narrow(x, axis, 1, length - 1), narrow(x, axis, 0, length - 1))
    if n > 8:
        raise UserError("diff of more than 8 orders")
    return x


def pad(
    input: Operand, /, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    x = tensor_of(input)
    sizes = sizes_of([pad])
    if mode != "constant" or len(sizes) % 2 or len(sizes) > 2 * len(x.shape) or min(sizes) < 0:
        raise UserError("pad is offered with mode 'constant', and two sizes of 0 or more per dim")
    widths = [(0, 0)] * (len(x.shape) - len(sizes) // 2)
    widths += [(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 2, -1, -2)]
    shape = [n + a + b for n, (a, b) in zip(x.shape, widths, strict=True)]
    current().reserve(shape, x.dtype.itemsize)
    own = tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, widths, strict=True))
    padded = np.pad(x.array, widths, constant_values=0 if value is None else value)
    return record(padded, (x, lambda g: g[own]))
