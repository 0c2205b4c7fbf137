"""The operations of custom losses that make new tensors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.indexing import indices_of
from tuneserve_engine.custom_loss.reductions import Dtype
from tuneserve_engine.custom_loss.shaping import sizes_of
from tuneserve_engine.custom_loss.tape import (
    FLOAT,
    INT,
    Number,
    Tensor,
    current,
    of_number,
    tensor_of,
)


def full(size: Any, fill_value: Operand, *, dtype: Dtype | None = None) -> Tensor:
    value = tensor_of(fill_value)
    shape = sizes_of([size] if isinstance(size, Sequence) else (size,))
    if dtype is None:
        dtype = value.dtype if isinstance(fill_value, Tensor) else of_number(fill_value)
    current().reserve(shape, dtype.itemsize)
    return Tensor(np.full(shape, value.array.astype(dtype)))


def zeros(*size: Any, dtype: Dtype | None = None) -> Tensor:
    return full(sizes_of(size), 0, dtype=dtype or FLOAT)


def ones(*size: Any, dtype: Dtype | None = None) -> Tensor:
    return full(sizes_of(size), 1, dtype=dtype or FLOAT)


def full_like(input: Operand, /, fill_value: Operand, *, dtype: Dtype | None = None) -> Tensor:
    x = tensor_of(input)
    return full(x.shape, fill_value, dtype=dtype or x.dtype)


def zeros_like(input: Operand, /, *, dtype: Dtype | None = None) -> Tensor:
    return full_like(input, 0, dtype=dtype)


def ones_like(input: Operand, /, *, dtype: Dtype | None = None) -> Tensor:
    return full_like(input, 1, dtype=dtype)


def new_zeros(input: Operand, /, *size: Any, dtype: Dtype | None = None) -> Tensor:
    return zeros(*size, dtype=dtype or tensor_of(input).dtype)


def new_ones(input: Operand, /, *size: Any, dtype: Dtype | None = None) -> Tensor:
    return ones(*size, dtype=dtype or tensor_of(input).dtype)


def new_full(
    input: Operand, /, size: Any, fill_value: Operand, *, dtype: Dtype | None = None
) -> Tensor:
    return full(size, fill_value, dtype=dtype or tensor_of(input).dtype)


def arange(
    start: Number, end: Number | None = None, step: Number = 1, *, dtype: Dtype | None = None
) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    numbers = (first, last, step)
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) or not step:
        raise UserError("arange takes finite numbers, and a step other than 0")
    count = max(math.ceil((last - first) / step), 0)
    kind = dtype or (FLOAT if any(isinstance(n, float) for n in numbers) else INT)
    current().reserve((count,), 8)
    return Tensor((first + step * np.arange(count)).astype(kind))


def eye(n: int, m: int | None = None, *, dtype: Dtype | None = None) -> Tensor:
    current().reserve((n, n if m is None else m), 8)
    return Tensor(np.eye(n, m, dtype=dtype or FLOAT))


def one_hot(tensor: Operand, num_classes: int = -1) -> Tensor:
    at = indices_of(tensor)
    most = int(at.max(initial=-1)) + 1
    count = most if num_classes == -1 else num_classes
    if at.min(initial=0) < 0 or most > count:
        raise UserError("one_hot of a class that is below 0, or not below num_classes")
    current().reserve((*at.shape, count))
    return Tensor((at[..., None] == np.arange(count)).astype(INT))
