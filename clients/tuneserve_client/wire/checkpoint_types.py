"""Wire types of uploads by signed links, of the search for checkpoints, and of copies.

Uploads and the search came with SDK 0.39, copies with 0.38.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from tuneserve_client.wire import types
from tuneserve_client.wire.body import Id, Metadata, Request, Response

_Time = Annotated[AwareDatetime, Field(strict=False)]


class UploadStartRequest(Request):
    base_model: str = Field(max_length=256, description="The base model it was trained on.")
    lora_config: types.LoraConfig = Field(description="The rank and the targets of the adapter.")
    destination_project_id: str | None = Field(default=None, max_length=256)


class UploadStartResponse(Response):
    upload_id: str
    urls: dict[str, str] = Field(
        description="A signed link for each file: send the file with `PUT`, without a key."
    )
    expires: datetime = Field(description="The time until which a `PUT` may begin.")


class UploadFinishRequest(Request):
    upload_id: Id


class UploadFinishResponse(Response):
    tinker_path: str


class UploadedFile(Response):
    size_bytes: int


class CheckpointSearchOwner(Request):
    """The owner of the searched checkpoints.

    A tenant can search its own checkpoints only, so `own` and `accessible` mean the same, and
    `user` finds something only if the tenant is among `owner_urns`.
    """

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Annotated[str, Field(max_length=256)]] = Field(default=[], max_length=10)


class CheckpointSearchCursor(Request):
    """The place where a page ends."""

    model_config = ConfigDict(extra="ignore")
    last_created_at: _Time
    last_checkpoint_uuid: Annotated[str, Field(max_length=64)]


_Names = list[Annotated[str, Field(max_length=256)]]


class CheckpointSearchRequest(Request):
    project_ids: _Names | None = Field(default=None, max_length=200)
    user_metadata: Metadata = Field(default={}, description="Entries that must all be equal.")
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: CheckpointSearchOwner = CheckpointSearchOwner()
    base_models: _Names | None = Field(
        default=None, max_length=200, description="An empty list finds nothing."
    )
    limit: int = Field(default=50, ge=1, le=200)
    cursor: CheckpointSearchCursor | None = Field(
        default=None, description="The `next_cursor` of the page before."
    )


class NextCheckpoints(Response):
    """The place where the next page starts."""

    last_created_at: datetime
    last_checkpoint_uuid: str


class CheckpointSearchResponse(Response):
    checkpoints: list[types.CheckpointResponse] = Field(description="Newest first.")
    next_cursor: NextCheckpoints | None = Field(
        default=None, description="Send it as `cursor` for the next page, if there is one."
    )


class CopyWeightsRequest(Request):
    source_path: str = Field(description="A checkpoint of the caller, or a published one.")
    destination_project_id: str | None = Field(default=None, max_length=256)
    ttl_seconds: int | None = None
    session_id: str | None = Field(default=None, description="Refused: a copy has no session.")
    model_seq_id: int | None = Field(default=None, description="Refused, as `session_id`.")
    weights_access_token: str | None = Field(default=None, max_length=4096)


class CopyWeightsResponse(Response):
    tinker_path: str
