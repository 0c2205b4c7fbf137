"""Results: one held poll after the other, until the outcome is there."""

import logging
import time

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tuneserve_client import types
from tuneserve_engine.jobs import Outcome
from tuneserve_engine.queue.base import ResultExpired
from tuneserve_server import body
from tuneserve_server.deps import Caller, CallerDep, RawBody, reply
from tuneserve_server.errors import NotFound

logger = logging.getLogger(__name__)

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(caller: CallerDep, raw: RawBody) -> Response:
    """The stored result; 408 while there is none. Never a 5xx: clients would ask again at once."""
    request = body.parse(types.FutureRetrieveRequest, raw)
    poll_s = caller.settings.poll_s
    until_s = time.monotonic() + poll_s
    try:
        outcome = await caller.polls.hold(_outcome(caller, request.request_id), poll_s)
    except (NotFound, ResultExpired):
        raise
    except Exception:
        logger.exception("the store did not answer a poll")
        await caller.polls.pause(until_s - time.monotonic())
        return _not_ready("paused_capacity", "the server cannot read its store; the log says why")
    if outcome is not None:
        return _answer(outcome)
    if caller.watch.is_present:
        return _not_ready("active", None)
    return _not_ready("paused_capacity", "no worker is connected; waiting for one")


async def _outcome(caller: Caller, request_id: str) -> Outcome | None:
    if await caller.store.job_tenant(request_id) != caller.tenant:
        raise NotFound("this request does not exist, or it is not yours")
    return await caller.store.wait(request_id, caller.settings.poll_s)


def _answer(outcome: Outcome) -> Response:
    if outcome.rejection is not None:
        rejection = outcome.rejection
        return JSONResponse({"error": rejection.message, "category": rejection.category})
    return Response(outcome.body, media_type=outcome.content_type)


def _not_ready(state: str, reason: str | None) -> Response:
    response = reply(
        types.NotReadyResponse.model_validate({"queue_state": state, "queue_state_reason": reason})
    )
    response.status_code = 408
    return response
