"""The routes of training runs: lists, search, notes, and the events that training loops leave."""

import json
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response

from tuneserve_client.runs import RunOrder, RunState
from tuneserve_client.wire import run_types, types
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import (
    CheckpointKind,
    CheckpointRecord,
    ModelRecord,
    ModelStatus,
    RunEventRecord,
    Scope,
    Update,
)
from tuneserve_server import projects
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import Access, Caller, CallerDep, SentJsonDep, reply
from tuneserve_server.errors import BadRequest, DiskFull, UnknownResource
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.projects import FilterDep
from tuneserve_server.routes.listings import MOST_LISTED, Limit, Offset, checkpoint_body, live
from tuneserve_server.routes.usage import point_body
from tuneserve_server.runs import names
from tuneserve_server.runs.overview import RunQuery, RunSummary

router = APIRouter()

_RUN = "/training_runs/{model_id}"
_NOT_CHANGED = ("adapter",)  # it chose the kind of adapter when the model was created

Text = Annotated[str, Query(max_length=256)]
PageLimit = Annotated[int, Query(ge=0, le=MOST_LISTED)]
Archived = Literal["true", "false", "all"]


async def _run_body(caller: Caller, run: RunSummary) -> run_types.TrainingRunResponse:
    model, best = run.model, run.progress.best
    page = await caller.store.page_of_records(
        CheckpointRecord, tenant=model.tenant, parent=model.key
    )
    newest: dict[CheckpointKind, types.CheckpointResponse] = {}
    for checkpoint in live(page.items):
        newest.setdefault(checkpoint.kind, checkpoint_body(checkpoint))
    return run_types.TrainingRunResponse(
        training_run_id=model.key,
        name=run.name or None,
        base_model=model.base_model,
        model_owner=model.tenant,
        corrupted=model.status in (ModelStatus.FAILED, ModelStatus.LOST) or model.diverged,
        diverged=model.diverged,
        lora_rank=model.config.rank,
        adapter=model.config.kind,
        status=model.status.value,
        created=datetime.fromtimestamp(model.created_s, UTC),
        last_request_time=datetime.fromtimestamp(model.last_request_s, UTC),
        last_checkpoint=newest.get(CheckpointKind.TRAINING),
        last_sampler_checkpoint=newest.get(CheckpointKind.SAMPLER),
        user_metadata=model.user_metadata,
        state=run.state,
        step=run.progress.step,
        steps=names.steps_asked(model),
        loss=run.progress.loss,
        held_out_loss=run.progress.held_out_loss,
        best_held_out_loss=best[0] if best else None,
        best_step=best[1] if best else None,
        duration_s=run.duration_s,
        tokens=run.total.trained_tokens,
        device_s=run.total.device_s,
    )


async def _answer(
    caller: Caller, runs: list[RunSummary], window: tuple[int, int], total: int
) -> Response:
    offset, limit = window
    cursor = types.Cursor(offset=offset, limit=limit, total_count=total)
    bodies = [await _run_body(caller, each) for each in runs]
    return reply(run_types.TrainingRunsResponse(training_runs=bodies, cursor=cursor))


async def _described(caller: Caller, model: ModelRecord) -> Response:
    (run,) = await caller.runs.describe([model], model.tenant)
    return reply(await _run_body(caller, run))


@router.get("/training_runs", response_model=run_types.TrainingRunsResponse)
async def list_training_runs(
    caller: CallerDep, wanted: FilterDep, limit: Limit = 20, offset: Offset = 0
) -> Response:
    """List the caller's models, newest first.

    With the `access_scope` `accessible`, an admin key lists those of all tenants.
    """
    limit = min(limit, MOST_LISTED)
    page = await projects.page_of(caller, ModelRecord, wanted, limit=limit, offset=offset)
    runs = await caller.runs.describe(page.items, caller.seen(wanted.access_scope))
    return await _answer(caller, runs, (offset, limit), page.total)


@dataclass(frozen=True)
class _Search:
    """The parameters of a search."""

    q: Text = ""
    state: RunState | None = None
    tag: Text | None = None
    archived: Archived = "false"
    sort: RunOrder = "created"
    order: Literal["asc", "desc"] = "desc"
    limit: PageLimit = 50
    offset: Offset = 0

    async def answer(self, caller: Caller, tenant: str | None) -> Response:
        query = RunQuery(
            text=self.q,
            state=self.state,
            tag=self.tag,
            archived={"true": True, "false": False, "all": None}[self.archived],
            sort=self.sort,
            descending=self.order == "desc",
            limit=self.limit,
            offset=self.offset,
        )
        runs, total = await caller.runs.search(query, tenant)
        return await _answer(caller, runs, (self.offset, self.limit), total)


SearchDep = Annotated[_Search, Depends()]


@router.get("/training_runs/search", response_model=run_types.TrainingRunsResponse)
async def search_training_runs(caller: CallerDep, search: SearchDep) -> Response:
    """Search the caller's runs.

    ``q`` is part of a name, an id, a base model, a note or a tag. Archived runs are left out,
    unless ``archived`` is ``true`` (only these) or ``all``. Runs without the figure that they are
    sorted by come last.
    """
    return await search.answer(caller, caller.tenant)


