"""The operations of custom losses, beside torch: losses, gradients and metrics of the same code."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.custom_loss import losses
from tests.engine.custom_loss.traced import ours, ranks_of, theirs, traced
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import operations, scalars
from tuneserve_engine.custom_loss.evaluate import LossDatum

N = 12
RNG = np.random.default_rng(7)
LOGPROBS = (-3 * RNG.random(N) - 0.05).astype("f4")
INPUTS: dict[str, np.ndarray[Any, Any]] = {
    "ref": (-3 * RNG.random(N) - 0.05).astype("f4"),
    "chosen": (np.arange(N) < 5).astype("f4"),
    "rejected": (np.arange(N) > 6).astype("f4"),
    "mask": (np.arange(N) % 3 != 0).astype("f4"),
    "advantages": RNG.normal(size=N).astype("f4"),
    "rewards": RNG.normal(size=N).astype("f4"),
    "desirable": np.asarray(1.0, "f4"),
    "scale": np.asarray(0.7, "f4"),
    "labels": np.array([1, 3, 0, 5]),
}
TWO_D = ("reverse_kl", "distillation", "label_smoothing", "several_targets", "gathered")
LOSSES = [
    name
    for name, each in vars(losses).items()
    if callable(each) and getattr(each, "__module__", "") == losses.__name__
]


def arguments(name: str) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """The logprobs and the inputs that a loss of ``losses`` takes."""
    code = getattr(losses, name).__code__
    names = code.co_varnames[1 : code.co_argcount]
    inputs = {each: INPUTS[each] for each in names}
    if name not in TWO_D:
        return LOGPROBS, inputs
    inputs = {key: x.reshape(4, 3) if x.size == N else x for key, x in inputs.items()}
    return LOGPROBS.reshape(4, 3), inputs


def test_there_are_forty_losses() -> None:
    assert len(LOSSES) >= 40


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_gradient_that_torch_computes(name: str) -> None:
    """Within 1e-5 of the gradient's largest element; torch computes in double precision.

    The graphs are in float32, as on the client: its errors are ours, too.
    """
    logprobs, inputs = arguments(name)
    loss = getattr(losses, name)
    value, gradient, metrics = theirs(loss, logprobs, inputs, torch.float64)
    found = ours(traced(loss, ranks_of(logprobs, inputs)), LossDatum(logprobs, inputs))
    np.testing.assert_allclose(found.loss, value, rtol=1e-5, atol=1e-6)
    scale = np.abs(gradient).max()
    assert scale > 0
    np.testing.assert_allclose(found.gradients[0], gradient, rtol=1e-5, atol=1e-5 * scale)
    assert found.gradients[0].dtype == np.float32
    assert found.metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_the_losses_reach_every_operation() -> None:
    reached = set()
    for name in LOSSES:
        logprobs, inputs = arguments(name)
        graph = traced(getattr(losses, name), ranks_of(logprobs, inputs))
        reached |= {each.function for each in graph.calls}
    offered = {*operations.FUNCTIONS.values(), *operations.METHODS.values()}
    offered -= set(scalars.MATH.values())
    missing = {
        name
        for table in (operations.FUNCTIONS, operations.METHODS)
        for name, function in table.items()
        if function in offered - reached
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("op", "target", "way_out"),
    [
        ("call_function", "torch.rand_like", "random"),
        ("call_function", "torch.nn.functional.dropout", "random"),
        ("call_function", "torch.fft.fft", "forward_backward_custom"),
        ("call_function", "os.system", "forward_backward_custom"),
        ("call_function", "builtins.eval", "forward_backward_custom"),
        ("call_function", "operator.setitem", "torch.where"),
        ("call_function", "operator.lshift", "forward_backward_custom"),
        ("call_function", "operator.attrgetter", "forward_backward_custom"),
        ("call_function", "math.factorial", "forward_backward_custom"),
        ("call_method", "item", "as a tensor"),
        ("call_method", "add_", "without the underscore"),
        ("call_method", "__class__", "forward_backward_custom"),
        ("call_method", "backward", "return the loss"),
    ],
)
def test_an_operation_that_is_not_offered_is_refused_with_a_way_out(
    op: str, target: str, way_out: str
) -> None:
    with pytest.raises(UserError, match=way_out):
        operations.find(op, target)


def test_the_documentation_lists_the_offered_operations() -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    section = page.partition("## Custom losses")[2].partition("\n## ")[0]
    listed = {
        name.rpartition(".")[2]
        for line in section.splitlines()
        if re.match(r"\| (`torch|`tensor|`math|Attributes)", line)
        for name in re.findall(r"`([\w.]+)`", line.split("|")[2])
    }
    offered = {*operations.FUNCTIONS, *operations.METHODS, *scalars.ATTRIBUTES}
    names = {name.rpartition(".")[2] for name in offered if not name.startswith("operator.")}
    private = {name for name in names if name.startswith("special_") or name.startswith("linalg_")}
    assert listed == names - private - {"getattr", "log_sigmoid"}


def test_an_argument_that_an_operation_does_not_take_is_refused() -> None:
    function = operations.find("call_function", "torch.sum")
    assert operations.arguments(function, (1,), {"axis": 0, "out": None}) == ((1,), {"dim": 0})
    with pytest.raises(UserError, match="it takes input, dim, keepdim, dtype"):
        operations.arguments(function, (1,), {"where": 2})
    with pytest.raises(UserError, match="too many"):
        operations.arguments(function, (1, 2, 3, 4), {})


@pytest.mark.parametrize(
    ("left", "right"), [("f4", "i8"), ("i8", "?"), ("f4", "f8"), ("?", "?"), ("i4", "i8")]
)
@pytest.mark.parametrize("scalar", [False, True])
def test_dtypes_combine_as_in_torch(left: str, right: str, scalar: bool) -> None:
    one, two = np.ones(3, left), np.ones((), right) if scalar else np.ones(3, right)
    logprobs = LOGPROBS[:3]

    def loss(logprobs: Any, one: Any, two: Any) -> Any:
        kinds = (one + two).to(logprobs.dtype) * logprobs
        return kinds.sum(), {"custom/mean:mean": (one * two / 2).sum() + 0.5}

    inputs = {"one": one, "two": two}
    found = ours(traced(loss, ranks_of(logprobs, inputs)), LossDatum(logprobs, inputs))
    value, gradient, metrics = theirs(loss, logprobs, inputs)
    assert found.loss == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(found.gradients[0], gradient, rtol=1e-6)
    assert found.metrics == pytest.approx(metrics, rel=1e-6)
