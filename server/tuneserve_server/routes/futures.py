"""Results: one held poll after the other, until the outcome is there."""

import logging
import time
from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tuneserve_client import types
from tuneserve_engine.jobs import Outcome
from tuneserve_engine.queue.base import ResultExpired
from tuneserve_engine.records import Model, ModelStatus, Sampler
from tuneserve_server import body
from tuneserve_server.deps import Caller, CallerDep, RawBody, reply
from tuneserve_server.errors import NotFound, ResultGone
from tuneserve_server.openapi import BINARY, PROTOBUF, fails, takes

logger = logging.getLogger(__name__)

router = APIRouter()

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

_CROWDED_S = 1.0  # a poll that is ended at once would be there again at once
_STATE_S = 3.0  # after a poll of 40 s, before the client's 45 s are over


@router.post(
    "/retrieve_future",
    openapi_extra=takes(types.FutureRetrieveRequest),
    responses={
        200: {"content": {PROTOBUF: BINARY}},
        408: {"model": types.NotReadyResponse, "description": "not yet"},
        **fails(NotFound, ResultGone),
    },
)
async def retrieve_future(caller: CallerDep, raw: RawBody) -> Response:
    """The stored result; 408 while there is none. Never a 5xx: clients would ask again at once."""
    request = body.parse(types.FutureRetrieveRequest, raw)
    most = caller.settings.max_polls_per_tenant
    with caller.polls.counted(caller.tenant) as held:
        hold_s = _CROWDED_S if held > most else caller.settings.poll_s
        answer = await _held(caller, request.request_id, hold_s)
    if held > most and answer.status_code == 408:
        reason = (
            f"{held} polls at once; this server holds {most} of one client; results come more "
            "slowly until there are fewer requests under way"
        )
        return _not_ready("paused_rate_limit", reason)
    return answer


async def _held(caller: Caller, request_id: str, hold_s: float) -> Response:
    until_s = time.monotonic() + hold_s
    scope = ""

    async def waiting() -> Outcome | None:
        nonlocal scope
        scope = await _own_scope(caller, request_id)
        return await caller.store.wait(request_id, hold_s)

    try:
        outcome = await caller.polls.hold(waiting(), hold_s)
        if outcome is not None:
            return _answer(outcome)
        state = await caller.polls.hold(_state(caller, scope), _STATE_S)
        return _not_ready(*(state or ("active", None)))
    except (NotFound, ResultExpired):
        raise
    except Exception:
        logger.exception("the store did not answer a poll")
        await caller.polls.pause(until_s - time.monotonic())
        return _not_ready("paused_capacity", "the server cannot read its store; the log says why")


async def _own_scope(caller: Caller, request_id: str) -> str:
    """The scope of the caller's request. Polls for it are signs of life of its session."""
    tenant, scope = await caller.store.job_key(request_id) or (None, "")
    if tenant != caller.tenant:
        raise NotFound("this request does not exist, or it is not yours")
    await caller.last_seen.note(scope.partition(":")[0])
    return scope


async def _state(caller: Caller, scope: str) -> tuple[QueueState, str | None]:
    """Whether there is a worker for what is waited for, and if not, which is missing."""
    known = await caller.served.known()
    if known and all(each.workers for each in known):
        return "active", None
    wanted = await _base_model(caller, scope)
    if any(each.info.name == wanted for each in known if each.workers):
        return "active", None
    return "paused_capacity", f"no worker for {wanted} is connected; waiting for one"


async def _base_model(caller: Caller, scope: str) -> str:
    """The base model that requests of this scope are for: a model, a sampler, or a session, which
    creates models."""
    record: Model | Sampler | None
    if ":train:" in scope:
        record = await caller.store.get(Model, scope)
    elif ":sample:" in scope:
        record = await caller.store.get(Sampler, scope)
    else:
        models = (await caller.store.page(Model, parent=scope)).items
        record = next((each for each in models if each.status is ModelStatus.CREATING), None)
    return record.base_model if record else caller.settings.served_name


def _answer(outcome: Outcome) -> Response:
    if outcome.rejection is not None:
        rejection = outcome.rejection
        return JSONResponse({"error": rejection.message, "category": rejection.category})
    return Response(outcome.body, media_type=outcome.content_type)


def _not_ready(state: QueueState, reason: str | None) -> Response:
    response = reply(types.NotReadyResponse(queue_state=state, queue_state_reason=reason))
    response.status_code = 408
    return response
