"""The evaluation of a custom loss on the datums of a request, and its derivative by their logprobs.

Every datum has a loss of its own, and the losses are added. A metric is the sum or the mean of the
datums' values, as its name says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss.graph import CustomLoss, Node, Ref
from tuneserve_engine.custom_loss.tape import Array, GraphRun, Tensor, backward, named, running

_MOST_TEXT = 200  # characters of an error that NumPy worded
_FAULTS = (
    *(TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError),
    RecursionError,
)


@dataclass(frozen=True)
class LossDatum:
    """The logprobs of a datum's targets, [N] or [N, K] float32, and the inputs that are named."""

    logprobs: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class LossResult:
    """The sum of the losses, d loss / d logprobs of each datum, and the metrics.

    ``gradients`` is empty if none was asked for.
    """

    loss: float
    gradients: list[Array]
    metrics: dict[str, float]


def evaluate(
    loss: CustomLoss,
    data: Sequence[LossDatum],
    *,
    gradient: bool,
    pause: Callable[[], None],
) -> LossResult:
    """Return the loss of these datums. Raises ``UserError`` if it cannot be computed.

    ``pause`` is called now and then, at least every few milliseconds; nothing depends on it.
    """
    total = 0.0
    gradients: list[Array] = []
    sums = dict.fromkeys(loss.metrics, 0.0)
    run = GraphRun(pause=pause)
    for i, datum in enumerate(data):
        run.start_datum()
        logprobs = Tensor(datum.logprobs, is_input=gradient)
        try:
            with running(run):
                value, metrics = _value(loss, logprobs, datum.inputs)
                if gradient:
                    _differentiate(value, logprobs)
        except UserError as error:
            raise UserError(f"data[{i}], custom loss: {error}") from None
        if gradient:
            assert logprobs.gradient is not None
            gradients.append(np.ascontiguousarray(logprobs.gradient, "<f4"))
        if not (np.isfinite(value.array) and (not gradient or np.isfinite(gradients[-1]).all())):
            raise UserError(
                f"data[{i}]: the custom loss or its gradient is not finite; nothing was "
                "accumulated; check the logprobs and the inputs that the loss divides by, or takes "
                "the log or exp of"
            )
        total += float(value.array)
        for key, number in metrics.items():
            sums[key] += number
    means = {key: n / len(data) if key.endswith(":mean") else n for key, n in sums.items()}
    return LossResult(total, gradients, means)


def _differentiate(value: Tensor, logprobs: Tensor) -> None:
    try:
        backward(value)
    except _FAULTS as error:
        raise UserError(f"its gradient: {_worded(error)}") from None
    if logprobs.gradient is None:
        raise UserError("the loss does not depend on the logprobs, so it has no gradient")


def _value(
    loss: CustomLoss, logprobs: Tensor, inputs: Mapping[str, Array]
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one datum, a scalar, and its metrics."""
    values: list[Any] = [None] * loss.size
    for place, each in zip(loss.places, loss.inputs, strict=True):
        values[place] = logprobs if each.name == "logprobs" else Tensor(inputs[each.name])
    resolve = partial(_resolved, values)
    for node in loss.calls:
        values[node.position] = _called(node, resolve)
    value = values[loss.loss.position]
    if not isinstance(value, Tensor) or value.shape or value.dtype.kind != "f":
        shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else named(value)
        raise UserError(f"it returns a loss {shape}; the loss is a float without dimensions")
    if logprobs.is_input and not value.tracks:
        raise UserError("the loss does not depend on the logprobs, so it has no gradient")
    return value, {key: _number(key, resolve(ref)) for key, ref in loss.metrics.items()}


def _called(node: Node, resolve: Callable[[Any], Any]) -> Any:
    try:
        return node.function(
            *map(resolve, node.args), **{k: resolve(v) for k, v in node.kwargs.items()}
        )
    except UserError as error:
        raise UserError(f"node {node.name} ({node.target}): {error}") from None
    except _FAULTS as error:
        raise UserError(f"node {node.name} ({node.target}): {_worded(error)}") from None


def _resolved(values: Sequence[Any], argument: Any) -> Any:
    """Return an argument with the values that it refers to."""
    if isinstance(argument, Ref):
        return values[argument.position]
    if isinstance(argument, slice):
        return slice(
            *(_resolved(values, x) for x in (argument.start, argument.stop, argument.step))
        )
    if isinstance(argument, list | tuple):
        return type(argument)(_resolved(values, each) for each in argument)
    if isinstance(argument, dict):
        raise UserError("a dict, which no operation takes")
    return argument


def _number(key: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.array.size != 1:
            raise UserError(
                f"metric {key} has {value.array.size} elements; a metric has one: reduce it"
            )
        return float(value.array.reshape(()))
    if isinstance(value, bool | int | float):
        return float(value)
    raise UserError(f"metric {key} is {named(value)}; a metric is a tensor of one element")


def _worded(error: BaseException) -> str:
    return str(error)[:_MOST_TEXT] or type(error).__name__
