"""The routes of the training primitives. ``retrieve_future`` returns their results."""

from fastapi import APIRouter, Request, Response

from tuneserve_client.wire import types
from tuneserve_client.wire.body import MAX_INT32
from tuneserve_client.wire.proto.scan import RequestHead, read_head
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import JobKind, OptimStep
from tuneserve_engine.core.records import ModelRecord
from tuneserve_server.admission import JobKey, submit_command, submit_job, submit_rejection
from tuneserve_server.commands import common as commands
from tuneserve_server.commands import custom_losses, recorded
from tuneserve_server.dependencies import Caller, CallerDep, SentJsonDep, incoming, reply
from tuneserve_server.errors import (
    BudgetUsedUp,
    DiskFull,
    Malformed,
    TooManyRequests,
    UnknownEncoding,
    UnknownResource,
)
from tuneserve_server.http import body
from tuneserve_server.http.incoming import Incoming
from tuneserve_server.http.openapi import fails, takes, takes_message

router = APIRouter()


@router.post(
    "/forward_backward",
    response_model=types.FutureResponse,
    openapi_extra=takes_message("ForwardBackwardRequest"),
    responses=fails(UnknownResource, UnknownEncoding, TooManyRequests, BudgetUsedUp, DiskFull),
)
async def forward_backward(request: Request, caller: CallerDep) -> Response:
    """Compute the outputs of a ``ForwardBackwardRequest`` message and accumulate its gradients."""
    try:
        async with incoming(request, caller, Incoming.message) as message:
            head = read_head(message)
            model, place = await _addressed(caller, head)
            if not head.whole:
                problem = "the body is not a whole ForwardBackwardRequest message; send all of it"
                request_id = await submit_rejection(caller, place, UserError(problem))
            elif head.loss == recorded.LOSS:
                request_id = await _admit_recorded(caller, place, model, message)
            elif head.loss == custom_losses.LOSS:
                request_id = await _admit_custom(caller, place, model, message)
            else:
                request_id = await submit_job(caller, place, message)
    except body.BodyTruncated as error:
        await _spend(caller, read_head(error.start), UserError(str(error)))
        raise
    return reply(types.FutureResponse(request_id=request_id, model_id=model.key))


async def _admit_recorded(caller: Caller, place: JobKey, model: ModelRecord, message: bytes) -> str:
    """Admit a request that names recorded samples, joined with their recordings."""
    async with caller.body_memory.lookups.wait_for_turn(caller.tenant):
        try:
            message = await recorded.joined(caller, model, message)
        except UserError as error:
            return await submit_rejection(caller, place, error)
        return await submit_job(caller, place, message)


async def _admit_custom(caller: Caller, place: JobKey, model: ModelRecord, message: bytes) -> str:
    """Admit a request of a custom loss, joined with the graph of the loss."""
    try:
        message = await custom_losses.joined(caller, model, message)
    except UserError as error:
        return await submit_rejection(caller, place, error)
    return await submit_job(caller, place, message)


async def _addressed(caller: Caller, head: RequestHead) -> tuple[ModelRecord, JobKey]:
    """Return the model that the message names, and the message's place in the model's log."""
    if not head.model_id or head.seq_id is None or not 1 <= head.seq_id <= MAX_INT32:
        raise Malformed(
            "the body must be a ForwardBackwardRequest message with a model_id and a seq_id of 1 "
            "or more; SDKs before 0.25, which send JSON, are not supported"
        )
    model = await caller.owned(ModelRecord, head.model_id[:256])
    return model, JobKey.after(JobKind.FORWARD_BACKWARD, model, head.seq_id)


async def _spend(caller: Caller, head: RequestHead, error: UserError) -> None:
    """Use up the sequence number of a message that was too large, if its start holds the number.

    The client continues with the next sequence number.
    """
    try:
        _, place = await _addressed(caller, head)
    except Malformed:
        return
    await submit_rejection(caller, place, error)


@router.post(
    "/optim_step",
    response_model=types.FutureResponse,
    openapi_extra=takes(types.OptimStepRequest),
    responses=fails(UnknownResource, TooManyRequests, BudgetUsedUp, DiskFull),
)
async def optim_step(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Apply the accumulated gradients and clear them."""
    keys, parsed = await sent.keyed(types.ModelKey, types.OptimStepRequest)
    model = await caller.owned(ModelRecord, keys.model_id)

    async def command() -> OptimStep:
        return OptimStep(commands.adam_params(body.accepted(parsed)))

    place = JobKey.after(JobKind.OPTIM_STEP, model, keys.seq_id)
    request_id = await submit_command(caller, place, command)
    return reply(types.FutureResponse(request_id=request_id, model_id=model.key))
