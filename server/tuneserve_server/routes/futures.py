"""The routes of results: clients long-poll until a request has ended.

A sampling client need not poll for each request: ``retrieve_futures`` returns which of its samples
have ended, and the client fetches their results.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tuneserve_client.wire import types
from tuneserve_engine.adapters.kinds import kind_of
from tuneserve_engine.core.jobs import Outcome
from tuneserve_engine.core.records import ModelRecord, ModelStatus, SamplerRecord, TenantRecord
from tuneserve_engine.store import refusals
from tuneserve_engine.store.base import Completion, SamplerClient
from tuneserve_engine.store.errors import ResultDropped, StoreFailed
from tuneserve_engine.telemetry import logs
from tuneserve_engine.telemetry.log_throttle import ThrottledLog
from tuneserve_server import request_cost
from tuneserve_server.base_models import decomposing
from tuneserve_server.commands import custom_losses
from tuneserve_server.dependencies import Caller, CallerDep, incoming, reply, short
from tuneserve_server.errors import BadRequest, ResultGone, SessionClosed, UnknownResource
from tuneserve_server.http.incoming import Incoming
from tuneserve_server.http.openapi import BINARY, PROTOBUF, fails, takes

logger = logging.getLogger(__name__)
_faults = ThrottledLog(logger)

router = APIRouter()

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

_CROWDED_S = 1.0  # not 0: a client repeats a poll at once
_STATE_S = 3.0  # added to a poll of 40 s; the client's limit is 45 s
_NO_REQUEST = "this request does not exist, or it is not yours (your tenant: {tenant})"
_MOST_COMPLETIONS = 1000  # of one answer: 100 KB


@router.post(
    "/retrieve_future",
    openapi_extra=takes(types.FutureRetrieveRequest),
    responses={
        200: {"content": {PROTOBUF: BINARY}},
        408: {"model": types.NotReadyResponse, "description": "no result yet"},
        **fails(UnknownResource, ResultGone),
    },
)
async def retrieve_future(http: Request, caller: CallerDep) -> Response:
    """Return the stored result, or 408 while there is no result.

    Never a 5xx, after which clients would poll again at once.
    """
    request_id = (await short(http, caller, types.FutureRetrieveRequest)).request_id
    most = caller.settings.max_polls_per_tenant
    with caller.polls.counted(caller.tenant) as held:
        hold_s = _CROWDED_S if held > most else caller.settings.poll_s
        found = await _found(caller, request_id, hold_s)

    if isinstance(found, Outcome):
        headers = request_cost.headers(found.usage)
        if found.rejection is None:
            return Response(found.body, media_type=found.content_type, headers=headers)
        category, message = found.rejection.category, found.rejection.message
        caller.recent.record_error(caller.tenant, category, message, "result")
        return JSONResponse({"error": message, "category": category}, headers=headers)

    if held > most:
        reason = (
            f"{held} polls at once; the limit of one client is {most}; results arrive more slowly "
            "until fewer requests are running"
        )
        found = ("paused_rate_limit", reason)
    response = reply(types.NotReadyResponse(queue_state=found[0], queue_state_reason=found[1]))
    response.status_code = 408
    return response


async def _found(
    caller: Caller, request_id: str, hold_s: float
) -> Outcome | tuple[QueueState, str | None]:
    """Return the outcome or, if there is none within ``hold_s``, the queue state and its reason."""
    until_s = time.monotonic() + hold_s
    try:
        if custom_losses.is_future(request_id):
            created = await caller.polls.hold(_created_loss(caller, request_id), hold_s)
            return created or ("active", None)
        scope = await caller.polls.hold(_own_scope(caller, request_id), hold_s)
        if scope is not None:
            waiting = caller.store.wait(request_id, hold_s)
            outcome = await caller.polls.hold(waiting, until_s - time.monotonic())
            if outcome is not None:
                return outcome
        state = await caller.polls.hold(_state(caller, request_id, scope or ""), _STATE_S)
        return state or ("active", None)
    except (UnknownResource, ResultDropped):
        raise
    except Exception:
        logger.exception("the store did not answer a poll")
        await caller.polls.pause(until_s - time.monotonic())
        return "paused_capacity", "the server cannot read its store; its log says why"


async def _created_loss(caller: Caller, request_id: str) -> Outcome:
    """Return the outcome of creating a custom loss, which is known once it is accepted."""
    found = await custom_losses.outcome(caller, request_id)
    if found is None:
        raise UnknownResource(_NO_REQUEST.format(tenant=caller.tenant))
    return found


async def _own_scope(caller: Caller, request_id: str) -> str:
    """Return the scope of the caller's request; the poll counts as a heartbeat of its session."""
    tenant, scope = await caller.store.job_key(request_id) or (None, "")
    if tenant != caller.tenant:
        raise UnknownResource(_NO_REQUEST.format(tenant=caller.tenant))
    logs.add_fields(request_id=request_id)
    await caller.last_seen.record_sign("session", scope.partition(":")[0])
    if ":sample:" in scope:
        await caller.last_seen.record_sign("sampler", scope)
    return scope


