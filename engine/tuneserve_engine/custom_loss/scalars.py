"""The operators of custom losses, on tensors and on Python numbers, and ``math`` on numbers.

Numbers come from shapes: an integer stays within 64 bits, so that no power of one grows.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import elementwise as each
from tuneserve_engine.custom_loss import indexing, shaping
from tuneserve_engine.custom_loss.reductions import Pair
from tuneserve_engine.custom_loss.tape import Number, Tensor, named

_MOST_BITS = 63
_MOST_ITEMS = 1024


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def checked(value: Any) -> Number:
    """Return a number that arithmetic gave. Raises ``UserError`` for a complex or a huge one."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise UserError("an integer beyond 64 bits; use floats")
    if not _is_number(value):
        raise UserError("a number that is not real")
    number: Number = value
    return number


def _power(x: Number, y: Number) -> Any:
    if isinstance(x, int) and isinstance(y, int) and abs(x) > 1 and y > _MOST_BITS:
        raise UserError("an integer beyond 64 bits; use floats")
    return x**y


def _operator(
    of_tensors: Callable[[Any, Any], Any], of_numbers: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Return the operator for two operands that are tensors or numbers."""

    def apply(a: Any, b: Any, /) -> Any:
        for operand in (a, b):
            if not isinstance(operand, Tensor) and not _is_number(operand):
                raise UserError(f"{named(operand)} where a tensor or a number is needed")
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return of_tensors(a, b)
        return checked(of_numbers(a, b))

    return apply


_plus = _operator(each.plus, operator.add)


def join_or_add(a: Any, b: Any, /) -> Any:
    """Add numbers and tensors, or join two shapes."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) + len(b) > _MOST_ITEMS:
            raise UserError(f"a sequence of more than {_MOST_ITEMS} elements")
        return (*a, *b)
    return _plus(a, b)


def _unary(
    of_tensors: Callable[[Any], Any], of_numbers: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    def apply(a: Any, /) -> Any:
        if isinstance(a, Tensor):
            return of_tensors(a)
        if not _is_number(a):
            raise UserError(f"{named(a)} where a tensor or a number is needed")
        return checked(of_numbers(a))

    return apply


def getitem(a: Any, b: Any, /) -> Any:
    """Return an element of a shape or of a result of several tensors, or index a tensor."""
    if isinstance(a, Tensor):
        return indexing.getitem(a, b)
    if not isinstance(a, list | tuple) or isinstance(b, bool) or not isinstance(b, int | slice):
        raise UserError(f"an index into {named(a)}")
    return a[b]


def getattribute(a: Any, name: str, /) -> Any:
    """Return one of the attributes that a tensor has here."""
    if isinstance(a, Pair) and name in Pair._fields:
        return getattr(a, name)
    read = _ATTRIBUTES.get(name)
    if not isinstance(a, Tensor) or read is None:
        raise UserError(f"an attribute that {named(a)} does not have here")
    return read(a)


_ATTRIBUTES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "ndim": lambda x: len(x.shape),
    "dtype": lambda x: x.dtype,
    "device": lambda x: "cpu",
    "requires_grad": lambda x: x.tracks,
    "T": lambda x: shaping.permute(x, tuple(reversed(range(len(x.shape))))),
    "mT": lambda x: shaping.transpose(x, -2, -1),
}
ATTRIBUTES = frozenset({*_ATTRIBUTES, *Pair._fields})

OPERATORS: dict[str, Callable[..., Any]] = {
    "add": join_or_add,
    "sub": _operator(each.subtract, operator.sub),
    "mul": _operator(each.multiply, operator.mul),
    "truediv": _operator(each.divide, operator.truediv),
    "floordiv": _operator(each.floor_divide, operator.floordiv),
    "mod": _operator(each.remainder, operator.mod),
    "pow": _operator(each.power, _power),
    "and_": _operator(each.bit_and, operator.and_),
    "or_": _operator(each.bit_or, operator.or_),
    "xor": _operator(each.bit_xor, operator.xor),
    "matmul": shaping.matmul,
    "getitem": getitem,
    "neg": _unary(each.negative, operator.neg),
    "pos": _unary(each.positive, operator.pos),
    "abs": _unary(each.absolute, operator.abs),
    "invert": _unary(each.invert, operator.invert),
    "eq": _operator(each.eq, operator.eq),
    "ne": _operator(each.ne, operator.ne),
    "lt": _operator(each.lt, operator.lt),
    "le": _operator(each.le, operator.le),
    "gt": _operator(each.gt, operator.gt),
    "ge": _operator(each.ge, operator.ge),
}


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``math`` that also takes tensors of one element, without a gradient."""

    def apply(*numbers: Any) -> Any:
        return checked(function(*map(_one_number, numbers)))

    return apply


def _one_number(value: Any) -> Number:
    if isinstance(value, Tensor):
        if value.array.size != 1:
            raise UserError("math takes numbers and tensors of one element; use torch")
        number: Number = value.array.reshape(()).item()
        return number
    return checked(value)


_MATH = (
    *("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "fabs", "fmod"),
    *("floor", "ceil", "trunc", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos"),
    *("atan", "atan2", "hypot", "copysign", "erf", "erfc", "gamma", "lgamma", "degrees"),
    *("radians", "isnan", "isinf", "isfinite"),
)
MATH: dict[str, Callable[..., Any]] = {
    name: _of_floats(getattr(math, name)) for name in _MATH if hasattr(math, name)
}
