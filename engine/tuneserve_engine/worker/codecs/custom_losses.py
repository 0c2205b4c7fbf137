"""The parts of a ``forward_backward`` request that only custom losses have: graph and inputs.

The API process has added the graph to the request, under the id of the loss.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.errors import UserError, shown
from tuneserve_engine.custom_loss import graph
from tuneserve_engine.custom_loss.graph import CustomLoss

LOSS = "custom"

_CONFIG = ("loss_id", "graph")
_WORDS = {0: "one number, without a shape", 1: "[T]", 2: "[T, K]"}


def loss_of(request: wire.ForwardBackwardRequest) -> CustomLoss:
    """Return the checked graph in the request. Raises ``UserError`` if there is none."""
    config = request.loss_fn_config_v2
    for key in (*request.loss_fn_config, *config):
        if key not in _CONFIG:
            raise UserError(f"loss_fn_config key {shown(key)} is unknown to {LOSS}; send loss_id")
    if "graph" not in config or config["graph"].WhichOneof("value") != "text":
        raise UserError(f"loss_fn_config of {LOSS} has no loss_id of a loss that was created")
    return graph.parse(config["graph"].text)


def check_targets(name: str, flat: bool, loss: CustomLoss) -> None:
    """Raise ``UserError`` unless the datum's targets have the rank that the loss declares."""
    rank = 1 if flat else 2
    declared = loss.inputs[0].rank
    if rank != declared:
        raise UserError(
            f"{name}.target_tokens has rank {rank}; the custom loss declares logprobs of rank "
            f"{declared}, which have the shape of the targets"
        )


def named_inputs(
    name: str,
    datum: wire.Datum,
    loss: CustomLoss,
    read: Callable[[str, wire.Tensor], np.ndarray[Any, Any]],
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the datum's inputs that the loss names, in the ranks that it declares.

    ``read`` returns a tensor of the message, 1-D if it has no shape. Floats are float32, integers
    int64. Raises ``UserError`` for a missing input, or one of another rank.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}
    for each in loss.inputs[1:]:
        if each.name not in datum.loss_fn_inputs:
            raise UserError(
                f"{name}.loss_fn_inputs lacks {each.name}, which the custom loss declares"
            )
        tensor = datum.loss_fn_inputs[each.name]
        values = read(f"{name}.{each.name}", tensor)
        if each.rank == 0 and not tensor.shape and values.size == 1:
            values = values.reshape(())
        if values.ndim != each.rank:
            raise UserError(
                f"{name}.{each.name} has shape {list(values.shape)}; the custom loss declares rank "
                f"{each.rank}: {_WORDS[each.rank]}"
            )
        found[each.name] = values.astype("<i8" if values.dtype.kind == "i" else "<f4")
    return found
