"""The route that copies checkpoints: a second record for the same file."""

import time
from typing import Annotated

from fastapi import APIRouter, Header, Response

from tuneserve_client.wire import checkpoint_types as wire
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointRecord
from tuneserve_server.access.limits import check_room
from tuneserve_server.cleanup.unnamed_saves import delete_saves, in_the_way
from tuneserve_server.commands import chosen
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import Caller, CallerDep, SentJsonDep, reply
from tuneserve_server.errors import BadRequest, DiskFull, UnknownResource
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.routes.uploads import IdempotencyKey, origin_of

router = APIRouter()

AccessToken = Annotated[str | None, Header(max_length=4096)]


@router.post(
    "/copy_weights",
    response_model=wire.CopyWeightsResponse,
    openapi_extra=takes(wire.CopyWeightsRequest),
    responses=fails(BadRequest, UnknownResource, DiskFull),
)
async def copy_weights(
    caller: CallerDep,
    sent: SentJsonDep,
    x_idempotency_key: IdempotencyKey = None,
    x_tinker_weights_access_token: AccessToken = None,
) -> Response:
    """Copy a checkpoint, the caller's or a published one; both share one file.

    The copy is the caller's. It keeps the kind and the name of its source, but neither its expiry
    nor, if the source is another tenant's, its metadata. A retry with the same idempotency key
    returns the same copy.
    """
    asked = await sent.parsed(wire.CopyWeightsRequest)
    origin = origin_of(caller, "copy", x_idempotency_key)
    before = await caller.store.page_of_records(
        CheckpointRecord, tenant=caller.tenant, parent=origin
    )
    if before.items:
        return reply(wire.CopyWeightsResponse(tinker_path=before.items[0].key))
    if asked.session_id is not None or asked.model_seq_id is not None:
        raise UserError(
            "session_id and model_seq_id are set, and a copy on this server belongs to no session; "
            "leave them out, and send destination_project_id"
        )
    token = asked.weights_access_token or x_tinker_weights_access_token
    try:
        source = await caller.readable(asked.source_path)
    except UnknownResource as error:
        raise UnknownResource(f"{error}{chosen.token_hint(token)}") from None
    caller.check_store()
    copy = _copy_of(caller, source, origin, asked)
    await _make_room(caller, copy)
    await caller.record_event("checkpoint_copy", tinker_path=copy.key, source=source.key)
    stored = await caller.store.put_new_record(copy)
    if await caller.store.get_record(CheckpointRecord, source.key) is None:
        # Deleted meanwhile, perhaps with its file: from now on, the copy would have kept it.
        await caller.store.delete_record(CheckpointRecord, copy.key)
        raise UnknownResource(
            "this checkpoint was deleted while it was copied; copy another checkpoint"
        )
    return reply(wire.CopyWeightsResponse(tinker_path=stored.key))


def _copy_of(
    caller: Caller, source: CheckpointRecord, origin: str, asked: wire.CopyWeightsRequest
) -> CheckpointRecord:
    now_s = time.time()
    return CheckpointRecord(
        key=f"tinker://{origin}/{source.kind.value}/{source.name}",
        tenant=caller.tenant,
        parent=origin,
        kind=source.kind,
        name=source.name,
        file_id=source.file_id,
        base_model=source.base_model,
        config=source.config,
        created_s=now_s,
        size_bytes=source.size_bytes,
        expires_s=commands.checked_ttl(asked.ttl_seconds, now_s),
        user_metadata=source.user_metadata if source.tenant == caller.tenant else {},
        uploaded=source.uploaded,
        project_id=asked.destination_project_id,
    )


async def _make_room(caller: Caller, copy: CheckpointRecord) -> None:
    """Raise ``UserError`` if the tenant has no room for the copy, which counts with its file."""
    place, size = (caller.tenant, copy.key), copy.size_bytes
    old = await in_the_way(caller.store, caller.settings, *place, needed_bytes=size)
    await delete_saves(caller.store, old)
    await check_room(caller.store, caller.settings.store_policy, *place, needed_bytes=size)