@router.get("/live/runs", response_model=run_types.TrainingRunsResponse)
async def search_live_runs(caller: CallerDep, search: SearchDep) -> Response:
    """Search the runs of all tenants for an admin key, else the caller's, as the dashboard does."""
    return await search.answer(caller, _watched(caller))


@router.get(
    "/live/runs/{model_id}", response_model=run_types.RunPage, responses=fails(UnknownResource)
)
async def get_live_run(model_id: str, caller: CallerDep) -> Response:
    """Return all about a run of any tenant for an admin key, else of the caller's."""
    model = await caller.owned(ModelRecord, model_id, anyones=_watched(caller) is None)
    (run,) = await caller.runs.describe([model], model.tenant)
    checkpoints = await caller.store.page_of_records(
        CheckpointRecord, tenant=model.tenant, parent=model.key
    )
    return reply(
        run_types.RunPage(
            run=await _run_body(caller, run),
            points=[point_body(each) for each in await caller.store.curve(model.key)],
            events=await _events(caller, model),
            checkpoints=[checkpoint_body(each) for each in live(checkpoints.items)],
        )
    )


def _watched(caller: Caller) -> str | None:
    """Return the tenant whose runs the caller may watch; None is all."""
    return None if Scope.ADMIN in caller.scopes else caller.tenant


@router.get(_RUN, response_model=run_types.TrainingRunResponse, responses=fails(UnknownResource))
async def get_training_run(
    model_id: str, caller: CallerDep, access_scope: Access = "owned"
) -> Response:
    """Return one model."""
    anyones = caller.seen(access_scope) is None
    return await _described(caller, await caller.owned(ModelRecord, model_id, anyones=anyones))


@router.patch(
    _RUN,
    response_model=run_types.TrainingRunResponse,
    openapi_extra=takes(run_types.UpdateRunRequest),
    responses=fails(BadRequest, UnknownResource),
)
async def update_training_run(model_id: str, caller: CallerDep, sent: SentJsonDep) -> Response:
    """Set or remove entries of a model's ``user_metadata``.

    Some have a meaning: ``name``, ``notes``, ``tags`` (with commas between them), ``archived``
    (``true``), ``outcome`` (``finished``, ``stopped`` or ``diverged``), and ``config``, the JSON of
    what the training loop was asked.
    """
    model = await caller.owned(ModelRecord, model_id)
    changes = (await sent.parsed(run_types.UpdateRunRequest)).user_metadata
    for key in _NOT_CHANGED:
        if key in changes:
            raise UserError(f"the entry {key} of a run cannot be changed; leave it out")
    names.check_outcome(changes.get("outcome"))
    merged = {**model.user_metadata, **changes}
    commands.metadata({key: text for key, text in merged.items() if text is not None})
    await caller.store.update_record(Update("model", model.key, {}, {"user_metadata": changes}))
    return await _described(caller, await caller.owned(ModelRecord, model_id))


@router.post(
    f"{_RUN}/events",
    response_model=run_types.RunEvent,
    openapi_extra=takes(run_types.RunEventRequest),
    responses=fails(BadRequest, UnknownResource, DiskFull),
)
async def add_event(model_id: str, caller: CallerDep, sent: SentJsonDep) -> Response:
    """Keep an event of a run: samples, a verdict or a note."""
    model = await caller.owned(ModelRecord, model_id)
    request = await sent.parsed(run_types.RunEventRequest)
    data = json.dumps(request.data, ensure_ascii=False)
    if (size := len(data.encode())) > run_types.MOST_DATA_BYTES:
        raise UserError(
            f"data has {size} bytes of JSON; the limit is {run_types.MOST_DATA_BYTES}; shorten it"
        )
    caller.check_store()
    key = f"{model.key}:event:{request.event_id or secrets.token_hex(8)}"
    event = RunEventRecord(
        key, caller.tenant, model.key, request.kind, request.step, time.time(), data
    )
    if await caller.store.get_record(RunEventRecord, key) is None:
        kept = (await caller.store.page_of_records(RunEventRecord, parent=model.key)).items
        held = sum(len(each.data.encode()) for each in kept)
        if len(kept) >= run_types.MOST_EVENTS or held + size > run_types.MOST_EVENT_BYTES:
            raise UserError(
                f"this run has {len(kept)} events with {held} bytes; the limits are "
                f"{run_types.MOST_EVENTS} events and {run_types.MOST_EVENT_BYTES} bytes; keep "
                "fewer: every few evaluations instead of each"
            )
    return reply(_event_body(await caller.store.put_new_record(event)))


@router.get(
    f"{_RUN}/events", response_model=run_types.RunEventsResponse, responses=fails(UnknownResource)
)
async def list_events(model_id: str, caller: CallerDep) -> Response:
    """Return the events of a run, oldest first."""
    model = await caller.owned(ModelRecord, model_id)
    return reply(run_types.RunEventsResponse(events=await _events(caller, model)))


async def _events(caller: Caller, model: ModelRecord) -> list[run_types.RunEvent]:
    page = await caller.store.page_of_records(RunEventRecord, parent=model.key)
    return [_event_body(each) for each in reversed(page.items)]


def _event_body(event: RunEventRecord) -> run_types.RunEvent:
    return run_types.RunEvent(
        event_id=event.key.rpartition(":event:")[2],
        kind=event.kind,
        step=event.step,
        time=datetime.fromtimestamp(event.created_s, UTC),
        data=json.loads(event.data),
    )
