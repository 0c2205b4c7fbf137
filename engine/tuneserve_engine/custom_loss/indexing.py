"""Indices into the tensors of custom losses: one element, a slice, or chosen elements."""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.reductions import axis_of
from tuneserve_engine.custom_loss.shaping import sizes_of
from tuneserve_engine.custom_loss.tape import (
    BOOL,
    INT,
    Array,
    Shape,
    Tensor,
    current,
    record,
    tensor_of,
)


def getitem(x: Tensor, index: Any) -> Tensor:
    """Return ``x[index]`` for numbers, slices, None, ``...``, and tensors of bools or integers."""
    parts = index if isinstance(index, tuple) else (index,)
    found = tuple(_index_part(part) for part in parts)
    shape = _indexed_shape(x.shape, found)
    current().reserve(shape, x.dtype.itemsize)
    chosen = x.array[found]
    plain = not any(isinstance(part, np.ndarray) for part in found)

    def pull(g: Array) -> Array:
        spread = np.zeros_like(x.array)
        if plain:
            spread[found] = g
        else:
            np.add.at(spread, found, g)
        return spread

    return record(chosen, (x, pull))


def _index_part(part: Any) -> Any:
    if part is None or isinstance(part, EllipsisType):
        return part
    if isinstance(part, bool):
        raise UserError("a bool as an index")
    if isinstance(part, int):
        return part
    if isinstance(part, slice):
        ends = (part.start, part.stop, part.step)
        if not all(end is None or isinstance(end, int) for end in ends) or (part.step or 1) < 0:
            raise UserError("a slice that is not of integers, or has a step below 0; use flip")
        return part
    if isinstance(part, list | tuple):
        return np.asarray(sizes_of([part]), INT)
    array = tensor_of(part).array
    if array.dtype.kind == "f":
        raise UserError("a tensor of floats as an index; call .long() first")
    return array


def _indexed_shape(shape: Shape, parts: Sequence[Any]) -> Shape:
    """Return a shape with at least as many elements as the indexed tensor has."""
    wide: list[Shape] = []
    used = added = 0
    for part in parts:
        if part is None:
            added += 1
        elif isinstance(part, np.ndarray):
            of_mask = part.dtype == BOOL
            wide.append((int(np.count_nonzero(part)),) if of_mask else part.shape)
            used += part.ndim if of_mask else 1
        elif not isinstance(part, EllipsisType):
            used += 1
    chosen = np.broadcast_shapes(*wide) if wide else ()
    # The largest dimensions may be those that stay.
    left = max(len(shape) - sum(_uses(part) for part in parts), 0)
    rest = sorted(shape, reverse=True)[:left]
    sliced = [_sliced(part, shape) for part in parts if isinstance(part, slice)]
    total = math.prod(chosen) * math.prod(rest) * math.prod(sliced)
    return (total,) if added + used <= 64 else (1,) * 9


def _uses(part: Any) -> int:
    """Return the number of dimensions that an index takes."""
    if part is None or isinstance(part, EllipsisType):
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == BOOL else 1


def _sliced(part: slice, shape: Shape) -> int:
    return len(range(*part.indices(max(shape, default=0))))


def narrow(input: Operand, /, dim: int, start: int, length: int) -> Tensor:
    x = tensor_of(input)
    axis = axis_of(dim, x.shape)
    if length < 0 or not 0 <= start <= x.shape[axis] - length:
        raise UserError("narrow beyond the end of the tensor")
    return getitem(x, (slice(None),) * axis + (slice(start, start + length),))


def select(input: Operand, /, dim: int, index: int) -> Tensor:
    x = tensor_of(input)
    return getitem(x, (slice(None),) * axis_of(dim, x.shape) + (index,))


def indices_of(index: Operand) -> Array:
    """Return the integers of a tensor. Raises ``UserError`` for other dtypes."""
    found = tensor_of(index)
    if found.dtype.kind != "i":
        raise UserError("an index that is not of integers; call .long() first")
    return found.array
