"""Custom losses traced by the official SDK, and what torch computes for them."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from tuneserve_engine.custom_loss import graph
from tuneserve_engine.custom_loss.evaluate import LossDatum, LossResult, evaluate
from tuneserve_engine.custom_loss.graph import CustomLoss

Loss = Callable[..., Any]
Arrays = Mapping[str, np.ndarray[Any, Any]]


def text_of(loss: Loss, ranks: Mapping[str, int]) -> str:
    """The stored text of a loss, as the official SDK traces and encodes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = trace_loss(loss, ranks, "session")  # type: ignore[arg-type]
        nodes = encode_graph(handle).nodes
    return graph.to_text(
        handle.name,
        [each.model_dump() for each in handle.inputs],
        [each.model_dump() for each in nodes],
    )


def traced(loss: Loss, ranks: Mapping[str, int]) -> CustomLoss:
    return graph.parse(text_of(loss, ranks))


def ranks_of(logprobs: np.ndarray[Any, Any], inputs: Arrays) -> dict[str, int]:
    return {"logprobs": logprobs.ndim, **{name: each.ndim for name, each in inputs.items()}}


def ours(loss: CustomLoss, *data: LossDatum, gradient: bool = True) -> LossResult:
    return evaluate(loss, data, gradient=gradient, pause=lambda: None)


def theirs(
    loss: Loss, logprobs: np.ndarray[Any, Any], inputs: Arrays, dtype: torch.dtype = torch.float32
) -> tuple[float, np.ndarray[Any, Any], dict[str, float]]:
    """The loss, its gradient and its metrics by torch; floats in ``dtype``."""
    leaf = torch.tensor(logprobs).to(dtype).requires_grad_()
    given = [
        torch.tensor(each).to(dtype) if each.dtype.kind == "f" else torch.tensor(each)
        for each in inputs.values()
    ]
    value, metrics = loss(leaf, *given)
    value.backward()
    assert leaf.grad is not None
    return (
        value.item(),
        leaf.grad.numpy(),
        {key: float(each.item()) for key, each in metrics.items()},
    )
