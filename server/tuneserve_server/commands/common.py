"""The conversion of wire types into the commands of jobs: it resolves names and checks numbers.

A ``UserError`` names the field, its value, the limit and what to do.
"""

import secrets
import time
from dataclasses import dataclass, replace

from tuneserve_client.wire import types
from tuneserve_client.wire.body import MAX_INT32, MAX_INT64
from tuneserve_engine.adapters import kinds
from tuneserve_engine.adapters.kinds.lora import Lora
from tuneserve_engine.adapters.kinds.osft import RATIO
from tuneserve_engine.core.adapter import (
    AdamwParams,
    AdapterConfig,
    BaseModelInfo,
    check_adam_params,
)
from tuneserve_engine.core.errors import UserError, shown_number
from tuneserve_engine.core.jobs import LoadWeights, SaveWeights
from tuneserve_engine.core.records import (
    INFLIGHT,
    CheckpointKind,
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
)
from tuneserve_engine.store.files import new_file_id
from tuneserve_server.base_models import is_same
from tuneserve_server.checkpoint_names import check_name
from tuneserve_server.dependencies import Caller
from tuneserve_server.errors import ModelUnavailable

TTL_S = (3600, 315_360_000)  # one hour, ten years: what the SDK promises
_ADAPTER = "adapter"  # the entry of user_metadata that holds the adapter's kind
_MAX_METADATA_BYTES = 64 * 1024
_MAX_RECIPIENTS = 32
_FLOAT_BYTES = 4
_TRAINING_ARRAYS = 3  # weights and two moments


def new_seed() -> int:
    """Return a seed for a request without one; it is stored with the job and stays the same."""
    return secrets.randbits(63)


def checked_seed(seed: int | None) -> int:
    if seed is None:
        return new_seed()
    if not 0 <= seed <= MAX_INT64:
        raise UserError(f"seed is {shown_number(seed)}; it must be 0 to 2^63 - 1")
    return seed


def metadata(given: dict[str, str] | None) -> dict[str, str]:
    size = _bytes_of(given)
    if size > _MAX_METADATA_BYTES:
        raise UserError(
            f"user_metadata has {size} bytes; the limit is {_MAX_METADATA_BYTES}; shorten it"
        )
    return given or {}


def check_session_metadata(request: types.CreateSessionRequest, limit: int) -> None:
    """Raise ``UserError`` if a session's texts have more than ``limit`` bytes together."""
    names = (request.display_name, request.project_id, request.sdk_version)
    size = _bytes_of(request.user_metadata)
    size += sum(len((text or "").encode()) for text in (*request.tags, *names))
    if size > limit:
        raise UserError(
            f"the tags, the names and the user_metadata of this session have {size} bytes; the "
            f"limit is {limit} (max_session_metadata_bytes); shorten them"
        )


def _bytes_of(given: dict[str, str] | None) -> int:
    return sum(len(text.encode()) for pair in (given or {}).items() for text in pair)


def check_optimizer(config: types.OptimizerConfig | None) -> None:
    """Raise ``UserError`` for any optimizer but adamw; an absent config means adamw.

    The vendor's page about ``dimuon`` leaves out how it computes the matrix sign:
    https://tinker-docs.thinkingmachines.ai/tinker/api-reference/types/dimuonparams/
    """
    if config is not None and config.type == "dimuon":
        raise UserError(
            "optimizer_config.type is 'dimuon', whose rule is not public: its matrix-sign "
            "iterations and its normalization are the vendor's constants; leave optimizer_config "
            "out to train with 'adamw'"
        )
    if config is not None and config.type != "adamw":
        raise UserError(
            "optimizer_config.type is not an optimizer of this server, which has only 'adamw'; "
            "leave optimizer_config out"
        )


async def adapter_config(
    caller: Caller, base_model: str, request: types.CreateModelRequest
) -> AdapterConfig:
    """Return the adapter that a client asked for, with a new seed if the client named none.

    Raises ``UserError``, and ``ModelUnavailable`` for a kind that needs a decomposition while no
    worker has reported the base model's shapes.
    """
    lora = request.lora_config or types.LoraConfig()
    asked = _asked_adapter(request)
    kind = kinds.kind_named(asked.kind)
    info = await caller.served.info(base_model)
    max_rank = info.max_rank if info else MAX_INT32  # then the first worker refuses a rank too high
    rank = lora.rank if asked.rank is None else asked.rank
    # Kinds with a decomposition take more memory than others of the same rank: ``kinds.validated``
    # refuses them, with the arithmetic in its message.
    most = MAX_INT32 if kind.needs_decomposition else max_rank
    if RATIO not in asked.options and not 1 <= rank <= most:
        field = "lora_config.rank" if asked.rank is None else "adapter.rank"
        raise UserError(
            f"{field} is {shown_number(rank)}; this server takes 1 to {max_rank} for {base_model!r}"
        )
    config = AdapterConfig(
        rank=rank,
        alpha=caller.settings.lora_alpha,
        seed=checked_seed(lora.seed),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        kind=asked.kind,
        options=asked.options,
    )
    shapes = dict(info.target_shapes) if info else {}
    if kind.needs_decomposition and not shapes:
        raise ModelUnavailable(
            f"no worker of this release has served {base_model!r} yet, so it is not known how many "
            f"directions its weights have, which {kind.name} depends on; send the request again "
            "when a worker is ready"
        )
    return kinds.validated(config, shapes, max_rank)


