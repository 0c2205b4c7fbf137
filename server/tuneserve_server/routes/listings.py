"""The routes that list sessions and checkpoints, and manage checkpoints."""

import re
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from tuneserve_client.wire import types
from tuneserve_client.wire.body import MAX_INT64
from tuneserve_engine.adapters import kinds
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import (
    CheckpointKind,
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    Update,
)
from tuneserve_server import projects
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import Access, Caller, CallerDep, SentJsonDep, reply
from tuneserve_server.errors import (
    BadRequest,
    CheckpointDamaged,
    ExportNeeded,
    TooManyRequests,
    UnknownResource,
)
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.projects import FilterDep
from tuneserve_server.routes.downloads import signed_url
from tuneserve_server.transfer import peft_download

router = APIRouter()

MOST_LISTED = 1000
CHECKPOINT_TYPES: dict[CheckpointKind, Literal["training", "sampler", "external"]] = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

Limit = Annotated[int, Query(ge=0)]
Offset = Annotated[int, Query(ge=0, le=MAX_INT64)]


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)


def checkpoint_body(checkpoint: CheckpointRecord) -> types.CheckpointResponse:
    return types.CheckpointResponse(
        checkpoint_id=f"{checkpoint.kind.value}/{checkpoint.name}",
        checkpoint_type=CHECKPOINT_TYPES[checkpoint.kind],
        time=_time(checkpoint.created_s),
        tinker_path=checkpoint.key,
        base_model=checkpoint.base_model,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=checkpoint.user_metadata,
        expires_at=None if checkpoint.expires_s is None else _time(checkpoint.expires_s),
    )


def live(checkpoints: list[CheckpointRecord]) -> list[CheckpointRecord]:
    """Return the checkpoints that have not expired; the next sweep removes the others."""
    now_s = time.time()
    return [c for c in checkpoints if not c.has_expired(now_s)]


def _known_to(request: Request, checkpoints: list[CheckpointRecord]) -> list[CheckpointRecord]:
    """Return the checkpoints of types that the caller's SDK knows.

    An SDK before 0.28 does not know external checkpoints, and refuses a list that holds one.
    """
    version = request.headers.get("X-Stainless-Package-Version", "")
    found = re.fullmatch(r"0\.(\d{1,3})\.\d+", version)
    if found is None or int(found[1]) >= 28:
        return checkpoints
    return [each for each in checkpoints if each.kind is not CheckpointKind.EXTERNAL]


@router.get(
    "/training_runs/{model_id}/checkpoints",
    response_model=types.CheckpointsResponse,
    responses=fails(UnknownResource),
)
async def list_model_checkpoints(request: Request, model_id: str, caller: CallerDep) -> Response:
    """List a model's checkpoints, newest first, or that of an import, an upload or a copy."""
    page = await caller.store.page_of_records(
        CheckpointRecord, tenant=caller.tenant, parent=model_id
    )
    if not page.items:
        await caller.owned(ModelRecord, model_id)
    checkpoints = [checkpoint_body(c) for c in _known_to(request, live(page.items))]
    return reply(types.CheckpointsResponse(checkpoints=checkpoints))


