"""The evaluation of custom losses: limits, metrics, errors, and random graphs beside torch."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.engine.custom_loss import losses, malformed
from tests.engine.custom_loss.malformed import BOMBS
from tests.engine.custom_loss.traced import ours, theirs, traced
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import graph, tape
from tuneserve_engine.custom_loss.evaluate import LossDatum, evaluate

LOGPROBS = np.array([-0.5, -1.5, -2.0, -0.25, -3.0, -1.0], "f4")


def datum(*logprobs: float, **inputs: Any) -> LossDatum:
    return LossDatum(np.array(logprobs, "f4"), inputs)


def test_losses_are_added_and_metrics_reduced_by_their_suffix() -> None:
    def loss(logprobs: Any) -> Any:
        total = logprobs.sum()
        return total**2, {"custom/a:sum": total, "custom/b:mean": total}

    found = ours(traced(loss, {"logprobs": 1}), datum(-1, -2), datum(-4), datum(-2))
    assert found.loss == 9 + 16 + 4
    assert found.metrics == {"custom/a:sum": -9, "custom/b:mean": -3}
    assert [each.tolist() for each in found.gradients] == [[-6, -6], [-8], [-4]]


def test_without_a_gradient_only_the_loss_is_computed() -> None:
    found = ours(traced(losses.entropy_bonus, {"logprobs": 1}), datum(-1, -2), gradient=False)
    value, _, _ = theirs(losses.entropy_bonus, np.array([-1, -2], "f4"), {})
    assert found.loss == pytest.approx(value)
    assert found.gradients == []


def _constant(logprobs: Any) -> Any:
    return logprobs.detach().sum(), {}


def _vector(logprobs: Any) -> Any:
    return logprobs * 2, {}


def _whole(logprobs: Any) -> Any:
    return (logprobs > 0).sum(), {}


def _infinite(logprobs: Any) -> Any:
    return (1 / (logprobs - logprobs)).sum(), {}


def _infinite_slope(logprobs: Any) -> Any:
    return torch.sqrt(logprobs - logprobs).sum(), {}


def _wide_metric(logprobs: Any) -> Any:
    return logprobs.sum(), {"custom/a:sum": logprobs}


def _wrong_shape(logprobs: Any) -> Any:
    return (logprobs.reshape(7, 9) * 2).sum(), {}


def _out_of_reach(logprobs: Any) -> Any:
    return logprobs[99], {}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_constant, "does not depend on the logprobs"),
        (_vector, r"a loss of shape \[2\]"),
        (_whole, "a float without dimensions"),
        (_infinite, "not finite"),
        (_infinite_slope, "not finite"),
        (_wide_metric, "metric custom/a:sum has 2 elements"),
        (_wrong_shape, r"node reshape \(reshape\): cannot reshape"),
        (_out_of_reach, r"node getitem \(operator.getitem\): index 99"),
    ],
)
def test_a_loss_that_cannot_be_computed_names_the_datum_and_the_node(loss: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as failure:
        ours(traced(loss, {"logprobs": 1}), datum(-1, -2))
    assert str(failure.value).startswith("data[0]")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(name: str) -> None:
    """A limit of 256 MiB for the tensors of a datum, of which the larger part may be in use."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            ours(graph.parse(json.dumps(BOMBS[name])), LossDatum(LOGPROBS, {}))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1.5 * tape.MAX_HELD_BYTES