async def _state(caller: Caller, request_id: str, scope: str) -> tuple[QueueState, str | None]:
    """Return the queue state of a request without a result, and the reason if it is paused.

    The reasons: a new model waits for room, no worker serves the base model, or the worker still
    decomposes the base model's weights.
    """
    if ":" not in scope:  # a session's scope: the request creates a model
        request = await caller.store.request(request_id)
        if request is not None and request.state == "held":
            return "paused_capacity", refusals.waits_for_room(await _most_models(caller))
    known = await caller.served.known()
    directions = {each.info.name: decomposing(each) for each in known}
    if known and all(each.trainers for each in known) and not any(directions.values()):
        return "active", None
    record = await _waiting(caller, scope)
    wanted = record.base_model if record else caller.settings.served_name
    serving = [each for each in known if each.info.name == wanted and each.workers]
    if not serving:
        return "paused_capacity", f"no worker for {wanted} is connected; waiting for one"
    if isinstance(record, ModelRecord) and not any(each.trainers for each in serving):
        return "paused_capacity", f"no worker that trains {wanted} is connected; waiting for one"
    reason = directions.get(wanted)
    if reason is None or not _needs_directions(record):
        return "active", None
    return "paused_capacity", reason  # not "active": the SDK would not show the reason


async def _most_models(caller: Caller) -> int:
    own = await caller.store.get_record(TenantRecord, caller.tenant)
    limit = None if own is None else own.max_models
    return caller.settings.max_tenant_models if limit is None else limit


async def _waiting(caller: Caller, scope: str) -> ModelRecord | SamplerRecord | None:
    """Return the record that requests of this scope wait for: a model or a sampler.

    A session's requests create models; of these, a model that needs a decomposition comes first,
    because it waits the longest.
    """
    if ":train:" in scope:
        return await caller.store.get_record(ModelRecord, scope)
    if ":sample:" in scope:
        return await caller.store.get_record(SamplerRecord, scope)
    models = (await caller.store.page_of_records(ModelRecord, parent=scope)).items
    creating = [each for each in models if each.status is ModelStatus.CREATING]
    return max(creating, key=_needs_directions, default=None)


def _needs_directions(record: ModelRecord | SamplerRecord | None) -> bool:
    """Return whether the record is a new model that needs its base model's decomposition."""
    if not isinstance(record, ModelRecord) or record.status is not ModelStatus.CREATING:
        return False
    return kind_of(record.config).needs_decomposition


# --- many at once ---------------------------------------------------------------------------------


@router.post(
    "/retrieve_futures",
    response_model=types.FuturesResponse,
    openapi_extra=takes(types.FuturesRetrieveRequest),
    responses=fails(UnknownResource),
)
async def retrieve_futures(http: Request, caller: CallerDep) -> Response:
    """Return which samples of one client have ended since the cursor; wait until one has.

    Results that the client acknowledges are dropped.
    """
    poll = await _begun(http, caller)
    settings = caller.settings
    hold_s = min(poll.timeout_s, settings.poll_s)
    with caller.polls.counted(caller.tenant) as held:
        if held > settings.max_polls_per_tenant:
            hold_s = min(hold_s, _CROWDED_S)
        waiting = caller.store.completions(
            poll.client, after=poll.cursor, limit=_MOST_COMPLETIONS, timeout_s=hold_s
        )
        found = await caller.polls.hold(waiting, hold_s + _STATE_S) or []
    cursor = found[-1].number if found else poll.cursor
    return reply(types.FuturesResponse(completions=list(map(_as_future, found)), cursor=cursor))


@dataclass(frozen=True)
class _Poll:
    """A poll for the samples of one client that end after the cursor."""

    client: SamplerClient
    cursor: int
    timeout_s: float


async def _begun(http: Request, caller: Caller) -> _Poll:
    """Return the poll, after its acknowledged results were dropped.

    The body, which may name many results, is released on return, because a poll takes long.
    """
    async with incoming(http, caller, Incoming.json) as sent:
        request = await sent.parsed(types.FuturesRetrieveRequest)
        client = await _own_client(caller, request.target)
        await _acknowledge(caller, client, request.retrieved_request_ids)
        timeout_s = caller.settings.poll_s if request.timeout is None else request.timeout
        return _Poll(client, request.prev_cursor, timeout_s)


async def _own_client(caller: Caller, target: types.SamplingTarget) -> SamplerClient:
    """Return the caller's client; the poll counts as a heartbeat of its session and sampler."""
    key = target.sampling_session_id
    with suppress(SessionClosed):  # results of earlier requests are still available
        await caller.sampler(key)
    await caller.last_seen.record_sign("session", key.partition(":")[0])
    await caller.last_seen.record_sign("sampler", key)
    return SamplerClient(caller.tenant, key, target.cloned_sampler_id)


async def _acknowledge(caller: Caller, client: SamplerClient, request_ids: Sequence[str]) -> None:
    """Drop results. A failure is only logged, because retention drops the result later."""
    try:
        await caller.store.acknowledge(client, request_ids)
    except (StoreFailed, ConnectionError) as error:
        _faults.warn("acknowledge", f"acknowledged results could not be dropped: {error}")


def _as_future(completion: Completion) -> types.FinishedFuture | types.FailedFuture:
    request_id = completion.request_id
    if completion.failed:
        return types.FailedFuture(request_id=request_id)
    size = completion.size
    return types.FinishedFuture(request_id=request_id, response_payload_uncompressed_size=size)


@router.post(
    "/cancel_future",
    openapi_extra=takes(types.CancelRequest),
    responses=fails(BadRequest, UnknownResource),
)
async def cancel_future(http: Request, caller: CallerDep) -> Response:
    """Cancel a sample. A sample that has ended stays as it is."""
    request = await short(http, caller, types.CancelRequest)
    await _own_scope(caller, request.request_id)
    try:
        is_sample = await caller.store.cancel(request.request_id)
    except KeyError:  # dropped since it was looked up
        raise UnknownResource(_NO_REQUEST.format(tenant=caller.tenant)) from None
    if not is_sample:
        raise BadRequest(
            "only samples can be cancelled; a model's requests run in order, and each depends on "
            "the one before it: let this one run"
        )
    return JSONResponse({})
