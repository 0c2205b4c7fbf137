"""The operations of custom losses that move, choose and combine elements, and make new tensors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import elementwise as each
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.reductions import Dim, axes_of, axis_of
from tuneserve_engine.custom_loss.tape import (
    FLOAT,
    Shape,
    Tensor,
    cast,
    common_dtype,
    current,
    named,
    record,
    tensor_of,
    unbroadcast,
)


def sizes_of(sizes: Sequence[Any]) -> Shape:
    """Return sizes that were given one by one or as one sequence."""
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in given):
        raise UserError("a size that is not an integer")
    return tuple(given)


# --- the same elements in another shape -----------------------------------------------------------


def reshape(input: Operand, /, *shape: Any) -> Tensor:
    x = tensor_of(input)
    if x.shape != (wanted := sizes_of(shape)):
        current().reserve(x.shape, x.dtype.itemsize)
    return record(x.array.reshape(wanted), (x, lambda g: g.reshape(x.shape)))


def flatten(input: Operand, /, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    x = tensor_of(input)
    first, last = axis_of(start_dim, x.shape), axis_of(end_dim, x.shape)
    if not x.shape:
        return reshape(x, 1)
    middle = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], middle, *x.shape[last + 1 :]))


def unsqueeze(input: Operand, /, dim: int) -> Tensor:
    x = tensor_of(input)
    at = axis_of(dim, (*x.shape, 1))
    return reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


def squeeze(input: Operand, /, dim: Dim = None) -> Tensor:
    x = tensor_of(input)
    axes = axes_of(dim, x.shape)
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if n != 1 or i not in axes))


def permute(input: Operand, /, *dims: Any) -> Tensor:
    x = tensor_of(input)
    order = axes_of(sizes_of(dims), x.shape)
    if len(order) != len(x.shape):
        raise UserError("permute has to name every dimension once")
    current().reserve(x.shape, x.dtype.itemsize)
    back = [order.index(axis) for axis in range(len(order))]
    return record(x.array.transpose(order), (x, lambda g: g.transpose(back)))


def transpose(input: Operand, /, dim0: int, dim1: int) -> Tensor:
    x = tensor_of(input)
    order = list(range(len(x.shape)))
    one, two = axis_of(dim0, x.shape), axis_of(dim1, x.shape)
    if order:
        order[one], order[two] = two, one
    return permute(x, order) if order else x


def t(input: Operand, /) -> Tensor:
    x = tensor_of(input)
    if len(x.shape) > 2:
        raise UserError("t of a tensor with more than two dimensions")
    return x if len(x.shape) < 2 else transpose(x, 0, 1)


def expand(input: Operand, /, *sizes: Any) -> Tensor:
    x = tensor_of(input)
    given = sizes_of(sizes)
    own = (1,) * (len(given) - len(x.shape)) + x.shape
    shape = tuple(n if size == -1 else size for size, n in zip(given, own, strict=True))
    current().reserve(shape, x.dtype.itemsize)
    return record(np.broadcast_to(x.array, shape), (x, lambda g: unbroadcast(g, x.shape)))


def expand_as(input: Operand, /, other: Operand) -> Tensor:
    return expand(input, tensor_of(other).shape)


def flip(input: Operand, /, *dims: Any) -> Tensor:
    x = tensor_of(input)
    axes = axes_of(sizes_of(dims), x.shape)
    current().reserve(x.shape, x.dtype.itemsize)
    return record(np.flip(x.array, axes), (x, lambda g: np.flip(g, axes)))


def roll(input: Operand, /, shifts: Any, dims: Any = None) -> Tensor:
    x = tensor_of(input)
    by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    if dims is None:
        if len(by) > 1:
            raise UserError("roll by several shifts needs as many dims")
        axes = None
    else:
        axes = axes_of(dims, x.shape)
        if len(axes) != len(by):
            raise UserError("roll needs one shift for each of its dims")
    current().reserve(x.shape, x.dtype.itemsize)
    shift: Any = by if axes else by[0]
    back: Any = tuple(-n for n in by) if axes else -by[0]
    return record(np.roll(x.array, shift, axes), (x, lambda g: np.roll(g, back, axes)))


def repeat(input: Operand, /, *sizes: Any) -> Tensor:
    x = tensor_of(input)
    counts = sizes_of(sizes)
    if len(counts) < len(x.shape):
        raise UserError("repeat needs a number for every dimension")
    own = (1,) * (len(counts) - len(x.shape)) + x.shape
    current().reserve([a * b for a, b in zip(counts, own, strict=True)], x.dtype.itemsize)
    pairs = [size for pair in zip(counts, own, strict=True) for size in pair]
    outer = tuple(range(0, len(pairs), 2))
    return record(
        np.tile(x.array, counts), (x, lambda g: g.reshape(pairs).sum(outer).reshape(x.shape))
    )


def repeat_interleave(input: Operand, /, repeats: int, dim: int | None = None) -> Tensor:
    x = tensor_of(input) if dim is not None else reshape(input, -1)
    axis = axis_of(0 if dim is None else dim, x.shape)
    if not isinstance(repeats, int) or repeats < 0:
        raise UserError("repeat_interleave takes a number of repeats, 0 or more")
    shape = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    wide = expand(unsqueeze(x, axis + 1), shape)
    return reshape(wide, (*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]))


# --- several tensors ------------------------------------------------------------------------------


def cat(tensors: Sequence[Operand], dim: int = 0) -> Tensor:
    parts = [each for each in map(tensor_of, _sequence(tensors)) if each.shape != (0,)]
    if not parts:
        return Tensor(np.zeros(0, FLOAT))
    dtype = common_dtype(*parts)
    parts = [cast(each, dtype) for each in parts]
    axis = axis_of(dim, parts[0].shape)
    if not parts[0].shape:
        raise UserError("cat of a tensor without dimensions; use stack")
    length = sum(each.shape[axis] for each in parts if len(each.shape) > axis)
    current().reserve((*parts[0].shape[:axis], length, *parts[0].shape[axis + 1 :]), dtype.itemsize)
    joined = np.concatenate([each.array for each in parts], axis)
    pulls = []
    at = 0
    for part in parts:
        own = (slice(None),) * axis + (slice(at, at + part.shape[axis]),)
        pulls.append((part, lambda g, own=own: g[own]))
        at += part.shape[axis]
    return record(joined, *pulls)


def stack(tensors: Sequence[Operand], dim: int = 0) -> Tensor:
    parts = [tensor_of(each) for each in _sequence(tensors)]
    if not parts:
        raise UserError("stack of no tensors")
    axis = axis_of(dim, (*parts[0].shape, 1))
    return cat([unsqueeze(each, axis) for each in parts], axis)


def _sequence(tensors: object) -> Sequence[Any]:
    if not isinstance(tensors, list | tuple):
        raise UserError(f"{named(tensors)} where a list of tensors is needed")
    return tensors


def matmul(input: Operand, other: Operand) -> Tensor:
    x, y = tensor_of(input), tensor_of(other)
    if not x.shape or not y.shape:
        raise UserError("matmul of a tensor without dimensions; use *")
    left = unsqueeze(x, 0) if len(x.shape) == 1 else x
    right = unsqueeze(y, 1) if len(y.shape) == 1 else y
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    current().reserve((*batch, rows, columns))
    current().spend(math.prod(batch) * rows * inner * columns)
    a, b = left.array, right.array
    product = record(
        np.matmul(a, b),
        (left, lambda g: unbroadcast(np.matmul(g, b.swapaxes(-1, -2)), left.shape)),
        (right, lambda g: unbroadcast(np.matmul(a.swapaxes(-1, -2), g), right.shape)),
    )
    shape = list(product.shape)
    if len(y.shape) == 1:
        del shape[-1]
    if len(x.shape) == 1:
        del shape[len(batch)]
    return reshape(product, shape)


def outer(input: Operand, vec2: Operand) -> Tensor:
    return each.multiply(unsqueeze(input, 1), unsqueeze(vec2, 0))
