"""Tensors that remember how they were computed, and the limits of an evaluation.

A tensor has an array and, for each tensor that it was computed from, the pullback of its gradient.
The gradient of one tensor by another comes from calling these backwards, in the order of a tape.
NumPy computes each step as it comes, so that no length of a datum has to be compiled.

The limits count elements, not seconds: a request that was within them once is so when it is
replayed. For the same reason, a release must not lower a limit or drop an operation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]
Pull = Callable[[Array], Array]
"""From the gradient by a result to the gradient by what it was computed from."""

MAX_ELEMENTS = 1 << 22
"""The most elements of one tensor: 65,536 tokens with 64 targets each. A step on so many takes some
tenths of a second at most."""

MAX_HELD_BYTES = 1 << 28
"""The most bytes of all tensors of one datum, which are kept until its gradient is known."""

MAX_UNITS = 1 << 31
"""The most work of one request: elements that are read or written, and ``STEP_UNITS`` a step."""

STEP_UNITS = 1000
"""A step on a small array takes about as long as one that reads this many elements."""

PAUSE_UNITS = 1 << 22
"""The work between two pauses: some milliseconds."""

MAX_DIMENSIONS = 8


def _nothing() -> None:
    return None


@dataclass(eq=False, slots=True)
class Tensor:
    """An array, and the pullbacks to the tensors that it was computed from."""

    array: Array
    pulls: tuple[tuple["Tensor", Pull], ...] = ()
    is_input: bool = False  # the gradient by this tensor is wanted
    gradient: Array | None = None

    @property
    def tracks(self) -> bool:
        """Whether the gradient passes through this tensor."""
        return self.is_input or bool(self.pulls)

    @property
    def shape(self) -> Shape:
        shape: Shape = self.array.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype


@dataclass(eq=False)
class GraphRun:
    """The evaluation of one request: its remaining work, and the tape of the current datum.

    ``pause`` is called after every ``PAUSE_UNITS`` of work; results do not depend on it.
    """

    units: int = field(default_factory=lambda: MAX_UNITS)
    pause: Callable[[], None] = _nothing
    held_bytes: int = 0
    tape: list[Tensor] = field(default_factory=list)
    _since_pause: int = 0

    def start_datum(self) -> None:
        """Forget the tensors of the datum before."""
        self.held_bytes = 0
        self.tape = []

    def spend(self, elements: int) -> None:
        """Count one step on this many elements. Raises ``UserError`` beyond the limit."""
        units = STEP_UNITS + elements
        self.units -= units
        if self.units < 0:
            raise UserError(
                f"the request needs more than {MAX_UNITS} elements of work (each step counts "
                f"{STEP_UNITS} more); send fewer datums per request, or a smaller graph"
            )
        self._since_pause += units
        if self._since_pause >= PAUSE_UNITS:
            self._since_pause = 0
            self.pause()

    def reserve(self, shape: Sequence[int], itemsize: int = 8) -> None:
        """Count a new tensor before it is made. Raises ``UserError`` for one that is too large."""
        if len(shape) > MAX_DIMENSIONS:
            raise UserError(f"a tensor of {len(shape)} dimensions; the limit is {MAX_DIMENSIONS}")
        if min(shape, default=0) < 0:
            raise UserError(f"a tensor of shape {list(shape)}; no size may be below 0")
        elements = math.prod(shape)
        if elements > MAX_ELEMENTS:
            raise UserError(
                f"a tensor of more than {MAX_ELEMENTS} elements; reduce before you combine"
            )
        self.held_bytes += elements * itemsize
        if self.held_bytes > MAX_HELD_BYTES:
            raise UserError(
                f"the tensors of the datum take more than {MAX_HELD_BYTES} bytes; shorten the "
                "datum, or use fewer and smaller intermediate tensors"
            )
        self.spend(elements)


_RUN: ContextVar[GraphRun] = ContextVar("evaluation")


def current() -> GraphRun:
    """Return the evaluation that this thread is in."""
    return _RUN.get()


@contextmanager
def running(run: GraphRun) -> Iterator[GraphRun]:
    """Make ``run`` the current evaluation; floating-point errors give inf and nan, as in torch."""
    token = _RUN.set(run)
    try:
        with np.errstate(all="ignore"):
            yield run
    finally:
        _RUN.reset(token)


def record(array: Any, *pulls: tuple[Tensor, Pull]) -> Tensor:
    """Return the result of a step, on the tape if a gradient passes through it."""
    result = Tensor(np.asarray(array), tuple(each for each in pulls if each[0].tracks))
    if result.pulls:
        current().tape.append(result)
    return result


def backward(loss: Tensor) -> None:
    """Set ``gradient`` of every tensor on the current tape, and of the inputs, to d loss.

    A gradient is dropped once it has been passed on, except that of an input.
    """
    run = current()
    loss.gradient = np.ones(loss.shape, loss.dtype)
    for tensor in reversed(run.tape):
        gradient, tensor.gradient = tensor.gradient, None
        if gradient is None:
            continue
        for source, pull in tensor.pulls:
            run.spend(max(gradient.size, source.array.size))
            part = pull(gradient).astype(source.dtype, copy=False)
            source.gradient = part if source.gradient is None else source.gradient + part


def unbroadcast(gradient: Array, shape: Shape) -> Array:
    """Return the sum of a gradient over the axes along which an operand was repeated."""
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, size in enumerate(shape) if size == 1 and gradient.shape[extra + i] != 1
    )
    summed: Array = gradient.sum(axes, dtype=_wide(gradient.dtype)).astype(gradient.dtype)
    return summed.reshape(shape)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype("f8") if dtype.kind == "f" else dtype


# --- dtypes ---------------------------------------------------------------------------------------

FLOAT, INT, BOOL = np.dtype("f4"), np.dtype("i8"), np.dtype("?")
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": FLOAT,
    "float": FLOAT,
    "float64": np.dtype("f8"),
    "double": np.dtype("f8"),
    "int64": INT,
    "long": INT,
    "int32": np.dtype("i4"),
    "int": np.dtype("i4"),
    "bool": BOOL,
}
"""The dtypes that a graph may name."""

Number = bool | int | float
_ORDER = "biuf"


def of_number(number: Number) -> np.dtype[Any]:
    """Return the dtype that torch gives to a Python number."""
    return BOOL if isinstance(number, bool) else INT if isinstance(number, int) else FLOAT


def common_dtype(*operands: Tensor | Number) -> np.dtype[Any]:
    """Return the dtype in which torch combines these operands.

    Tensors with dimensions decide; one without, and then a number, only if it is of a higher kind
    (bool, int, float).
    """
    tensors = [each for each in operands if isinstance(each, Tensor)]
    groups = [
        [each.dtype for each in tensors if each.shape],
        [each.dtype for each in tensors if not each.shape],
        [of_number(each) for each in operands if not isinstance(each, Tensor)],
    ]
    found: np.dtype[Any] | None = None
    for group in groups:
        if group:
            dtype = np.result_type(*group) if len({*group}) > 1 else group[0]
            if any(each.kind == "f" for each in group):  # int64 and float32: float32, not float64
                dtype = max((each for each in group if each.kind == "f"), key=lambda d: d.itemsize)
            if found is None or _ORDER.index(dtype.kind) > _ORDER.index(found.kind):
                found = dtype
    return FLOAT if found is None else found


def tensor_of(value: object, dtype: np.dtype[Any] | None = None) -> Tensor:
    """Return a tensor, or a number as a tensor without dimensions, in the dtype.

    Raises ``UserError`` for anything else.
    """
    if isinstance(value, Tensor):
        return value if dtype is None or value.dtype == dtype else cast(value, dtype)
    if isinstance(value, bool | int | float):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError("an integer beyond 64 bits; use a float")
        return Tensor(np.asarray(value, dtype or of_number(value)))
    raise UserError(f"{named(value)} where a tensor is needed")


def cast(value: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Return the tensor in another dtype; the gradient passes between dtypes of floats."""
    if value.dtype == dtype:
        return value
    current().reserve(value.shape, dtype.itemsize)
    array = value.array.astype(dtype)
    if dtype.kind != "f":
        return Tensor(array)
    return record(array, (value, lambda g: g))


def floating(value: object) -> Tensor:
    """Return the tensor in floats: integers become float32."""
    if not isinstance(value, Tensor):
        raise UserError(f"{named(value)} where a tensor is needed")
    return value if value.dtype.kind == "f" else cast(value, FLOAT)


def named(value: object) -> str:
    """Return the type of a value for a message."""
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
