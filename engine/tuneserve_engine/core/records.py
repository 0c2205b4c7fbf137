"""The records that the store keeps beside the log. Plain data; ``key`` is unique per type.

``tenant`` owns the record; ``parent`` is the record that it is listed under (a session's models and
samplers and custom losses, a model's checkpoints). Times are unix seconds.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tuneserve_engine.core.adapter import AdapterConfig


class ModelStatus(StrEnum):
    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"  # its creation failed
    LOST = "lost"  # its recovery points cannot be read; only its checkpoints remain
    ENDED = "ended"  # its session finished or expired


class Scope(StrEnum):
    """The permissions of a key."""

    TRAIN = "train"
    SAMPLE = "sample"
    ADMIN = "admin"  # look at every tenant's work, and change nothing


INFLIGHT = ":inflight"
"""The end of the key of the record that a model's inflight sampling sessions share."""


class CheckpointKind(StrEnum):
    """The middle part of a ``tinker://`` path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


@dataclass(frozen=True)
class SessionRecord:
    key: str
    tenant: str
    created_s: float
    last_seen_s: float
    ended: str | None = None  # the reason, once ended: success, errored, interrupted, expired
    display_name: str | None = None
    project_id: str | None = None
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, str] = field(default_factory=dict)
    sdk_version: str = ""
    parent: str = ""


@dataclass(frozen=True)
class ModelRecord:
    key: str  # <session>:train:<n>
    tenant: str
    parent: str  # session
    base_model: str
    config: AdapterConfig
    created_s: float
    last_request_s: float
    status: ModelStatus = ModelStatus.CREATING
    diverged: bool = False  # a replay gave another result than the one that the client has
    user_metadata: dict[str, str] = field(default_factory=dict)
    ended: str | None = None  # the reason for which its session has ended
    project_id: str | None = None  # its session's, which may be forgotten before the model


@dataclass(frozen=True)
class RunEventRecord:
    """Something that a training loop, or a person, noted about a model."""

    key: str  # <model>:event:<id>
    tenant: str
    parent: str  # model
    kind: str
    step: int
    created_s: float
    data: str  # JSON


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session; ``file_id`` None samples the base model.

    The inflight sampling sessions of a model have no weights of their own. They share those of the
    record that ``target`` names, which each inflight save of the model replaces.
    """

    key: str  # <session>:sample:<n>
    tenant: str
    parent: str  # session
    base_model: str
    created_s: float
    model_path: str | None = None
    file_id: str | None = None
    clients: int = 0  # clients that joined the session after the client that opened it
    model_id: str = ""  # the saved model, if this is an unnamed save
    size_bytes: int = 0  # of its file
    used_s: float = 0.0  # when a client last sampled from it, or polled for a sample
    target: str = ""  # the record with the weights, if they are inflight

    @property
    def is_save(self) -> bool:
        """Whether this is an unnamed save: it owns the weights, which count as a checkpoint."""
        return self.file_id is not None and self.model_path is None

    @property
    def is_target(self) -> bool:
        """Whether this is no session, but the weights that inflight sessions share."""
        return self.key.endswith(INFLIGHT)


@dataclass(frozen=True)
class CustomLossRecord:
    """A custom loss of a session: its checked graph, or the error for which it was refused."""

    key: str  # <session>:loss:<n>
    tenant: str
    parent: str  # session
    created_s: float
    graph: str = ""  # see ``custom_loss.graph``
    error: str = ""


@dataclass(frozen=True)
class CheckpointRecord:
    key: str  # tinker://<model>/<kind>/<name>
    tenant: str
    parent: str  # model
    kind: CheckpointKind
    name: str
    file_id: str
    base_model: str
    config: AdapterConfig
    created_s: float
    size_bytes: int = 0
    public: bool = False
    expires_s: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    uploaded: bool = False  # an external checkpoint that was uploaded: a LoRA adapter in our format
    project_id: str | None = None  # of a checkpoint without a model; others have their session's

    @property
    def is_export(self) -> bool:
        """Whether the checkpoint's files are for download only."""
        return self.kind is CheckpointKind.EXTERNAL and not self.uploaded

    def has_expired(self, now_s: float) -> bool:
        """Return whether the checkpoint counts as deleted, even if no sweep has removed it yet."""
        return self.expires_s is not None and self.expires_s <= now_s


@dataclass(frozen=True)
class DirectoryRecord:
    """A directory that all processes of a deployment share, known by a mark in it.

    The record has no tenant.
    """

    key: str
    mark: str
    tenant: str = ""
    parent: str = ""


@dataclass(frozen=True)
class ProcessRecord:
    """An API process; ``seen_s`` is when it last reported to be alive."""

    key: str
    seen_s: float
    tenant: str = ""
    parent: str = ""


@dataclass(frozen=True)
class KeyRecord:
    """An API key without its secret.

    A revoked key's record is kept, because it matters whether a key has ever existed.
    """

    key: str  # the public id
    tenant: str
    parent: str  # the tenant's record
    digest: str  # HMAC of the secret, in hex
    scopes: list[Scope]
    created_s: float
    name: str = ""
    expires_s: float | None = None
    revoked_s: float | None = None

    def is_valid(self, now_s: float) -> bool:
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)


@dataclass(frozen=True)
class TenantRecord:
    """The limits that differ for one tenant; None means the value of the settings."""

    key: str
    tenant: str  # equal to ``key``: a tenant owns its own record
    created_s: float
    parent: str = ""
    weight: float | None = None
    max_jobs: int | None = None
    max_models: int | None = None
    max_checkpoints: int | None = None
    max_checkpoint_bytes: int | None = None
    device_s_a_day: float | None = None


@dataclass(frozen=True)
class AuditRecord:
    """An event of the audit log: what was done to the things of a tenant, and by which key."""

    key: str
    tenant: str
    parent: str  # the day in UTC, as 2026-11-29
    event: str  # <resource>_<action>
    created_s: float
    details: dict[str, str] = field(default_factory=dict)


Record = (
    SessionRecord
    | ModelRecord
    | RunEventRecord
    | SamplerRecord
    | CustomLossRecord
    | CheckpointRecord
    | DirectoryRecord
    | ProcessRecord
    | KeyRecord
    | TenantRecord
    | AuditRecord
)
RECORD_TYPES: dict[str, type[Record]] = {
    "session": SessionRecord,
    "model": ModelRecord,
    "run_event": RunEventRecord,
    "sampler": SamplerRecord,
    "custom_loss": CustomLossRecord,
    "checkpoint": CheckpointRecord,
    "directory": DirectoryRecord,
    "process": ProcessRecord,
    "key": KeyRecord,
    "tenant": TenantRecord,
    "audit": AuditRecord,
}
RECORD_NAME: dict[type, str] = {record_type: name for name, record_type in RECORD_TYPES.items()}


@dataclass(frozen=True)
class Update:
    """A change of some fields of a stored record to plain values.

    ``entries`` are changes inside fields that map texts to texts, such as ``user_metadata``; None
    removes an entry. The update is a no-op if the record is missing.
    """

    record: str  # a key of RECORD_TYPES
    key: str
    changes: dict[str, Any]
    entries: dict[str, dict[str, str | None]] = field(default_factory=dict)
