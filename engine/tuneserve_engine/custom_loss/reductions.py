"""The reductions of custom losses.

Sums are made in double precision and rounded once, so that they do not depend on their order.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import elementwise as each
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.tape import (
    INT,
    Array,
    Shape,
    Tensor,
    cast,
    current,
    floating,
    record,
    tensor_of,
)

Dim = int | Sequence[int] | None
Dtype = np.dtype[Any]


class Pair(NamedTuple):
    """The result of ``max(dim)``, ``sort`` and their like."""

    values: Tensor
    indices: Tensor


def axes_of(dim: Dim, shape: Shape) -> tuple[int, ...]:
    """Return the axes that ``dim`` names, counted from 0; all of them for None or an empty list."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(len(shape)))
    dims = [dim] if isinstance(dim, int) else dim
    found = tuple(axis_of(one, shape) for one in dims)
    if len({*found}) < len(found):
        raise UserError("dim names a dimension twice")
    return found


def axis_of(dim: int, shape: Shape) -> int:
    """Return the axis that ``dim`` names, counted from 0; a scalar has axis 0, as in torch."""
    rank = max(len(shape), 1)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise UserError(f"a dim that a tensor of {len(shape)} dimensions does not have")
    return dim % rank


def wide(array: Array) -> Array:
    """Return floats in double precision; other dtypes as they are."""
    return array.astype("f8") if array.dtype.kind == "f" else array


def _kept(shape: Shape, axes: Sequence[int]) -> Shape:
    """Return the shape with the axes reduced to 1."""
    return tuple(1 if i in axes else size for i, size in enumerate(shape))


def reserve(x: Tensor, results: int = 0) -> None:
    """Count the work on ``x``, and a result of ``results`` elements."""
    current().reserve((results or 1,), x.dtype.itemsize)
    current().spend(x.array.size)


