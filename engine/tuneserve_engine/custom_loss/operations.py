"""The operations that the graph of a custom loss may name; any other is refused.

An operation is a function with torch's parameters, so that a graph's arguments are checked against
its signature before the graph is accepted.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import choosing, creation, indexing, scalars, shaping, spread
from tuneserve_engine.custom_loss import elementwise as each
from tuneserve_engine.custom_loss import reductions as reduce
from tuneserve_engine.custom_loss.elementwise import Operand
from tuneserve_engine.custom_loss.tape import DTYPES, Tensor, cast, tensor_of

Function = Callable[..., Any]


# --- what tensors are -----------------------------------------------------------------------------


def clone(input: Operand, /) -> Tensor:
    return tensor_of(input)


def detach(input: Operand, /) -> Tensor:
    return Tensor(tensor_of(input).array)


def to(input: Operand, /, *targets: Any, dtype: np.dtype[Any] | None = None) -> Tensor:
    """Return the tensor in a dtype; a device is ignored."""
    for target in targets:
        if isinstance(target, Tensor):
            dtype = target.dtype
        elif isinstance(target, np.dtype):
            dtype = target
    x = tensor_of(input)
    return x if dtype is None else cast(x, dtype)


def type_as(input: Operand, /, other: Operand) -> Tensor:
    return to(input, tensor_of(other))


def _to(name: str) -> Function:
    def apply(input: Operand, /) -> Tensor:
        return cast(tensor_of(input), DTYPES[name])

    return apply


def size(input: Operand, /, dim: int | None = None) -> Any:
    shape = tensor_of(input).shape
    return shape if dim is None else shape[dim]


def numel(input: Operand, /) -> int:
    return math.prod(tensor_of(input).shape)


def dimensions(input: Operand, /) -> int:
    return len(tensor_of(input).shape)


def is_floating_point(input: Operand, /) -> bool:
    return tensor_of(input).dtype.kind == "f"


# --- names ----------------------------------------------------------------------------------------


def _named(module: ModuleType, names: str) -> dict[str, Function]:
    return {name: getattr(module, name) for name in names.split()}


_BOTH: dict[str, Function] = {
    **_named(each, "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal"),
    **_named(each, "sin cos tan sinh cosh tanh sigmoid relu sign floor ceil trunc frac nan_to_num"),
    **_named(each, "maximum minimum fmod remainder floor_divide logaddexp xlogy masked_fill lerp"),
    **_named(each, "clamp clamp_min clamp_max eq ne lt le gt ge isnan isinf isfinite"),
    **_named(each, "logical_and logical_or logical_xor logical_not"),
    **_named(reduce, "mean prod amax amin argmax argmin count_nonzero cumsum cumprod"),
    **_named(reduce, "logsumexp softmax log_softmax"),
    **_named(spread, "var std norm"),
    **_named(shaping, "reshape flatten unsqueeze squeeze permute transpose t flip roll"),
    **_named(shaping, "repeat_interleave matmul outer"),
    **_named(indexing, "narrow select"),
    **_named(choosing, "split chunk unbind gather index_select masked_select index_add"),
    **_named(choosing, "sort argsort topk tril triu diff"),
    "abs": each.absolute,
    "absolute": each.absolute,
    "neg": each.negative,
    "negative": each.negative,
    "asin": each.arcsin,
    "acos": each.arccos,
    "atan": each.arctan,
    "atan2": each.arctan2,
    "round": each.round_,
    "add": each.plus,
    "sub": each.subtract,
    "subtract": each.subtract,
    "mul": each.multiply,
    "multiply": each.multiply,
    "div": each.divide,
    "divide": each.divide,
    "true_divide": each.divide,
    "pow": each.power,
    "clip": each.clamp,
    "greater": each.gt,
    "greater_equal": each.ge,
    "less": each.lt,
    "less_equal": each.le,
    "not_equal": each.ne,
    "bitwise_and": each.bit_and,
    "bitwise_or": each.bit_or,
    "bitwise_xor": each.bit_xor,
    "bitwise_not": each.invert,
    "sum": reduce.sum_,
    "max": reduce.max_,
    "min": reduce.min_,
    "any": reduce.any_,
    "all": reduce.all_,
    "swapaxes": shaping.transpose,
    "broadcast_to": shaping.expand,
    "dot": shaping.matmul,
    "mv": shaping.matmul,
    "mm": shaping.matmul,
    "bmm": shaping.matmul,
    "ger": shaping.outer,
    "clone": clone,
    "detach": detach,
    "numel": numel,
    "is_floating_point": is_floating_point,
}

_SPECIAL: dict[str, Function] = {
    "expit": each.sigmoid,
    **_named(each, "xlogy log1p expm1 exp2"),
    **_named(reduce, "logsumexp softmax log_softmax"),
}

_TORCH: dict[str, Function] = {
    "where": each.where,
    "rsub": each.rsub,
    "cat": shaping.cat,
    "concat": shaping.cat,
    "concatenate": shaping.cat,
    "stack": shaping.stack,
    **_named(creation, "full zeros ones full_like zeros_like ones_like arange eye"),
    **_named(spread, "cosine_similarity margin_ranking_loss"),
    "functional.norm": spread.norm,
    "functional.split": choosing.split,
    "linalg.vector_norm": spread.vector_norm,
    "_C._linalg.linalg_vector_norm": spread.vector_norm,
    **{f"special.{name}": function for name, function in _SPECIAL.items()},
    **{f"_C._special.special_{name}": function for name, function in _SPECIAL.items()},
}

_FUNCTIONAL: dict[str, Function] = {
    "logsigmoid": each.log_sigmoid,
    "log_sigmoid": each.log_sigmoid,
    "one_hot": creation.one_hot,
    "pad": choosing.pad,
    **_named(each, "sigmoid tanh relu silu softplus leaky_relu elu hardtanh relu6"),
    **_named(reduce, "softmax log_softmax"),
    **_named(spread, "mse_loss l1_loss huber_loss smooth_l1_loss kl_div normalize"),
    **_named(spread, "binary_cross_entropy_with_logits cosine_similarity margin_ranking_loss"),
}

_METHODS: dict[str, Function] = {
    "where": each.where_method,
    "view": shaping.reshape,
    **_named(shaping, "expand expand_as repeat"),
    **_named(creation, "new_zeros new_ones new_full"),
    "contiguous": clone,
    "cpu": clone,
    "to": to,
    "type": to,
    "type_as": type_as,
    "size": size,
    "dim": dimensions,
    "ndimension": dimensions,
    "nelement": numel,
    **{name: _to(name) for name in ("float", "double", "long", "int", "bool")},
}

FUNCTIONS: Mapping[str, Function] = {
    "getattr": scalars.getattribute,
    **{f"operator.{name}": function for name, function in scalars.OPERATORS.items()},
    **{f"math.{name}": function for name, function in scalars.MATH.items()},
    **{f"torch.{name}": function for name, function in (_BOTH | _TORCH).items()},
    **{f"torch.nn.functional.{name}": function for name, function in _FUNCTIONAL.items()},
    **{f"torch._C._nn.{name}": function for name, function in _FUNCTIONAL.items()},
}
METHODS: Mapping[str, Function] = _BOTH | _METHODS

_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
_SIZES = frozenset({"shape", "size", "sizes", "dims"})
"""The keywords of what an operation also takes as any number of arguments."""
_IGNORED = frozenset(
    {"device", "layout", "memory_format", "pin_memory", "non_blocking", "_stacklevel"}
    | {"size_average", "reduce", "out", "inplace", "requires_grad", "copy", "stable", "sorted"}
)
"""Keywords without an effect here; some of them only if they are None or False, as by default."""
_IF_UNSET = frozenset({"size_average", "reduce", "out", "inplace", "requires_grad"})
_HINTS = {
    "item": "keep every value, metrics included, as a tensor",
    "numpy": "keep every value, metrics included, as a tensor",
    "tolist": "keep every value, metrics included, as a tensor",
    "backward": "return the loss, and its gradient is taken",
    "setitem": "an assignment changes a tensor in place; use torch.where",
    "iadd": "it changes a tensor in place: write x = x + y",
}
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson")


def find(op: str, target: str) -> Function:
    """Return the operation that a node calls. Raises ``UserError`` for one that is not offered."""
    table = METHODS if op == "call_method" else FUNCTIONS
    found = table.get(target)
    if found is None:
        raise UserError(f"this operation is not offered; {_way_out(target)}")
    return found


def _way_out(target: str) -> str:
    last = target.rpartition(".")[2]
    if last in _HINTS:
        return _HINTS[last]
    if last.endswith("_") and not last.endswith("__"):
        return "it changes a tensor in place: use the name without the underscore"
    if any(part in last for part in _RANDOM):
        return "a loss may not be random, because a request has to give the same bits again"
    return (
        "write it with other operations (docs/api.md lists them), or run the loss on the client: "
        "pass the function itself to forward_backward_custom"
    )


@cache
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def arguments(
    function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as the operation takes them. Raises ``UserError`` for others."""
    taken: dict[str, Any] = {}
    parameters = _signature(function).parameters
    for sent, value in kwargs.items():
        name = _ALIASES.get(sent, sent)
        if name in _SIZES and any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            args = (*args, value)
        elif name in parameters and name != "input":
            taken[name] = value
        elif name in ("input", "self"):
            args = (value, *args)
        elif name not in _IGNORED or (name in _IF_UNSET and value not in (None, False)):
            if value is not None:
                raise UserError(f"it does not take this keyword here; {_takes(function)}")
    try:
        _signature(function).bind(*args, **taken)
    except TypeError as error:
        raise UserError(f"{error}; {_takes(function)}") from None
    return args, taken


def _takes(function: Function) -> str:
    names = [
        f"*{name}" if parameter.kind is parameter.VAR_POSITIONAL else name
        for name, parameter in _signature(function).parameters.items()
    ]
    return f"it takes {', '.join(names)}"
