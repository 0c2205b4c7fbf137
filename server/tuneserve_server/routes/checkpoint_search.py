"""The route that searches a tenant's checkpoints."""

import uuid
from collections.abc import Collection
from datetime import UTC, datetime

from fastapi import APIRouter, Response

from tuneserve_client.wire import checkpoint_types as wire
from tuneserve_engine.core.records import CheckpointRecord, ModelRecord, SessionRecord
from tuneserve_server.base_models import is_same
from tuneserve_server.dependencies import Caller, CallerDep, SentJsonDep, reply
from tuneserve_server.http.openapi import takes
from tuneserve_server.routes.listings import CHECKPOINT_TYPES, checkpoint_body, live

router = APIRouter()


@router.post(
    "/checkpoints/search",
    response_model=wire.CheckpointSearchResponse,
    openapi_extra=takes(wire.CheckpointSearchRequest),
)
async def search_checkpoints(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Search the caller's checkpoints, newest first.

    Other tenants' published checkpoints are not found: their paths are passed on by their owners.
    """
    asked = await sent.parsed(wire.CheckpointSearchRequest)
    found: list[CheckpointRecord] = []
    if asked.owner.type != "user" or caller.tenant in asked.owner.owner_urns:
        page = await caller.store.page_of_records(CheckpointRecord, tenant=caller.tenant)
        found = [each for each in live(page.items) if _matches(each, asked)]
    if asked.project_ids is not None:
        found = await _of_projects(caller, found, asked.project_ids)
    found.sort(key=_place, reverse=True)
    if (cursor := asked.cursor) is not None:
        last = (cursor.last_created_at, cursor.last_checkpoint_uuid)
        found = [each for each in found if _place(each) < last]
    shown, following = found[: asked.limit], None
    if len(found) > len(shown):
        created, name = _place(shown[-1])
        following = wire.NextCheckpoints(last_created_at=created, last_checkpoint_uuid=name)
    return reply(
        wire.CheckpointSearchResponse(
            checkpoints=[checkpoint_body(each) for each in shown], next_cursor=following
        )
    )


def _matches(checkpoint: CheckpointRecord, asked: wire.CheckpointSearchRequest) -> bool:
    return (
        (asked.checkpoint_type in (None, CHECKPOINT_TYPES[checkpoint.kind]))
        and asked.user_metadata.items() <= checkpoint.user_metadata.items()
        and (
            asked.base_models is None
            or any(is_same(checkpoint.base_model, each) for each in asked.base_models)
        )
    )


def _place(checkpoint: CheckpointRecord) -> tuple[datetime, str]:
    """Return the place of a checkpoint in the order of results."""
    created = datetime.fromtimestamp(checkpoint.created_s, UTC)
    return created, str(uuid.uuid5(uuid.NAMESPACE_URL, checkpoint.key))


async def _of_projects(
    caller: Caller, checkpoints: list[CheckpointRecord], project_ids: Collection[str]
) -> list[CheckpointRecord]:
    """Return the checkpoints that belong to one of the projects, by themselves or by their run."""
    known: dict[str, str | None] = {}
    found = []
    for each in checkpoints:
        project = each.project_id
        if project is None:
            if each.parent not in known:
                known[each.parent] = await _project_of(caller, each.parent)
            project = known[each.parent]
        if project in project_ids:
            found.append(each)
    return found


async def _project_of(caller: Caller, model_id: str) -> str | None:
    model = await caller.store.get_record(ModelRecord, model_id)
    session = None if model is None else await caller.store.get_record(SessionRecord, model.parent)
    return None if session is None else session.project_id
