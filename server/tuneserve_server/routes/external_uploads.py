"""The routes of uploads by signed links: adapters trained elsewhere, as external checkpoints."""

import asyncio
import hashlib
import hmac
import time
from datetime import UTC, datetime
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from tuneserve_client.wire import checkpoint_types as wire
from tuneserve_client.wire.types import LoraConfig
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError, shown_number
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord
from tuneserve_server.access.limits import check_room
from tuneserve_server.cleanup.unnamed_saves import delete_saves, in_the_way
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import (
    Caller,
    CallerDep,
    SentJsonDep,
    Services,
    ServicesDep,
    reply,
)
from tuneserve_server.errors import (
    BadRequest,
    DiskFull,
    LinkInvalid,
    ModelUnavailable,
    TooManyRequests,
    UnknownEncoding,
    UnknownResource,
)
from tuneserve_server.http.openapi import fails, takes, takes_file
from tuneserve_server.routes.uploads import IdempotencyKey, origin_of, shapes_of
from tuneserve_server.transfer import upload_parts
from tuneserve_server.transfer.peft_upload import StoredAdapter
from tuneserve_server.transfer.upload_parts import UploadParts

router = APIRouter()

_NAME = "uploaded"
_GONE = (
    "this upload link is not valid or has expired, or its upload is finished; start another upload"
)


@router.post(
    "/external_weights_upload_start",
    response_model=wire.UploadStartResponse,
    openapi_extra=takes(wire.UploadStartRequest),
    responses=fails(BadRequest, DiskFull),
)
async def start_upload(
    request: Request,
    caller: CallerDep,
    sent: SentJsonDep,
    x_idempotency_key: IdempotencyKey = None,
) -> Response:
    """Begin the upload of an adapter in PEFT's layout: returns a signed link for each file.

    A retry with the same idempotency key returns the same upload.
    """
    asked = await sent.parsed(wire.UploadStartRequest)
    base_model = await caller.served.resolve(asked.base_model)
    config = await _announced(caller, base_model, asked.lora_config)
    caller.check_store()
    upload_id = origin_of(caller, "upload", x_idempotency_key)
    await check_room(caller.store, caller.settings.store_policy, caller.tenant, _path(upload_id))
    parts = await upload_parts.begin(
        *(caller.store, caller.tenant, upload_id, base_model, config),
        project_id=asked.destination_project_id,
        ttl_s=caller.settings.download_ttl_s,
    )
    expires_s = int(parts.expires_s)
    base_url = caller.settings.public_url or str(request.base_url)
    return reply(
        wire.UploadStartResponse(
            upload_id=upload_id,
            urls={
                member: _signed_url(caller, base_url, upload_id, member, expires_s)
                for member in upload_parts.PARTS
            },
            expires=datetime.fromtimestamp(expires_s, UTC),
        )
    )


@router.put(
    "/uploads/{upload_id}/{member}",
    response_model=wire.UploadedFile,
    openapi_extra=takes_file(),
    responses=fails(BadRequest, LinkInvalid, UnknownEncoding, TooManyRequests, DiskFull),
)
async def put_file(  # noqa: PLR0913 - the parts of the link
    upload_id: str,
    member: str,
    request: Request,
    services: ServicesDep,
    expires: int = 0,
    tenant: str = "",
    signature: str = "",
) -> Response:
    """Receive a file of an upload, from any client with its link; a file sent again replaces it."""
    expected = _signature(services.secret, upload_id, member, expires, tenant)
    is_signed = hmac.compare_digest(expected.encode(), signature.encode())
    if not is_signed or expires < time.time():
        raise LinkInvalid(_GONE)
    try:
        parts = await upload_parts.parts_of(services.store, tenant, upload_id)
    except UnknownResource:
        raise LinkInvalid(_GONE) from None
    part = next(each for each in (parts.config, parts.weights) if each.name == member)
    services.check_store()
    told = request.headers.get("content-length", "")
    await _check_room(services, tenant, part, int(told) if told.isdecimal() else 0)
    file_id, size = await services.imports.store_part(request, tenant, member)
    try:
        await _check_room(services, tenant, part, size)
        is_kept = await upload_parts.keep(services.store, part, file_id, size)
    except BaseException:
        await asyncio.to_thread(services.files.delete, file_id)
        raise
    # The clean-up would spare a young file, and files that are replaced again and again count
    # against no limit.
    await asyncio.to_thread(services.files.delete, part.file_id if is_kept else file_id)
    if not is_kept:
        raise LinkInvalid(_GONE)
    return reply(wire.UploadedFile(size_bytes=size))