@dataclass(frozen=True)
class _AdapterChoice:
    """A kind of adapter, its options, and its rank if the request gives one with them."""

    kind: str
    options: dict[str, str]
    rank: int | None = None


def _asked_adapter(request: types.CreateModelRequest) -> _AdapterChoice:
    """Return the choice in the field ``adapter``, or else in the metadata.

    Any SDK can send metadata.
    """
    user_metadata = request.user_metadata or {}
    adapter = request.adapter
    if adapter is None:
        kind = user_metadata.get(_ADAPTER)
        if kind is None:
            return _AdapterChoice(Lora.name, {})
        if "rank" in user_metadata:
            raise UserError(
                f"user_metadata asks for an adapter of kind {kind[:64]!r} and has an entry rank, "
                f"{user_metadata['rank'][:64]!r}; send the rank as lora_config.rank, and leave it "
                "out here"
            )
        return _AdapterChoice(kind, _options_among(user_metadata, kind))
    if _ADAPTER in user_metadata:
        raise UserError(
            f"adapter is {adapter.kind!r}, and user_metadata has an entry adapter, "
            f"{user_metadata[_ADAPTER][:64]!r}; each asks for a kind of adapter: leave one out"
        )
    sent = adapter.model_dump(exclude={"kind", "rank"}, exclude_none=True)
    options = {name: _plain(str(value)) for name, value in sent.items()}
    if adapter.rank is not None and RATIO in options:
        raise UserError(
            f"adapter.rank is {shown_number(adapter.rank)} and adapter.{RATIO} {options[RATIO]}; "
            "each says how many directions are trained: leave one out"
        )
    return _AdapterChoice(adapter.kind, options, adapter.rank)


def _options_among(user_metadata: dict[str, str], kind: str) -> dict[str, str]:
    """Return the entries that are options of the kind. Raises ``UserError`` for an unknown kind."""
    known = kinds.kind_named(kind).options
    return {name: _plain(user_metadata[name]) for name in known if name in user_metadata}


def _plain(value: str) -> str:
    """Write a number in one canonical form, because options are compared as text."""
    try:
        return str(float(value))
    except ValueError:
        return value


def check_adapter(checkpoint: CheckpointRecord, user_metadata: dict[str, str]) -> None:
    """Raise ``UserError`` if the metadata asks for another adapter than the checkpoint's.

    A model made from a checkpoint keeps the kind and the options of the checkpoint's adapter.
    """
    if _ADAPTER not in user_metadata:
        return
    kind, config = user_metadata[_ADAPTER], checkpoint.config
    asked, kept = {_ADAPTER: kind}, {_ADAPTER: config.kind}
    if kind == config.kind:
        asked, kept = _options_among(user_metadata, kind), dict(config.options)
    for name, value in asked.items():
        if value != kept.get(name):
            raise UserError(
                f"user_metadata asks for {name} {value[:64]!r}; {checkpoint.key} has "
                f"{kept.get(name, 'none')!r}, and so does every model made from it; leave {name} "
                "out"
            )


def adam_params(request: types.OptimStepRequest) -> AdamwParams:
    """Return the hyper-parameters of one step. Raises ``UserError`` for one out of range."""
    if request.adam_params is None:
        raise UserError(
            "adam_params is missing; the optimizer of this model is adamw: send its parameters in "
            "adam_params"
        )
    sent = request.adam_params
    params = AdamwParams(
        learning_rate=sent.learning_rate,
        beta1=sent.beta1,
        beta2=sent.beta2,
        eps=sent.eps,
        weight_decay=sent.weight_decay,
        grad_clip_norm=max(sent.grad_clip_norm, 0.0),  # on the wire, <= 0 means no clipping
    )
    check_adam_params(params)
    return params


def checked_ttl(ttl_s: int | None, now_s: float) -> float | None:
    """Return the expiry in unix seconds, or None for no expiry."""
    if ttl_s is None:
        return None
    if not TTL_S[0] <= ttl_s <= TTL_S[1]:
        raise UserError(
            f"ttl_seconds is {shown_number(ttl_s)}; it must be {TTL_S[0]} (an hour) to {TTL_S[1]} "
            "(ten years), or absent for no expiry"
        )
    return now_s + ttl_s


