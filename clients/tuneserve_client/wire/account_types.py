"""Wire types of accounts: keys and tokens, the audit log, usage by day, the search of sessions."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from tuneserve_client.wire.body import Id, Metadata, Request, Response

# --- keys and tokens -----------------------------------------------------------------------------


class AuthTokenResponse(Response):
    jwt: str = Field(description="A token that stands for the key until it expires.")


class KeyOrganization(Response):
    name: str = Field(description="The tenant.")


class KeyUser(Response):
    email: str = Field(description="The label of the key, else its id: keys have no addresses.")


class KeyDetails(Response):
    org_details: KeyOrganization
    user_details: KeyUser


class OwnKeyResponse(Response):
    key_id: int = Field(description="The key's public id, read as a number of base 36.")
    name: str
    note: str
    details: KeyDetails


# --- the audit log -------------------------------------------------------------------------------


class AuditLogEntry(Response):
    timestamp: datetime
    event: str = Field(description="`<resource>_<action>`, as `checkpoint_delete`.")
    event_details: dict[str, str] = Field(
        description="The `tenant`, the `key_id` of the key that did it (absent in open mode and "
        "for the operator), and more, by the event."
    )
    model_id: str | None = Field(default=None, description="The model of a checkpoint.")
    tinker_path: str | None = Field(default=None, description="The path of a checkpoint.")
    purpose: str | None = Field(default=None, description="The purpose of reading a checkpoint.")


class AuditLogResponse(Response):
    entries: list[AuditLogEntry] = Field(description="The newest first, 5,000 at most.")


# --- usage, in the form of bills -----------------------------------------------------------------


class BillingInfo(Response):
    type: Literal["training", "sampling_prefill", "sampling_sample"]
    token_count: int
    cached: bool | None = Field(
        default=None, description="False for all prompts: the server counts none as cached."
    )


class BillingUsageEvent(Response):
    bucket_start: datetime = Field(description="The start of a day in UTC.")
    bucket_end: datetime
    base_model: str | None = Field(default=None, description="Absent if the model is forgotten.")
    user_id: str = Field(description="The tenant.")
    session_id: str | None = Field(default=None, description="Absent for samples.")
    project_id: str | None = None
    event_info: BillingInfo


class BillingUsageSession(Response):
    user_metadata: dict[str, str]


class BillingUsageResponse(Response):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(
        description="The sessions of `data` that are not forgotten, by their ids."
    )


class CheckpointStorage(Response):
    project_id: str | None = None
    org_user_urn: str = Field(description="The tenant.")
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float = Field(description="In units of 10^9 bytes.")


class CheckpointStorageResponse(Response):
    data: list[CheckpointStorage]


# --- sessions ------------------------------------------------------------------------------------


class SearchOwner(Request):
    type: Literal["own", "accessible", "user"] = Field(
        default="own",
        description="`accessible`: all tenants for an admin key, else the caller. `user`: those "
        "of `owner_urns` whose sessions the caller may see.",
    )
    owner_urns: list[Id] = Field(default=[], max_length=10, description="Names of tenants.")


class SessionStatusQuery(Request):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(
        default=None, min_length=1
    )


class SessionSearchCursor(Request):
    # A text in JSON, whatever the strictness of the other fields.
    last_created_at: Annotated[datetime, Field(strict=False)]
    last_session_id: Id


class SessionSearchRequest(Request):
    session_id: Id | None = Field(
        default=None,
        description="With `display_name`, a session that matches either of the two is found.",
    )
    project_ids: list[Id] | None = Field(default=None, max_length=256)
    user_metadata: Metadata = Field(default={}, description="Every pair must be the session's.")
    display_name: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Each word is part of the session's name, in any case."
    )
    owner: SearchOwner = SearchOwner()
    statuses: list[SessionStatusQuery] | None = Field(default=None, min_length=1, max_length=16)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SessionSearchCursor | None = Field(
        default=None, description="The `next_cursor` of the page before."
    )


class ClientFinishReason(Response):
    type: str


class SessionStatus(Response):
    type: Literal["active", "client_finished"]
    reason: ClientFinishReason | None = None


class SessionSummary(Response):
    session_id: str
    created_at: datetime
    owner: str = Field(description="The tenant.")
    project_id: str = Field(description="Empty for a session without a project.")
    status: SessionStatus | None = Field(
        default=None, description="Absent for a session that fell silent."
    )
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str]
    checkpoint_storage_bytes: int


class SearchCursorResponse(Response):
    last_created_at: datetime
    last_session_id: str


class SessionSearchResponse(Response):
    sessions: list[SessionSummary] = Field(description="The newest first.")
    next_cursor: SearchCursorResponse | None = None


class SessionProjectRequest(Request):
    project_id: Id


class TraceExportResponse(Response):
    status: Literal["ready"] = "ready"
    url: str
