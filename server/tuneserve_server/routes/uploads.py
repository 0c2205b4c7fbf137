"""The route that imports adapters trained elsewhere as checkpoints."""

import asyncio
import hashlib
import hmac
import time
import uuid
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from tuneserve_client.wire import types
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointKind, CheckpointRecord
from tuneserve_server.access.limits import check_room
from tuneserve_server.checkpoint_names import check_name
from tuneserve_server.cleanup.unnamed_saves import delete_saves, in_the_way
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import Caller, CallerDep, reply
from tuneserve_server.errors import (
    BadRequest,
    DiskFull,
    ModelUnavailable,
    TooManyRequests,
    UnknownEncoding,
)
from tuneserve_server.http.openapi import fails, takes_archive

router = APIRouter()

IdempotencyKey = Annotated[str | None, Header()]


@router.post(
    "/checkpoints/import",
    response_model=types.ImportResponse,
    openapi_extra=takes_archive(),
    responses=fails(BadRequest, UnknownEncoding, TooManyRequests, DiskFull, ModelUnavailable),
)
async def import_adapter(  # noqa: PLR0913 - parts of the request
    request: Request,
    caller: CallerDep,
    name: str = "imported",
    base_model: Annotated[str | None, Query(max_length=256)] = None,
    ttl_seconds: int | None = None,
    x_idempotency_key: IdempotencyKey = None,
) -> Response:
    """Import an adapter in PEFT's layout as a training checkpoint with a fresh optimizer state.

    A retry with the same idempotency key returns the same checkpoint.
    """
    check_name("name", name)
    origin = origin_of(caller, "import", x_idempotency_key)
    key = f"tinker://{origin}/{CheckpointKind.TRAINING.value}/{name}"
    known = await caller.store.get_record(CheckpointRecord, key)
    if known is not None:
        return _answer(known)
    now_s = time.time()
    expires_s = commands.checked_ttl(ttl_seconds, now_s)
    if base_model is not None:
        await caller.served.resolve(base_model)  # refused before the adapter is sent
    caller.check_store()
    if not await in_the_way(caller.store, caller.settings, caller.tenant, key):
        await check_room(caller.store, caller.settings.store_policy, caller.tenant, key)
    async with caller.imports.received(request, caller.tenant) as upload:
        info = await _base_model(caller, base_model, upload.config.base_model)
        adapter = await caller.imports.checked(upload, info, seed=commands.new_seed())
        size, place = adapter.size, (caller.tenant, key)
        old = await in_the_way(caller.store, caller.settings, *place, needed_bytes=size)
        await delete_saves(caller.store, old)
        await check_room(caller.store, caller.settings.store_policy, *place, needed_bytes=size)
        kept = await caller.imports.store_adapter(adapter)
    checkpoint = CheckpointRecord(
        key=key,
        tenant=caller.tenant,
        parent=origin,
        kind=CheckpointKind.TRAINING,
        name=name,
        file_id=kept.file_id,
        base_model=info.name,
        config=kept.config,
        created_s=now_s,
        size_bytes=kept.size,
        expires_s=expires_s,
    )
    await caller.record_event("checkpoint_import", tinker_path=checkpoint.key)
    stored = await caller.store.put_new_record(checkpoint)
    if stored.file_id != kept.file_id:  # the same import came twice at once
        await asyncio.to_thread(caller.files.delete, kept.file_id)
    return _answer(stored)


def origin_of(caller: Caller, kind: str, idempotency_key: str | None) -> str:
    """Return the part of a checkpoint's path that names its model; here it has none.

    The same idempotency key of a tenant gives the same text.
    """
    if idempotency_key is None:
        return f"{kind}-{uuid.uuid4().hex}"
    text = f"{kind}|{caller.tenant}|{idempotency_key}"
    return f"{kind}-" + hmac.new(caller.secret, text.encode(), hashlib.sha256).hexdigest()[:32]


async def _base_model(caller: Caller, asked: str | None, trained_on: str) -> BaseModelInfo:
    """Return the facts about the requested base model, or else the one that the adapter names.

    Raises ``UserError``, and ``ModelUnavailable`` while no worker has reported its shapes.
    """
    try:
        name = await caller.served.resolve(asked or trained_on)
    except UserError as error:
        if asked:
            raise
        raise UserError(
            f"the adapter's base_model_name_or_path is not a base model of this server: {error}; "
            "if one of these is the same model, name it in base_model"
        ) from None
    return await shapes_of(caller, name)


async def shapes_of(caller: Caller, name: str) -> BaseModelInfo:
    """Return the facts about a base model.

    Raises ``ModelUnavailable`` while no worker has reported its shapes.
    """
    info = await caller.served.info(name)
    if info is None or not info.target_shapes:
        raise ModelUnavailable(
            f"no worker of this release has served {name!r} yet, so the adapter cannot be checked; "
            "send it again when a worker is ready"
        )
    return info


def _answer(checkpoint: CheckpointRecord) -> Response:
    config = checkpoint.config
    return reply(
        types.ImportResponse(
            path=checkpoint.key,
            base_model=checkpoint.base_model,
            lora_rank=config.rank,
            train_unembed=config.train_unembed,
            train_mlp=config.train_mlp,
            train_attn=config.train_attn,
        )
    )
