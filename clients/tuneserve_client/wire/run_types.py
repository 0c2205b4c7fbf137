"""Wire types of runs: their figures, their curves, and the notes of training loops and people."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from tuneserve_client.wire import types
from tuneserve_client.wire.body import MAX_INT64, Request, Response

MOST_EVENTS = 1_000
MOST_EVENT_BYTES = 2 * 1024 * 1024
"""The most bytes of the data of a run's events together: a page of the run sends all of them."""
MOST_DATA_BYTES = 16 * 1024

EventKind = Literal["samples", "verdict", "note"]


def _texts(value: object) -> object:
    """Check the values here: pydantic's own error would name the entry, which is the client's."""
    if isinstance(value, dict) and not all(isinstance(v, str | None) for v in value.values()):
        raise ValueError("each value must be a text or null")
    return value


class UpdateRunRequest(Request):
    user_metadata: Annotated[dict[str, str | None], BeforeValidator(_texts)] = Field(
        max_length=256,
        description="The entries to set; null removes one. Entries that are not named stay.",
    )


class RunEventRequest(Request):
    kind: EventKind
    step: int = Field(ge=0, le=MAX_INT64, description="The optimizer steps before it.")
    data: dict[str, Any] = Field(description="At most 16 KiB of JSON.")
    event_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        default=None, description="A text of the client's choice: the same event is kept once."
    )


class RunEvent(Response):
    event_id: str
    kind: str = Field(description="`samples`, `verdict` or `note`.")
    step: int
    time: datetime
    data: dict[str, Any]


class RunEventsResponse(Response):
    events: list[RunEvent]


class TrainingRunResponse(Response):
    training_run_id: str
    name: str | None = Field(default=None, description="Its own, else its client's.")
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    diverged: bool = Field(
        default=False,
        description="True if the model was restored with results that differ from those "
        "delivered before.",
    )
    lora_rank: int | None = None
    adapter: str = Field(default="lora", description="The kind of adapter.")
    status: str = Field(
        default="ready",
        description="`creating`, `ready`, `failed` (the creation failed), `lost` (only the "
        "checkpoints remain) or `ended` (the session has ended).",
    )
    created: datetime | None = None
    last_request_time: datetime
    last_checkpoint: types.CheckpointResponse | None = None
    last_sampler_checkpoint: types.CheckpointResponse | None = None
    user_metadata: dict[str, str] | None = None
    state: str = Field(
        default="running",
        description="`running`, `finished`, `stopped`, `failed` or `diverged` (its loss, as its "
        "training loop reported).",
    )
    step: int | None = Field(default=None, description="The newest optimizer step, from 1.")
    steps: int | None = Field(
        default=None, description="The number of steps that were asked for, if they are known."
    )
    loss: float | None = Field(
        default=None, description="The mean loss of the gradients of the newest step."
    )
    held_out_loss: float | None = Field(
        default=None, description="The mean loss of the newest forward passes without gradients."
    )
    best_held_out_loss: float | None = None
    best_step: int | None = Field(default=None, description="The step with the best held-out loss.")
    duration_s: float | None = Field(
        default=None, description="From the creation to the newest request; to now while running."
    )
    tokens: int | None = Field(
        default=None, description="The number of tokens in gradients and forward passes."
    )
    device_s: float | None = Field(
        default=None, description="The device time of its requests, without samples."
    )


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRunResponse]
    cursor: types.Cursor


class CurvePointResponse(Response):
    kind: Literal["forward_backward", "forward", "optim_step"]
    seq_id: int
    time: datetime
    loss_sum: float | None = None
    tokens: int | None = None
    weight: float | None = Field(default=None, description="The sum of the tokens' weights.")
    step: int | None = Field(default=None, description="The optimizer step, counted from 1.")
    learning_rate: float | None = None
    grad_norm: float | None = None


class CurveResponse(Response):
    points: list[CurvePointResponse]


class RunPage(Response):
    """All about a run."""

    run: TrainingRunResponse
    points: list[CurvePointResponse]
    events: list[RunEvent]
    checkpoints: list[types.CheckpointResponse] = Field(description="Newest first.")
