"""Wire types of what a training loop, or a person, notes about a run."""

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


class RunPage(Response):
    """All about a run."""

    run: types.TrainingRunResponse
    points: list[types.CurvePointResponse]
    events: list[RunEvent]
    checkpoints: list[types.CheckpointResponse] = Field(description="Newest first.")
