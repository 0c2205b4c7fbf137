"""The route that creates custom losses. ``forward_backward`` runs them."""

from fastapi import APIRouter, Response

from tuneserve_client.wire import custom_loss_types, types
from tuneserve_server.commands import custom_losses
from tuneserve_server.dependencies import CallerDep, SentJsonDep, reply
from tuneserve_server.errors import DiskFull, SessionClosed, TooManyRequests, UnknownResource
from tuneserve_server.http.openapi import fails, takes

router = APIRouter()


@router.post(
    "/create_custom_loss",
    response_model=types.FutureResponse,
    openapi_extra=takes(custom_loss_types.CreateCustomLossRequest),
    responses=fails(UnknownResource, SessionClosed, TooManyRequests, DiskFull),
)
async def create_custom_loss(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Check and store the graph of a loss, for requests of models of the same session.

    The result of its future is the id of the loss, or the reason why the graph cannot be run.
    """
    keys, parsed = await sent.keyed(
        custom_loss_types.CustomLossKey, custom_loss_types.CreateCustomLossRequest
    )
    session = await caller.open_session(keys.session_id)
    caller.check_store()
    size = sum(map(len, sent.pieces))
    request_id = await custom_losses.create(caller, session, keys, parsed, size)
    return reply(types.FutureResponse(request_id=request_id))