@router.get("/checkpoints", response_model=types.CheckpointsResponse)
async def list_checkpoints(
    request: Request, caller: CallerDep, wanted: FilterDep, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """List the caller's checkpoints of all models, newest first.

    With the `access_scope` `accessible`, an admin key lists those of all tenants.
    """
    limit = min(limit, MOST_LISTED)
    page = await projects.page_of(caller, CheckpointRecord, wanted, limit=limit, offset=offset)
    return reply(
        types.CheckpointsResponse(
            checkpoints=[checkpoint_body(c) for c in _known_to(request, live(page.items))],
            cursor=types.Cursor(offset=offset, limit=limit, total_count=page.total),
        )
    )


async def _addressed(caller: Caller, model_id: str, kind: str, name: str) -> CheckpointRecord:
    return await caller.owned(CheckpointRecord, f"tinker://{model_id}/{kind}/{name}")


async def _readable(caller: Caller, model_id: str, kind: str, name: str) -> CheckpointRecord:
    return await caller.readable(f"tinker://{model_id}/{kind}/{name}")


@router.delete(_CHECKPOINT, responses=fails(UnknownResource))
async def delete_checkpoint(model_id: str, kind: str, name: str, caller: CallerDep) -> Response:
    """Delete the checkpoint; its file is deleted once nothing uses it."""
    checkpoint = await _addressed(caller, model_id, kind, name)
    await caller.record_event("checkpoint_delete", tinker_path=checkpoint.key)
    await caller.store.delete_record(CheckpointRecord, checkpoint.key)
    return JSONResponse({})


@router.put(
    f"{_CHECKPOINT}/ttl",
    openapi_extra=takes(types.TtlRequest),
    responses=fails(BadRequest, UnknownResource),
)
async def set_ttl(
    model_id: str, kind: str, name: str, caller: CallerDep, sent: SentJsonDep
) -> Response:
    """Set or remove the expiry of a checkpoint."""
    checkpoint = await _addressed(caller, model_id, kind, name)
    request = await sent.parsed(types.TtlRequest)
    expires_s = commands.checked_ttl(request.ttl_seconds, time.time())
    expires_at = "" if expires_s is None else _time(expires_s).isoformat()
    await caller.record_event(
        "checkpoint_ttl_set", tinker_path=checkpoint.key, expires_at=expires_at
    )
    await caller.store.update_record(Update("checkpoint", checkpoint.key, {"expires_s": expires_s}))
    return JSONResponse({})


@router.post(f"{_CHECKPOINT}/publish", responses=fails(UnknownResource))
@router.delete(f"{_CHECKPOINT}/publish", responses=fails(UnknownResource))
async def publish(
    request: Request, model_id: str, kind: str, name: str, caller: CallerDep
) -> Response:
    """Publish the checkpoint, or end that. Only its owner can.

    Any tenant of the server that knows the path of a published checkpoint can load, sample, copy
    and download it. None can change or delete it, or see its run.
    """
    checkpoint = await _addressed(caller, model_id, kind, name)
    public = request.method == "POST"
    event = "checkpoint_publish" if public else "checkpoint_unpublish"
    await caller.record_event(event, tinker_path=checkpoint.key)
    await caller.store.update_record(Update("checkpoint", checkpoint.key, {"public": public}))
    return JSONResponse({})


@router.get(
    f"{_CHECKPOINT}/external_weights_urls",
    response_model=types.ExternalWeightsUrlsResponse,
    responses=fails(BadRequest, UnknownResource),
)
async def external_weights_urls(
    request: Request, model_id: str, kind: str, name: str, caller: CallerDep
) -> Response:
    """Return signed links to the files; anyone with a link can download until it expires."""
    checkpoint = await _readable(caller, model_id, kind, name)
    if checkpoint.kind is not CheckpointKind.EXTERNAL:
        raise UserError(
            f"{checkpoint.key} is not an export; call save_weights_external and download its result"
        )
    await _record_download(caller, checkpoint)
    sign, expires_s = _links(request, caller, checkpoint)
    members: Collection[str] = peft_download.CONVERTED
    if checkpoint.is_export:
        members = await caller.archives.members(checkpoint.file_id)
    urls = {member: sign(member) for member in members}
    return reply(types.ExternalWeightsUrlsResponse(urls=urls, expires=_time(expires_s)))


@router.get(
    f"{_CHECKPOINT}/archive",
    response_model=types.ArchiveUrlResponse,
    responses=fails(BadRequest, ExportNeeded, UnknownResource, TooManyRequests, CheckpointDamaged),
)
async def archive(
    request: Request, model_id: str, kind: str, name: str, caller: CallerDep
) -> Response:
    """Return a signed link to the checkpoint as a tar archive in PEFT's layout.

    Anyone with the link can download until it expires. The whole checkpoint is read and checked
    before the answer.
    """
    checkpoint = await _readable(caller, model_id, kind, name)
    made_of = checkpoint.config.kind
    if kinds.kind_of(checkpoint.config).needs_decomposition:
        raise ExportNeeded(
            f"{checkpoint.key} is of kind {made_of}: converting it to LoRA takes the base model's "
            "weights, which only a worker has; load it into a model and download the result of "
            "save_weights_external, or download a sampler checkpoint of the model"
        )
    with caller.archives.counted(caller.tenant):
        await caller.archives.opened(checkpoint.file_id, checkpoint.key)
    await _record_download(caller, checkpoint)
    sign, expires_s = _links(request, caller, checkpoint)
    return reply(types.ArchiveUrlResponse(url=sign(peft_download.NAME), expires=_time(expires_s)))


async def _record_download(caller: Caller, checkpoint: CheckpointRecord) -> None:
    await caller.record_event("checkpoint_read", tinker_path=checkpoint.key, purpose="download")


def _links(
    request: Request, caller: Caller, checkpoint: CheckpointRecord
) -> tuple[Callable[[str], str], int]:
    """Return a function that signs a link to a member of the checkpoint's file, and the expiry."""
    base_url = caller.settings.public_url or str(request.base_url)
    expires_s = int(time.time()) + caller.settings.download_ttl_s
    return lambda each: signed_url(caller, base_url, checkpoint.file_id, each, expires_s), expires_s


@router.get("/sessions", response_model=types.SessionsResponse)
async def list_sessions(
    caller: CallerDep, wanted: FilterDep, limit: Limit = 20, offset: Offset = 0
) -> Response:
    """List the caller's sessions, newest first.

    With the `access_scope` `accessible`, an admin key lists those of all tenants.
    """
    limit = min(limit, MOST_LISTED)
    page = await projects.page_of(caller, SessionRecord, wanted, limit=limit, offset=offset)
    return reply(types.SessionsResponse(sessions=[session.key for session in page.items]))


@router.get(
    "/sessions/{session_id}", response_model=types.SessionResponse, responses=fails(UnknownResource)
)
async def get_session(
    session_id: str,
    caller: CallerDep,
    access_scope: Access = "owned",
    limit: Limit = MOST_LISTED,
    offset: Offset = 0,
) -> Response:
    """Return a session's models and sampling sessions, each newest first.

    Returns up to 1,000 of each, starting at ``offset``.
    """
    seen = caller.seen(access_scope)
    session = await caller.owned(SessionRecord, session_id, anyones=seen is None)
    limit = min(limit, MOST_LISTED)
    models = await caller.store.page_of_records(
        ModelRecord, parent=session.key, limit=limit, offset=offset
    )
    samplers = await caller.store.page_of_records(
        SamplerRecord, parent=session.key, limit=limit, offset=offset
    )
    return reply(
        types.SessionResponse(
            training_run_ids=[model.key for model in models.items],
            sampler_ids=[each.key for each in samplers.items if not each.is_target],
            user_metadata=session.user_metadata,
            display_name=session.display_name,
        )
    )