def test_work_is_limited_over_all_datums_and_pauses_come_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 steps on half a million elements, forward and backward."""

    def loss(logprobs: Any) -> Any:
        for _ in range(16):
            logprobs = logprobs * 2
        return logprobs.sum(), {}

    large = LossDatum(np.full(1 << 19, -1.0, "f4"), {})
    pauses = []
    checked = traced(loss, {"logprobs": 1})
    evaluate(checked, [large], gradient=True, pause=lambda: pauses.append(1))
    assert len(pauses) >= 2 * 16 * (1 << 19) // tape.PAUSE_UNITS
    monkeypatch.setattr(tape, "MAX_UNITS", 1 << 26)
    evaluate(checked, [large] * 3, gradient=True, pause=lambda: None)
    with pytest.raises(UserError, match="fewer datums per request"):
        evaluate(checked, [large] * 5, gradient=True, pause=lambda: None)


# --- malformed graphs -----------------------------------------------------------------------------


def run_malformed(seed: int, count: int) -> int:
    """Every graph is refused as the user's fault, or runs; return how many run."""
    ran = 0
    inputs = {name: np.ones(6, "f4") for name in ("ref", "chosen", "rejected", "mask")}
    inputs["labels"] = np.array([1, 3, 0, 5])
    for each in malformed.graphs(seed, count):
        try:
            ours(graph.parse(json.dumps(each)), LossDatum(LOGPROBS, inputs))
            ran += 1
        except UserError as error:
            assert 10 < len(str(error)) < 800
    return ran


def test_malformed_graphs_are_refused_or_run() -> None:
    assert 0 < run_malformed(1, 400) < 200


@pytest.mark.nightly
def test_thousands_of_malformed_graphs_are_refused_or_run() -> None:
    assert 0 < run_malformed(2, 5000) < 2500


# --- random graphs --------------------------------------------------------------------------------

_UNARY = ("exp", "tanh", "sigmoid", "square", "neg", "abs", "sin", "cos", "relu", "log1p", "cumsum")
_BINARY = ("add", "sub", "mul", "maximum", "minimum", "logaddexp")


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """Steps: an operation, the numbers of its operands, and a reduction or none."""
    steps = []
    for i in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(_UNARY + _BINARY))
        operand = st.integers(0, i + 1)
        steps.append((name, draw(operand), draw(operand), draw(st.integers(0, 3))))
    return steps


def run_program(steps: list[tuple[str, int, int, int]], logprobs: Any, other: Any) -> Any:
    values = [logprobs, other]
    for name, one, two, kept in steps:
        x = values[one]
        if name in _BINARY:
            y = getattr(torch, name)(x, values[two])
        elif name == "cumsum":
            y = torch.cumsum(x, -1)
        elif name == "log1p":
            y = torch.log1p(x.abs())
        else:
            y = getattr(torch, name)(x.clamp(-4, 4) if name in ("exp", "square") else x)
        if kept == 1:
            y = y - y.mean(dim=-1, keepdim=True)
        elif kept == 2:
            y = y.softmax(dim=-1) + x.flip(-1)
        elif kept == 3:
            y = torch.where(other > -1, y, x * 0.5)
        values.append(y)
    total = sum(value.mean() for value in values)
    return total, {"custom/last:sum": values[-1].sum()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_random_graph_has_the_gradient_that_torch_computes(
    steps: list[tuple[str, int, int, int]], n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logprobs, other = (-2 * rng.random(n).astype("f4") - 0.1 for _ in "12")

    def loss(logprobs: Any, other: Any) -> Any:
        return run_program(steps, logprobs, other)

    value, gradient, metrics = theirs(loss, logprobs, {"other": other})
    exact = theirs(loss, logprobs, {"other": other}, torch.float64)
    if np.isfinite(value):  # near a corner, rounding decides the slope
        assume(np.allclose(gradient, exact[1], rtol=1e-5, atol=1e-5))
        assume(np.isclose(value, exact[0], rtol=1e-5, atol=1e-5))
    checked = traced(loss, {"logprobs": 1, "other": 1})
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        with pytest.raises(UserError, match="not finite"):
            ours(checked, LossDatum(logprobs, {"other": other}))
        return
    found = ours(checked, LossDatum(logprobs, {"other": other}))
    assert found.loss == pytest.approx(value, rel=1e-5, abs=1e-5)
    scale = max(float(np.abs(gradient).max()), 1.0)
    np.testing.assert_allclose(found.gradients[0], gradient, rtol=1e-5, atol=1e-5 * scale)
    assert found.metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