def sum_(
    input: Operand, /, dim: Dim = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    x = tensor_of(input)
    if dtype is not None:
        x = cast(x, dtype)
    elif x.dtype.kind in "bi":
        x = cast(x, INT)
    axes = axes_of(dim, x.shape)
    reserve(x, x.array.size)
    kept = _kept(x.shape, axes)
    if not x.shape:
        axes = ()
    total = wide(x.array).sum(axes, keepdims=keepdim).astype(x.dtype)
    return record(total, (x, lambda g: np.broadcast_to(g.reshape(kept), x.shape)))


def mean(
    input: Operand, /, dim: Dim = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    x = tensor_of(input) if dtype is None else cast(tensor_of(input), dtype)
    if x.dtype.kind != "f":
        raise UserError("mean of integers or bools; call .float() first")
    count = math.prod(x.shape[i] for i in axes_of(dim, x.shape)) if x.shape else 1
    return each.divide(sum_(x, dim, keepdim), count) if count else _nan_like(sum_(x, dim, keepdim))


def _nan_like(value: Tensor) -> Tensor:
    return each.multiply(value, math.nan)


def prod(
    input: Operand, /, dim: int | None = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    x = tensor_of(input) if dtype is None else cast(tensor_of(input), dtype)
    x = cast(x, INT) if x.dtype.kind in "bi" else x
    axes = axes_of(dim, x.shape) if x.shape else ()
    reserve(x, x.array.size)
    product = x.array.prod(axes, keepdims=True)

    def pull(g: Array) -> Array:
        zeros = (x.array == 0).sum(axes, keepdims=True)
        others = np.where(x.array == 0, 1, x.array).prod(axes, keepdims=True)
        alone = np.where(x.array == 0, others * (zeros == 1), 0)
        by_x = np.where(zeros == 0, product / np.where(x.array == 0, 1, x.array), alone)
        scaled: Array = (g.reshape(product.shape) * by_x).astype(x.dtype)
        return scaled

    return record(product if keepdim else product.squeeze(axes), (x, pull))


def _extreme(name: str) -> Any:
    """Return ``amax`` or ``amin``; equal extremes share the gradient evenly."""
    reduce = getattr(np, name)

    def apply(input: Operand, /, dim: Dim = None, keepdim: bool = False) -> Tensor:
        x = tensor_of(input)
        axes = axes_of(dim, x.shape) if x.shape else ()
        reserve(x, x.array.size)
        found = np.asarray(reduce(x.array, axis=axes, keepdims=True))

        def pull(g: Array) -> Array:
            at = x.array == found
            shared = at / at.sum(axes, keepdims=True)
            by_x: Array = (g.reshape(found.shape) * shared).astype(x.dtype)
            return by_x

        return record(found if keepdim else found.squeeze(axes), (x, pull))

    return apply


amax, amin = _extreme("amax"), _extreme("amin")


def take_along(x: Tensor, indices: Array, axis: int) -> Tensor:
    """Return the elements of ``x`` at these indices along an axis (torch's ``gather``)."""
    current().reserve(indices.shape, x.dtype.itemsize)
    size = x.shape[axis]
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise UserError(f"an index outside of 0 to {size - 1}")
    places = tuple(
        indices
        if i == axis
        else np.arange(n).reshape([-1 if j == i else 1 for j in range(x.array.ndim)])
        for i, n in enumerate(indices.shape)
    )

    def pull(g: Array) -> Array:
        spread = np.zeros_like(x.array)
        np.add.at(spread, places, g)
        return spread

    return record(x.array[places], (x, pull))


def _chosen(name: str) -> Any:
    """Return ``max`` or ``min``: of all elements, along a dim, or of two tensors."""
    find = getattr(np, f"arg{name}")
    of_all = amax if name == "max" else amin
    of_two = each.maximum if name == "max" else each.minimum

    def apply(
        input: Operand, /, dim: Operand | None = None, keepdim: bool = False
    ) -> Tensor | Pair:
        if isinstance(dim, Tensor):
            return of_two(input, dim)
        x = tensor_of(input)
        if dim is None:
            result: Tensor = of_all(x)
            return result
        if not x.shape:
            return Pair(x, Tensor(np.zeros((), INT)))
        axis = axis_of(int(dim), x.shape)
        reserve(x)
        indices = find(x.array, axis=axis, keepdims=True)
        values = take_along(x, indices, axis)
        if keepdim:
            return Pair(values, Tensor(indices))
        flat = indices.squeeze(axis)
        return Pair(_reshaped(values, flat.shape), Tensor(flat))

    return apply


def _reshaped(x: Tensor, shape: Shape) -> Tensor:
    return record(x.array.reshape(shape), (x, lambda g: g.reshape(x.shape)))


max_, min_ = _chosen("max"), _chosen("min")


def _index_of(name: str) -> Any:
    find = getattr(np, name)

    def apply(input: Operand, /, dim: int | None = None, keepdim: bool = False) -> Tensor:
        x = tensor_of(input)
        reserve(x, x.array.size)
        if dim is None or not x.shape:
            return Tensor(np.asarray(find(x.array)))
        axis = axis_of(dim, x.shape)
        return Tensor(np.asarray(find(x.array, axis=axis, keepdims=keepdim)))

    return apply


argmax, argmin = _index_of("argmax"), _index_of("argmin")


def _quantifier(name: str) -> Any:
    reduce = getattr(np, name)

    def apply(input: Operand, /, dim: Dim = None, keepdim: bool = False) -> Tensor:
        x = tensor_of(input)
        reserve(x, x.array.size)
        axes = axes_of(dim, x.shape) if x.shape else ()
        return Tensor(np.asarray(reduce(x.array, axis=axes, keepdims=keepdim)))

    return apply


any_, all_ = _quantifier("any"), _quantifier("all")


def count_nonzero(input: Operand, /, dim: Dim = None) -> Tensor:
    return sum_(each.ne(tensor_of(input), 0), dim)


# --- probabilities --------------------------------------------------------------------------------


def logsumexp(input: Operand, /, dim: Dim, keepdim: bool = False) -> Tensor:
    x = floating(input)
    axes = axes_of(dim, x.shape) if x.shape else ()
    reserve(x, 3 * x.array.size)
    values = wide(x.array)
    top = values.max(axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.log(np.exp(values - top).sum(axes, keepdims=True)) + top

    def pull(g: Array) -> Array:
        by_x: Array = (g.reshape(total.shape) * np.exp(values - total)).astype(x.dtype)
        return by_x

    shown = total if keepdim else total.squeeze(axes)
    return record(shown.astype(x.dtype), (x, pull))


def log_softmax(input: Operand, /, dim: int, *, dtype: Dtype | None = None) -> Tensor:
    x = floating(tensor_of(input) if dtype is None else cast(tensor_of(input), dtype))
    return each.subtract(x, logsumexp(x, dim, True)) if x.shape else each.multiply(x, 0)


def softmax(input: Operand, /, dim: int, *, dtype: Dtype | None = None) -> Tensor:
    return each.exp(log_softmax(input, dim, dtype=dtype))


def _running(x: Tensor, axis: int) -> Array:
    total: Array = wide(x.array).cumsum(axis).astype(x.dtype)
    return total


def cumsum(input: Operand, /, dim: int, *, dtype: Dtype | None = None) -> Tensor:
    x = tensor_of(input) if dtype is None else cast(tensor_of(input), dtype)
    x = cast(x, INT) if x.dtype.kind in "bi" else x
    if not x.shape:
        return x
    axis = axis_of(dim, x.shape)
    current().reserve(x.shape, x.dtype.itemsize)

    def pull(g: Array) -> Array:
        return np.flip(wide(np.flip(g, axis)).cumsum(axis), axis)

    return record(_running(x, axis), (x, pull))


def cumprod(input: Operand, /, dim: int) -> Tensor:
    """Return running products. The gradient at or behind a zero is not computed as torch does."""
    x = floating(input)
    if (x.array == 0).any():
        raise UserError("cumprod of a tensor with zeros; use exp of cumsum of log, or a product")
    axis = axis_of(dim, x.shape)
    current().reserve(x.shape, x.dtype.itemsize)
    y = wide(x.array).cumprod(axis)

    def pull(g: Array) -> Array:
        by_x: Array = np.flip(np.flip(g * y, axis).cumsum(axis), axis) / x.array
        return by_x

    return record(y.astype(x.dtype), (x, pull))
