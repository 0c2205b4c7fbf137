"""Wire types: the one definition of every JSON body.

Requests ignore unknown fields, because newer SDKs send the defaults of their own fields; the server
refuses those that look misspelt. Types are strict (no ``"1"`` for 1), and numbers are finite.
Fields that the SDK leaves out when they are None are optional here. Protobuf bodies are defined in
``proto/wire.proto``.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tuneserve_client.wire.body import (
    MAX_INT32,
    MAX_INT64,
    Id,
    Metadata,
    ModelSeq,
    Request,
    Response,
    Seq,
    UnknownField,
)

# --- service -------------------------------------------------------------------------------------


class CreateSessionRequest(Request):
    tags: list[Annotated[str, Field(max_length=256)]] = Field(default=[], max_length=256)
    user_metadata: Metadata | None = None
    sdk_version: str = Field(default="", max_length=64)
    project_id: str | None = Field(default=None, max_length=256)
    display_name: str | None = Field(default=None, max_length=1024)


class CreateSessionResponse(Response):
    session_id: str
    info_message: str | None = Field(
        default=None, description="Base models whose workers still compile ahead."
    )
    warning_message: str | None = Field(
        default=None,
        description="Reasons for which requests may wait or fail: no worker, programs that cannot "
        "be compiled, a budget or a disk that is nearly used up.",
    )


class SessionHeartbeatRequest(Request):
    session_id: Id


class SessionHeartbeatResponse(Response):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Request):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Request):
    reason: FinishReason
    detail: str | None = None


class TelemetryResponse(Response):
    status: Literal["accepted"] = "accepted"


class SupportedModel(Response):
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class ServerCapabilitiesResponse(Response):
    supported_models: list[SupportedModel]


class ServedBaseModel(Response):
    name: str
    revision: str | None = Field(
        default=None,
        description="The commit of a base model from the hub. A store has one commit per name.",
    )
    workers: int = Field(description="The number of workers that serve the base model now.")
    samplers: int | None = Field(
        default=None, description="The number of these that only sample, if any."
    )
    warming: str | None = Field(
        default=None,
        description="The progress of compiling ahead, until it is done. Requests are accepted "
        "meanwhile.",
    )
    failing: str | None = Field(
        default=None,
        description="The number of programs that cannot be compiled, if any. Requests that need "
        "one fail.",
    )
    architecture: str
    context_length: int
    max_rank: int


class HealthResponse(Response):
    status: Literal["ok"] = "ok"
    worker: Literal["ready", "absent"] = Field(
        description="`ready` if a worker has loaded a base model and takes models, else `absent`."
    )
    base_model: str
    warming: str | None = None
    failing: str | None = None
    architecture: str | None = None
    context_length: int | None = None
    max_rank: int | None = None
    base_models: list[ServedBaseModel]
    store: Literal["sqlite", "redis"]
    durability: Literal["always", "asserted"] = Field(
        description="`always`: the store was found to write every accepted request to disk. "
        "`asserted`: the operator says so."
    )
    store_check: Literal["unchecked", "checking", "sound", "damaged"] = Field(
        default="unchecked",
        description="The result of checking the SQLite store's file. While it is `damaged`, "
        "nothing new is accepted.",
    )
    store_damage: str | None = Field(
        default=None, description="The damage, and how the operator can repair it."
    )
    disk: Literal["ok", "full"] = Field(
        description="`full` while less than `min_free_bytes` is free: new requests get a 503."
    )
    files: Literal["ok", "kept"] = Field(
        default="ok",
        description="`kept` while unused files are kept until the operator decides.",
    )
    files_kept: str | None = Field(
        default=None, description="The reason why unused files are kept, and what to do."
    )
    keys_required: bool = False


# --- models --------------------------------------------------------------------------------------

_KIND = "The kind of adapter."


class LoraConfig(Request):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdapterSpec(Request):
    """The adapter to train. Options that its kind does not have are refused."""

    kind: str = Field(max_length=64, description="`lora`, `rslora` or `osft`.")
    rank: int | None = Field(
        default=None, description="Without this field, `lora_config.rank` applies."
    )
    unfreeze_ratio: float | None = Field(
        default=None,
        description="For `osft`, in place of a rank: the share of each weight's singular "
        "directions that is trained, above 0 and below 1.",
    )
    form: str | None = Field(
        default=None,
        description="For `osft`: the arrays that are trained, `factors` (the default), "
        "`short_fixed` or `core`.",
    )

    def unknown_fields(self) -> list[UnknownField]:
        """Return an empty list: no sent field is ignored."""
        return []


class OptimizerConfig(Request):
    type: str = "adamw"


class SessionKey(Request):
    """The key of a request that creates a model."""

    session_id: Id
    model_seq_id: Annotated[int, Field(ge=0, le=MAX_INT32)]


class CreateModelRequest(SessionKey):
    base_model: str
    user_metadata: Metadata | None = Field(
        default=None,
        description="Stored unchanged. An entry `adapter` names the kind of adapter, like the "
        "field `adapter`. Entries named like options of that kind set these options.",
    )
    lora_config: LoraConfig | None = None
    adapter: AdapterSpec | None = Field(
        default=None,
        description="The adapter to train: `lora`, unless this field or `user_metadata` names "
        "another kind.",
    )
    optimizer_config: OptimizerConfig | None = None


class GetInfoRequest(Request):
    model_id: Id


class ModelData(Response):
    arch: str | None = None
    model_name: str
    tokenizer_id: str | None = None


class AdamwConfig(Response):
    type: Literal["adamw"] = "adamw"


class GetInfoResponse(Response):
    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool = Field(default=True, description="True for adapters of every kind.")
    lora_rank: int
    adapter: str = Field(default="lora", description=_KIND)
    base_model_revision: str | None = Field(
        default=None, description="The commit of a base model from the hub."
    )
    optimizer_config: AdamwConfig = AdamwConfig()


# --- training ------------------------------------------------------------------------------------


class ModelKey(Request):
    """The key of a request to a model: its place in the model's order."""

    model_id: Id
    seq_id: ModelSeq


