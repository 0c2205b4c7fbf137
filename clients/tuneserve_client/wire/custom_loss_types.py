"""Wire types of custom losses: graphs of torch operations, traced by the official SDK."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tuneserve_client.wire.body import Id, Request, Response

MOST_LOSSES = 256
"""The most custom losses of a session."""


class CustomLossKey(Request):
    """The key of a request that creates a custom loss."""

    session_id: Id
    custom_loss_seq_id: Annotated[int, Field(ge=0, lt=MOST_LOSSES)] = Field(
        description="0, 1, … in a session. The same number is the same request."
    )


class CustomLossInput(Request):
    name: str = Field(
        max_length=64, description="`logprobs` for the first input, or a name in `loss_fn_inputs`."
    )
    rank: Annotated[int, Field(ge=0, le=2)] = Field(
        description="0: one number; 1: one per target; 2: several per target."
    )


class CustomLossNode(Request):
    """One step of a graph, as ``torch.fx`` records it."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str = Field(max_length=256)
    target: str = Field(
        max_length=256, description="A function such as `torch.exp`, or a method of a tensor."
    )
    args: list[Any] = Field(
        default=[],
        description="JSON values, and objects of one entry: `ref`, `tuple`, `dict`, `slice`, "
        "`ellipsis`, `float`, `dtype`, `device`, `layout`, `memory_format`.",
    )
    kwargs: dict[str, Any] = Field(default={}, description="In the same form as `args`.")


class CustomLossGraph(Request):
    format: Literal[1] = 1
    nodes: list[CustomLossNode] = Field(
        max_length=4096, description="In the order of execution; the output is the last node."
    )


class CreateCustomLossRequest(CustomLossKey):
    name: str = Field(max_length=256)
    inputs: list[CustomLossInput] = Field(max_length=16)
    graph: CustomLossGraph


class CreateCustomLossResponse(Response):
    type: Literal["create_custom_loss"] = "create_custom_loss"
    loss_id: str = Field(
        description="Names the loss in `loss_fn_config_v2` of requests of the same session."
    )