def new_checkpoint(
    model: ModelRecord,
    kind: CheckpointKind,
    request: types.SaveRequest,
    user_metadata: dict[str, str] | None = None,
) -> CheckpointRecord:
    """Return the record that a save will make visible."""
    name = request.path
    if name is None:
        raise UserError("path is missing; send the checkpoint's name as path")
    check_name("path", name)
    now_s = time.time()
    return CheckpointRecord(
        key=f"tinker://{model.key}/{kind.value}/{name}",
        tenant=model.tenant,
        parent=model.key,
        kind=kind,
        name=name,
        file_id=new_file_id(),
        base_model=model.base_model,
        config=model.config if kind is CheckpointKind.TRAINING else kinds.exported(model.config),
        created_s=now_s,
        expires_s=checked_ttl(request.ttl_seconds, now_s),
        user_metadata=metadata(user_metadata),
    )


def save_training(model: ModelRecord, request: types.SaveWeightsRequest) -> SaveWeights:
    checkpoint = new_checkpoint(model, CheckpointKind.TRAINING, request, request.user_metadata)
    return SaveWeights(checkpoint.kind, checkpoint.file_id, checkpoint, overwrite=request.overwrite)


def save_for_sampler(
    model: ModelRecord, request: types.SaveWeightsForSamplerRequest
) -> SaveWeights:
    """Return the save of a named checkpoint, or of a sampling session on the current weights."""
    is_inflight = request.kind == "inflight"
    if request.path is not None and is_inflight:
        raise UserError(
            "kind is inflight and path is set; inflight weights are replaced by the next inflight "
            "save, so they have no name: leave path out, or save a snapshot under this name"
        )
    if request.path is not None:
        checkpoint = new_checkpoint(model, CheckpointKind.SAMPLER, request, request.user_metadata)
        return SaveWeights(checkpoint.kind, checkpoint.file_id, checkpoint)
    if request.sampling_session_seq_id is None:
        raise UserError(
            "path and sampling_session_seq_id are both missing; send path to save the weights "
            "under a name, or sampling_session_seq_id to sample from them"
        )
    session_key = sampler_key(model.parent, request.sampling_session_seq_id)
    sampler = SamplerRecord(
        key=f"{model.key}{INFLIGHT}" if is_inflight else session_key,
        tenant=model.tenant,
        parent=model.parent,
        base_model=model.base_model,
        created_s=time.time(),
        file_id=new_file_id(),
        model_id=model.key,
        used_s=time.time(),
    )
    assert sampler.file_id is not None
    return SaveWeights(
        *(CheckpointKind.SAMPLER, sampler.file_id),
        sampler=sampler,
        session_key=session_key if is_inflight else "",
    )


def save_external(model: ModelRecord, request: types.SaveWeightsExternalRequest) -> SaveWeights:
    recipients = tuple(request.age_encryption_recipients or ())
    if len(recipients) > _MAX_RECIPIENTS:
        raise UserError(
            f"age_encryption_recipients has {len(recipients)} keys; the limit is {_MAX_RECIPIENTS}"
        )
    for index, recipient in enumerate(recipients):
        if not recipient.startswith("age1") or len(recipient) > 128:
            raise UserError(
                f"age_encryption_recipients[{index}] is not an age public key (age1...)"
            )
    checkpoint = new_checkpoint(model, CheckpointKind.EXTERNAL, request)
    return SaveWeights(checkpoint.kind, checkpoint.file_id, checkpoint, age_recipients=recipients)


def with_size(save: SaveWeights, config: AdapterConfig, info: BaseModelInfo | None) -> SaveWeights:
    """Return the save with an estimated file size, which counts until the worker reports it."""
    shapes = dict(info.target_shapes) if info else {}
    if not shapes:
        return save
    training = save.kind is CheckpointKind.TRAINING
    config = config if training else kinds.exported(config)
    numbers = kinds.parameters(kinds.kind_of(config), config, shapes)
    size = numbers * _FLOAT_BYTES * (_TRAINING_ARRAYS if training else 1)
    return replace(
        save,
        checkpoint=save.checkpoint and replace(save.checkpoint, size_bytes=size),
        sampler=save.sampler and replace(save.sampler, size_bytes=size),
    )


def sampler_key(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def check_base_model(checkpoint: CheckpointRecord, base_model: str) -> None:
    """Raise ``UserError`` unless the checkpoint was trained on this base model."""
    trained_on = checkpoint.base_model
    if not is_same(trained_on, base_model):
        raise UserError(
            f"{checkpoint.key} was trained on {trained_on!r} and cannot be used with "
            f"{base_model!r}, which its adapter does not fit; ask for {trained_on!r}"
        )


def load(checkpoint: CheckpointRecord, *, optimizer: bool, creates: bool = False) -> LoadWeights:
    """Return the load into an existing model or, if ``creates``, into a new model.

    A new model gets the checkpoint's adapter config.
    """
    config = checkpoint.config if creates else None
    return LoadWeights(checkpoint.file_id, checkpoint.key, optimizer, config)