class AdamParams(Request):
    """The hyper-parameters of one step, as in ``torch.optim.AdamW``."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(ModelKey):
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = Field(
        default=None,
        description="Sent in place of `adam_params` for other optimizers, which are not supported.",
    )


class FutureResponse(Response):
    """The answer to an accepted request; ``retrieve_future`` has the result."""

    request_id: str
    model_id: str | None = None


class FutureRetrieveRequest(Request):
    request_id: Id
    allow_metadata_only: bool = False


class SamplingTarget(Request):
    """One of the clients of a sampling session; the client that opened the session is 0."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0


class FuturesRetrieveRequest(Request):
    target: SamplingTarget
    prev_cursor: Seq = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: list[Id] = Field(
        default=[], description="Requests whose results the client has: the server drops them."
    )


class FinishedFuture(Response):
    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FailedFuture(Response):
    state: Literal["failed"] = "failed"
    request_id: str


class FuturesResponse(Response):
    """The requests that have ended since the cursor; ``retrieve_future`` has results and errors."""

    completions: list[FinishedFuture | FailedFuture]
    cursor: int


class CancelRequest(Request):
    request_id: Id


class NotReadyResponse(Response):
    """The body of the 408 that ends a poll: poll again."""

    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    queue_state_reason: str | None = None


# --- weights -------------------------------------------------------------------------------------


class SaveRequest(ModelKey):
    """The fields of every save. ``path`` is the checkpoint's name."""

    path: str | None = None
    ttl_seconds: int | None = None


class SaveWeightsRequest(SaveRequest):
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(SaveRequest):
    """A save for sampling: a checkpoint named by ``path``, or a numbered sampling session."""

    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: Metadata | None = None


class SaveWeightsExternalRequest(SaveRequest):
    age_encryption_recipients: list[str] | None = None


class LoadWeightsForm(Request):
    """The field that tells the two forms of ``load_weights`` apart.

    One form names a session, the other a model.
    """

    model_config = ConfigDict(extra="ignore")
    session_id: Any = None


_TOKEN = "Opens nothing here: this server issues no tokens. A published path needs none."


class LoadIntoRequest(ModelKey):
    """A ``load_weights`` into an existing model."""

    path: str
    optimizer: bool
    weights_access_token: str | None = Field(default=None, max_length=4096, description=_TOKEN)


class LoadNewRequest(SessionKey):
    """A ``load_weights`` that creates the model, shaped like the checkpoint."""

    path: str
    optimizer: bool
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = Field(default=None, max_length=4096, description=_TOKEN)


class WeightsInfoRequest(Request):
    tinker_path: str


class WeightsInfoResponse(Response):
    base_model: str
    is_lora: bool = True
    lora_rank: int
    adapter: str = Field(default="lora", description=_KIND)
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: AdamwConfig = AdamwConfig()