@router.post(
    "/external_weights_upload_finish",
    response_model=wire.UploadFinishResponse,
    openapi_extra=takes(wire.UploadFinishRequest),
    responses=fails(BadRequest, UnknownResource, TooManyRequests, DiskFull, ModelUnavailable),
)
async def finish_upload(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Check the files of an upload, and make an external checkpoint of them.

    The checkpoint can be sampled from, and training can go on from its weights. If a file is
    refused, it can be sent again by its link.
    """
    upload_id = (await sent.parsed(wire.UploadFinishRequest)).upload_id
    try:
        if not await _is_finished(caller, upload_id):
            await _finish(caller, upload_id)
    except (UserError, UnknownResource):
        # The first of two such requests may just have ended, and have deleted the files.
        if not await _is_finished(caller, upload_id):
            raise
    return reply(wire.UploadFinishResponse(tinker_path=_path(upload_id)))


async def _is_finished(caller: Caller, upload_id: str) -> bool:
    known = await caller.store.get_record(CheckpointRecord, _path(upload_id))
    return known is not None and known.tenant == caller.tenant


async def _finish(caller: Caller, upload_id: str) -> None:
    parts = await upload_parts.parts_of(caller.store, caller.tenant, upload_id)
    parts.check_whole()
    caller.check_store()
    key = _path(upload_id)
    kept = await _checked_and_stored(caller, key, parts)
    await caller.record_event("checkpoint_import", tinker_path=key)
    stored = await caller.store.put_new_record(
        CheckpointRecord(
            key=key,
            tenant=caller.tenant,
            parent=upload_id,
            kind=CheckpointKind.EXTERNAL,
            name=_NAME,
            file_id=kept.file_id,
            base_model=parts.base_model,
            config=kept.config,
            created_s=time.time(),
            size_bytes=kept.size,
            uploaded=True,
            project_id=parts.config.project_id,
        )
    )
    superfluous = [parts.config.file_id, parts.weights.file_id]
    if stored.file_id != kept.file_id:  # the same upload was finished twice at once
        superfluous.append(kept.file_id)
    await upload_parts.forget(caller.store, parts)
    for file_id in superfluous:
        await asyncio.to_thread(caller.files.delete, file_id)


async def _announced(caller: Caller, base_model: str, asked: LoraConfig) -> AdapterConfig:
    """Return the announced adapter. Raises ``UserError`` for a rank that is not served."""
    info = await caller.served.info(base_model)
    if asked.rank < 1 or (info is not None and asked.rank > info.max_rank):
        raise UserError(
            f"lora_config.rank is {shown_number(asked.rank)}; this server takes 1 to "
            f"{info.max_rank if info else 'its max_rank'} for {base_model!r}"
        )
    return AdapterConfig(
        rank=asked.rank,
        alpha=caller.settings.lora_alpha,
        seed=commands.checked_seed(asked.seed),
        train_attn=asked.train_attn,
        train_mlp=asked.train_mlp,
        train_unembed=asked.train_unembed,
    )


async def _checked_and_stored(caller: Caller, key: str, parts: UploadParts) -> StoredAdapter:
    info = await shapes_of(caller, parts.base_model)
    place, ids = (caller.tenant, key), (parts.config.file_id, parts.weights.file_id)
    async with caller.imports.opened_parts(caller.tenant, *ids) as upload:
        adapter = await caller.imports.checked(upload, info, seed=parts.asked.seed)
        _check_announced(parts.asked, adapter.config)
        old = await in_the_way(caller.store, caller.settings, *place, needed_bytes=adapter.size)
        await delete_saves(caller.store, old)
        policy = caller.settings.store_policy
        await check_room(caller.store, policy, *place, needed_bytes=adapter.size)
        return await caller.imports.store_adapter(adapter)


def _check_announced(asked: AdapterConfig, found: AdapterConfig) -> None:
    """Raise ``UserError`` if the files hold another rank or more targets than was announced."""
    if asked.rank != found.rank:
        raise UserError(
            f"the adapter has rank {found.rank}, and the upload was started with lora_config.rank "
            f"{asked.rank}; start another upload with the adapter's rank"
        )
    for field in ("train_attn", "train_mlp", "train_unembed"):
        if getattr(found, field) and not getattr(asked, field):
            raise UserError(
                f"the adapter has tensors that lora_config.{field} excludes; start another upload "
                f"with {field} true"
            )


async def _check_room(services: Services, tenant: str, part: CheckpointRecord, size: int) -> None:
    """Raise ``UserError`` if the tenant has no room for this file beside its other parts."""
    others = await upload_parts.usage(services.store, tenant, but=part)
    policy, needed = services.settings.store_policy, size + others.size_bytes
    await check_room(services.store, policy, tenant, part.key, needed_bytes=needed)


def _path(upload_id: str) -> str:
    return f"tinker://{upload_id}/{CheckpointKind.EXTERNAL.value}/{_NAME}"


def _signature(secret: bytes, upload_id: str, member: str, expires_s: int, tenant: str) -> str:
    text = f"upload|{tenant}|{expires_s}|{upload_id}|{member}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _signed_url(caller: Caller, base_url: str, upload_id: str, member: str, expires_s: int) -> str:
    query = {
        "expires": expires_s,
        "tenant": caller.tenant,
        "signature": _signature(caller.secret, upload_id, member, expires_s, caller.tenant),
    }
    return f"{base_url.rstrip('/')}/api/v1/uploads/{upload_id}/{member}?{urlencode(query)}"
