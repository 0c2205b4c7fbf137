"""The elementwise operations of custom losses, with torch's dtypes and subgradients."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss.tape import (
    BOOL,
    FLOAT,
    Array,
    Number,
    Tensor,
    cast,
    common_dtype,
    current,
    floating,
    record,
    tensor_of,
    unbroadcast,
)

Operand = Tensor | Number
Unary = Callable[[Operand], Tensor]
Binary = Callable[[Operand, Operand], Tensor]


def _unary(
    forward: Callable[[Array], Array],
    slope: Callable[[Array, Array], Any],
    *,
    keeps_ints: bool = False,
) -> Unary:
    """Return an operation from its formula and its derivative by x, given x and the result."""

    def apply(input: Operand, /) -> Tensor:
        x = tensor_of(input) if keeps_ints and isinstance(input, Tensor) else floating(input)
        current().reserve(x.shape, x.dtype.itemsize)
        y = np.asarray(forward(x.array))
        if x.dtype.kind != "f":
            return Tensor(y)
        return record(y, (x, lambda g: g * slope(x.array, y)))

    return apply


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _log_sigmoid(x: Array) -> Array:
    y: Array = np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))
    return y


def _flat(x: Array, y: Array) -> Array:
    return np.zeros_like(x)


exp = _unary(np.exp, lambda x, y: y)
exp2 = _unary(np.exp2, lambda x, y: y * float(np.log(2)))
expm1 = _unary(np.expm1, lambda x, y: y + 1)
log = _unary(np.log, lambda x, y: 1 / x)
log2 = _unary(np.log2, lambda x, y: 1 / (x * float(np.log(2))))
log10 = _unary(np.log10, lambda x, y: 1 / (x * float(np.log(10))))
log1p = _unary(np.log1p, lambda x, y: 1 / (1 + x))
sqrt = _unary(np.sqrt, lambda x, y: 0.5 / y)
rsqrt = _unary(lambda x: 1 / np.sqrt(x), lambda x, y: -0.5 * y**3)
square = _unary(np.square, lambda x, y: 2 * x, keeps_ints=True)
reciprocal = _unary(lambda x: 1 / x, lambda x, y: -y * y)
absolute = _unary(np.abs, lambda x, y: np.sign(x), keeps_ints=True)
negative = _unary(np.negative, lambda x, y: -1, keeps_ints=True)
positive = _unary(np.positive, lambda x, y: 1, keeps_ints=True)
sin = _unary(np.sin, lambda x, y: np.cos(x))
cos = _unary(np.cos, lambda x, y: -np.sin(x))
tan = _unary(np.tan, lambda x, y: 1 + y * y)
sinh = _unary(np.sinh, lambda x, y: np.cosh(x))
cosh = _unary(np.cosh, lambda x, y: np.sinh(x))
tanh = _unary(np.tanh, lambda x, y: 1 - y * y)
arcsin = _unary(np.arcsin, lambda x, y: 1 / np.sqrt(1 - x * x))
arccos = _unary(np.arccos, lambda x, y: -1 / np.sqrt(1 - x * x))
arctan = _unary(np.arctan, lambda x, y: 1 / (1 + x * x))
sigmoid = _unary(_sigmoid, lambda x, y: y * (1 - y))
log_sigmoid = _unary(_log_sigmoid, lambda x, y: _sigmoid(-x))
relu = _unary(lambda x: np.maximum(x, 0), lambda x, y: x > 0, keeps_ints=True)
silu = _unary(lambda x: x * _sigmoid(x), lambda x, y: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))))
sign = _unary(np.sign, _flat, keeps_ints=True)
floor = _unary(np.floor, _flat, keeps_ints=True)
ceil = _unary(np.ceil, _flat, keeps_ints=True)
trunc = _unary(np.trunc, _flat, keeps_ints=True)
frac = _unary(lambda x: x - np.trunc(x), lambda x, y: np.ones_like(x))
rounded = _unary(np.round, _flat, keeps_ints=True)


def round_(input: Operand, /, decimals: int = 0) -> Tensor:
    if decimals:
        raise UserError("round with decimals; multiply, round, and divide instead")
    return rounded(input)


def softplus(input: Operand, /, beta: float = 1, threshold: float = 20) -> Tensor:
    def forward(x: Array) -> Array:
        y = (np.maximum(x * beta, 0) + np.log1p(np.exp(-np.abs(x * beta)))) / beta
        return np.where(x * beta > threshold, x, y).astype(x.dtype)

    def slope(x: Array, y: Array) -> Array:
        return np.where(x * beta > threshold, 1, _sigmoid(x * beta)).astype(x.dtype)

    return _unary(forward, slope)(input)


def leaky_relu(input: Operand, /, negative_slope: float = 0.01) -> Tensor:
    return _unary(
        lambda x: np.where(x > 0, x, x * negative_slope).astype(x.dtype),
        lambda x, y: np.where(x > 0, 1, negative_slope),
    )(input)


def elu(input: Operand, /, alpha: float = 1.0) -> Tensor:
    return _unary(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))).astype(x.dtype),
        lambda x, y: np.where(x > 0, 1, alpha * np.exp(np.minimum(x, 0))),
    )(input)


def hardtanh(input: Operand, /, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return _unary(
        lambda x: np.clip(x, min_val, max_val),
        lambda x, y: (x > min_val) & (x < max_val),
    )(input)


def relu6(input: Operand, /) -> Tensor:
    return hardtanh(input, 0.0, 6.0)


def nan_to_num(
    input: Operand,
    /,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    return _unary(
        lambda x: np.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf),
        lambda x, y: np.isfinite(x),
    )(input)


# --- two operands ---------------------------------------------------------------------------------


def promoted(*operands: Operand, to_float: bool = False) -> list[Tensor]:
    """Return the operands in their common dtype; at least one has to be a tensor."""
    if not any(isinstance(each, Tensor) for each in operands):
        raise UserError("no tensor among the operands, where one is needed")
    for each in operands:
        tensor_of(each)
    dtype = common_dtype(*operands)
    if to_float and dtype.kind != "f":
        dtype = FLOAT
    return [tensor_of(each, dtype) for each in operands]


def reserved(*tensors: Tensor, itemsize: int = 8) -> None:
    """Reserve the tensor that these broadcast to. Raises ``ValueError`` if they do not."""
    current().reserve(np.broadcast_shapes(*(each.shape for each in tensors)), itemsize)


def _binary(
    forward: Callable[[Array, Array], Array],
    slopes: tuple[Callable[[Array, Array, Array], Any], Callable[[Array, Array, Array], Any]],
    *,
    to_float: bool = False,
) -> Binary:
    """Return an operation from its formula, and its derivatives given x, y and the result."""

    def apply(input: Operand, other: Operand) -> Tensor:
        x, y = promoted(input, other, to_float=to_float)
        reserved(x, y, itemsize=x.dtype.itemsize)
        z = np.asarray(forward(x.array, y.array))
        if z.dtype.kind != "f":
            return Tensor(z)
        left, right = slopes
        return record(
            z,
            (x, lambda g: unbroadcast(g * left(x.array, y.array, z), x.shape)),
            (y, lambda g: unbroadcast(g * right(x.array, y.array, z), y.shape)),
        )

    return apply


def _one(x: Array, y: Array, z: Array) -> int:
    return 1


def _no_slope(x: Array, y: Array, z: Array) -> int:
    return 0


def _power_by_base(x: Array, y: Array, z: Array) -> Array:
    return np.where(y == 0, 0, y * np.power(x, y - 1)).astype(z.dtype)


def _power_by_exponent(x: Array, y: Array, z: Array) -> Array:
    return np.where((x == 0) & (y >= 0), 0, z * np.log(x)).astype(z.dtype)


def _either(first: Callable[[Array, Array], Any]) -> Callable[[Array, Array, Array], Array]:
    """Return the derivative of a choice: 1 where it is this operand, a half in a tie."""
    return lambda x, y, z: np.where(x == y, 0.5, first(x, y)).astype(z.dtype)


def _add(x: Array, y: Array) -> Array:
    return x | y if x.dtype == BOOL else x + y


def _multiply(x: Array, y: Array) -> Array:
    return x & y if x.dtype == BOOL else x * y


_sum = _binary(_add, (_one, _one))
_difference = _binary(lambda x, y: x - y, (_one, lambda x, y, z: -1))
multiply = _binary(_multiply, (lambda x, y, z: y, lambda x, y, z: x))
_quotient = _binary(
    lambda x, y: x / y, (lambda x, y, z: 1 / y, lambda x, y, z: -z / y), to_float=True
)
floor_divide = _binary(np.floor_divide, (_no_slope, _no_slope))
remainder = _binary(np.remainder, (_one, lambda x, y, z: -np.floor(x / y)))
fmod = _binary(np.fmod, (_one, lambda x, y, z: -np.trunc(x / y)))
power = _binary(np.power, (_power_by_base, _power_by_exponent))
maximum = _binary(np.maximum, (_either(np.greater), _either(np.less)))
minimum = _binary(np.minimum, (_either(np.less), _either(np.greater)))
arctan2 = _binary(
    np.arctan2,
    (lambda x, y, z: y / (x * x + y * y), lambda x, y, z: -x / (x * x + y * y)),
    to_float=True,
)
logaddexp = _binary(
    np.logaddexp, (lambda x, y, z: np.exp(x - z), lambda x, y, z: np.exp(y - z)), to_float=True
)
xlogy = _binary(
    lambda x, y: np.where(x == 0, 0, x * np.log(y)).astype(x.dtype),
    (lambda x, y, z: np.log(y), lambda x, y, z: x / y),
    to_float=True,
)


def plus(input: Operand, other: Operand, *, alpha: Number = 1) -> Tensor:
    return _sum(input, other if alpha == 1 else multiply(tensor_of(other), alpha))


def subtract(input: Operand, other: Operand, *, alpha: Number = 1) -> Tensor:
    return _difference(input, other if alpha == 1 else multiply(tensor_of(other), alpha))


def rsub(input: Operand, other: Operand) -> Tensor:
    return _difference(other, input)


def divide(input: Operand, other: Operand, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode == "floor":
        return floor_divide(input, other)
    quotient = _quotient(input, other)
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc":
        raise UserError("rounding_mode is None, 'floor' or 'trunc'")
    return cast(trunc(quotient), common_dtype(input, other))


# --- choices --------------------------------------------------------------------------------------


def where(condition: Operand, input: Operand, other: Operand) -> Tensor:
    mask = tensor_of(condition, BOOL)
    if not isinstance(input, Tensor) and not isinstance(other, Tensor):
        dtype = common_dtype(input, other)
        x, y = tensor_of(input, dtype), tensor_of(other, dtype)
    else:
        x, y = promoted(input, other)
    reserved(mask, x, y, itemsize=x.dtype.itemsize)
    chosen = np.where(mask.array, x.array, y.array)
    return record(
        chosen,
        (x, lambda g: unbroadcast(np.where(mask.array, g, 0), x.shape)),
        (y, lambda g: unbroadcast(np.where(mask.array, 0, g), y.shape)),
    )


def where_method(input: Operand, condition: Operand, other: Operand) -> Tensor:
    return where(condition, input, other)


def masked_fill(input: Operand, mask: Operand, value: Operand) -> Tensor:
    x = tensor_of(input)
    return where(mask, tensor_of(value, x.dtype), x)


def clamp(input: Operand, /, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    if min is None and max is None:
        raise UserError("clamp needs a min or a max")
    low: Operand = float("-inf") if min is None else min
    high: Operand = float("inf") if max is None else max
    dtype = common_dtype(*(each for each in (input, min, max) if each is not None))
    if dtype.kind != "f":
        low = np.iinfo(dtype).min if min is None else min
        high = np.iinfo(dtype).max if max is None else max
    x, lo, hi = (tensor_of(each, dtype) for each in (input, low, high))
    reserved(x, lo, hi, itemsize=dtype.itemsize)
    clamped = np.minimum(np.maximum(x.array, lo.array), hi.array)
    if dtype.kind != "f":
        return Tensor(np.asarray(clamped))
    inside = (x.array >= lo.array) & (x.array <= hi.array)
    below = (x.array < lo.array) & (lo.array < hi.array)
    above = (x.array > hi.array) | (hi.array < lo.array)
    return record(
        clamped,
        (x, lambda g: unbroadcast(np.where(inside, g, 0), x.shape)),
        (lo, lambda g: unbroadcast(np.where(below, g, 0), lo.shape)),
        (hi, lambda g: unbroadcast(np.where(above, g, 0), hi.shape)),
    )


def clamp_min(input: Operand, min: Operand) -> Tensor:
    return clamp(input, min)


def clamp_max(input: Operand, max: Operand) -> Tensor:
    return clamp(input, None, max)


def lerp(input: Operand, end: Operand, weight: Operand) -> Tensor:
    return plus(input, multiply(tensor_of(weight), subtract(end, input)))


# --- without a gradient ---------------------------------------------------------------------------


def _compares(forward: Callable[[Array, Array], Array]) -> Binary:
    def apply(input: Operand, other: Operand) -> Tensor:
        x, y = promoted(input, other)
        reserved(x, y, itemsize=1)
        return Tensor(np.asarray(forward(x.array, y.array)))

    return apply


eq, ne = _compares(np.equal), _compares(np.not_equal)
lt, le = _compares(np.less), _compares(np.less_equal)
gt, ge = _compares(np.greater), _compares(np.greater_equal)
logical_and, logical_or = _compares(np.logical_and), _compares(np.logical_or)
logical_xor = _compares(np.logical_xor)


def _of_bits(forward: Callable[[Array, Array], Array]) -> Binary:
    def apply(input: Operand, other: Operand) -> Tensor:
        x, y = promoted(input, other)
        if x.dtype.kind == "f":
            raise UserError("a float where bools or integers are needed; compare it first")
        reserved(x, y)
        return Tensor(np.asarray(forward(x.array, y.array)))

    return apply


bit_and, bit_or = _of_bits(np.bitwise_and), _of_bits(np.bitwise_or)
bit_xor = _of_bits(np.bitwise_xor)


def _tests(forward: Callable[[Array], Array]) -> Unary:
    def apply(input: Operand, /) -> Tensor:
        x = tensor_of(input)
        current().reserve(x.shape, 1)
        return Tensor(np.asarray(forward(x.array)))

    return apply


isnan, isinf, isfinite = _tests(np.isnan), _tests(np.isinf), _tests(np.isfinite)
logical_not = _tests(np.logical_not)


def invert(input: Operand, /) -> Tensor:
    x = tensor_of(input)
    if x.dtype.kind == "f":
        raise UserError("~ of a float, where bools or integers are needed; compare it first")
    current().reserve(x.shape)
    return Tensor(np.asarray(np.invert(x.array)))