class ImportResponse(WeightsInfoResponse):
    """The checkpoint that was made from an imported adapter."""

    path: str


# --- sampling ------------------------------------------------------------------------------------


class CreateSamplingSessionRequest(Request):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionResponse(Response):
    sampling_session_id: str


class SamplerResponse(Response):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class JoinSamplingSessionRequest(Request):
    sampling_session_id: Id


CLIENT_SEQS = 10**9
"""The number of sequence numbers per client of a sampling session; the next client's follow."""


class JoinSamplingSessionResponse(Response):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class Chunk(Request):
    """A piece of a prompt. Only text is understood; other kinds keep their ``type``."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(Request):
    chunks: list[Chunk]


class SamplingParams(Request):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class IntTensor(Request):
    """Integers in row order, or in CSR layout if both index lists are given."""

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SamplingKey(Request):
    """The key of a sampling request, and the number of sequence ids that its answer needs."""

    sampling_session_id: Id
    seq_id: Seq
    num_samples: Any = 1


class SampleRequest(SamplingKey):
    num_samples: int = 1
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: IntTensor | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class SampleFutureResponse(FutureResponse):
    sample_sequence_ids: list[str]


# --- listings ------------------------------------------------------------------------------------


class Cursor(Response):
    offset: int
    limit: int
    total_count: int


class CheckpointResponse(Response):
    checkpoint_id: str = Field(description="<kind>/<name>")
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    base_model: str | None = None
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointsResponse(Response):
    checkpoints: list[CheckpointResponse]
    cursor: Cursor | None = None


class SessionsResponse(Response):
    sessions: list[str]


class SessionResponse(Response):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class TtlRequest(Request):
    ttl_seconds: int | None = Field(description="Seconds from now; null removes the expiry.")


class ExternalWeightsUrlsResponse(Response):
    urls: dict[str, str] = Field(description="A signed download link for each file.")
    expires: datetime


class ArchiveUrlResponse(Response):
    url: str = Field(
        description="A signed download link for a tar archive: the adapter's two files in PEFT's "
        "layout, then the empty file `checkpoint_complete`."
    )
    expires: datetime


class Failure(Response):
    """The body of every answer that is not 2xx, except the 408 of a poll."""

    detail: str
    code: str


# --- usage ---------------------------------------------------------------------------------------


class UsageTotals(Response):
    requests: int = Field(description="The number of requests that ran and have ended.")
    device_ms: float
    trained_tokens: int
    prompt_tokens: int
    sampled_tokens: int
    padded_tokens: int = Field(description="The number of padding tokens computed in addition.")
    flops: float = Field(description="Model FLOPs; 0 if the size of the base model is not known.")


class ModelUsage(UsageTotals):
    name: str = Field(description="The id of a model, or the name of a sampled base model.")


class BudgetResponse(Response):
    limit_device_ms: float = Field(description="The device time that the tenant has per day (UTC).")
    used_device_ms: float = Field(description="The device time used since the day began.")
    resets: datetime


class UsageResponse(Response):
    tenant: str
    total: UsageTotals
    by_model: list[ModelUsage]
    budget: BudgetResponse | None = None


class RequestTimings(Response):
    total_ms: float = Field(
        description="From acceptance to the stored result: the sum of `held_ms`, `queue_ms` and "
        "`run_ms`."
    )
    held_ms: float = Field(
        description="The wait for an earlier request or a worker, and the time to store the result."
    )
    queue_ms: float = Field(description="The wait at the worker before the request began.")
    run_ms: float = Field(description="From the beginning of the request to its result.")
    pack_ms: float = Field(
        default=0.0, description="The part of `run_ms` before the first batch had the device."
    )
    device_ms: float = Field(description="The request's share of the device time during `run_ms`.")
    transfer_ms: float = Field(
        default=0.0,
        description="The part of `run_ms` after the last batch, in which the result is made.",
    )


class RequestCost(Response):
    trained_tokens: int
    prompt_tokens: int
    sampled_tokens: int
    padded_tokens: int
    flops: float
    behind: int = Field(
        default=0, description="The number of requests that began while this one was queued."
    )
    behind_own: int = Field(default=0, description="The tenant's own requests among `behind`.")
    others: int = Field(description="The number of other requests in the first batch.")


class RequestResponse(Response):
    request_id: str
    kind: str
    status: Literal["held", "ready", "done", "failed", "expired"]
    timings: RequestTimings | None = None
    cost: RequestCost | None = None
