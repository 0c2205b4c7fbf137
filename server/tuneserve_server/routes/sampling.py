"""The routes of sampling sessions and of sampling."""

import time
from dataclasses import replace

from fastapi import APIRouter, Response

from tuneserve_client.wire import types
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import JobKind, SampleCommand
from tuneserve_engine.core.records import SamplerRecord
from tuneserve_server.admission import JobKey, submit_command
from tuneserve_server.commands import chosen
from tuneserve_server.commands import common as commands
from tuneserve_server.commands.sampling import sample_command, sequence_ids
from tuneserve_server.dependencies import CallerDep, SentJsonDep, reply
from tuneserve_server.errors import (
    BadRequest,
    BudgetUsedUp,
    DiskFull,
    SessionClosed,
    TooManyRequests,
    UnknownResource,
)
from tuneserve_server.http import body
from tuneserve_server.http.openapi import fails, takes

router = APIRouter()


@router.post(
    "/create_sampling_session",
    response_model=types.SamplingSessionResponse,
    openapi_extra=takes(types.CreateSamplingSessionRequest),
    responses=fails(BadRequest, UnknownResource, SessionClosed, TooManyRequests, DiskFull),
)
async def create_sampling_session(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Create a sampler of the base model or of a checkpoint; its weights never change."""
    request = await sent.parsed(types.CreateSamplingSessionRequest)
    session = await caller.open_session(request.session_id)
    caller.check_store()
    checkpoint = None
    if request.model_path is not None:
        checkpoint = await chosen.sampled_checkpoint(caller, request.model_path)
    elif request.base_model is None:
        raise UserError("base_model and model_path are both missing; send one of them")
    asked = request.base_model or (checkpoint.base_model if checkpoint else "")
    served_name = await caller.served.resolve(asked)
    if checkpoint is not None:
        commands.check_base_model(checkpoint, served_name)
    sampler = await caller.store.put_new_record(
        SamplerRecord(
            key=commands.sampler_key(session.key, request.sampling_session_seq_id),
            tenant=caller.tenant,
            parent=session.key,
            base_model=served_name,
            created_s=time.time(),
            model_path=checkpoint.key if checkpoint else None,
            file_id=checkpoint.file_id if checkpoint else None,
        )
    )
    try:
        # The session may have ended meanwhile, with its samplers deleted before this one came.
        await caller.open_session(session.key)
    except SessionClosed:
        await caller.store.delete_record(SamplerRecord, sampler.key)
        raise
    return reply(types.SamplingSessionResponse(sampling_session_id=sampler.key))


@router.post(
    "/join_sampling_session",
    response_model=types.JoinSamplingSessionResponse,
    openapi_extra=takes(types.JoinSamplingSessionRequest),
    responses=fails(UnknownResource, SessionClosed),
)
async def join_sampling_session(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Return a number that is unique among the clients of a sampling session.

    The client's sequence numbers start at this number times 10^9.
    """
    request = await sent.parsed(types.JoinSamplingSessionRequest)
    sampler = await caller.sampler(request.sampling_session_id)
    number = await caller.store.join_sampler(sampler.key)
    if number is None:
        raise UnknownResource(
            "this sampling session has just ended; create another in a new session"
        )
    return reply(types.JoinSamplingSessionResponse(client_counter=number))


@router.get(
    "/samplers/{sampler_id}",
    response_model=types.SamplerResponse,
    responses=fails(UnknownResource, SessionClosed),
)
async def get_sampler(sampler_id: str, caller: CallerDep) -> Response:
    """Return the base model and the checkpoint of a sampling session."""
    sampler = await caller.sampler(sampler_id)
    return reply(
        types.SamplerResponse(
            sampler_id=sampler.key,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
        )
    )


@router.post(
    "/asample",
    response_model=types.SampleFutureResponse,
    openapi_extra=takes(types.SampleRequest),
    responses=fails(UnknownResource, SessionClosed, TooManyRequests, BudgetUsedUp, DiskFull),
)
async def asample(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Sample continuations of one prompt, compute the prompt's logprobs, or both."""
    keys, parsed = await sent.keyed(types.SamplingKey, types.SampleRequest)
    sampler = await caller.sampler(keys.sampling_session_id)
    weights = await caller.weights_of(sampler)

    async def command() -> SampleCommand:
        await caller.served.check(sampler.base_model)
        info = await caller.served.info(sampler.base_model)
        request = body.accepted(parsed)
        found = sample_command(request, weights.file_id, info)
        record = bool(request.record_stability_info) and caller.settings.stable_reinforce
        return replace(found, record=record)

    place = JobKey(JobKind.SAMPLE, sampler.key, keys.seq_id, sampler.base_model)
    request_id = await submit_command(caller, place, command)
    count = keys.num_samples if isinstance(keys.num_samples, int) else 1
    return reply(
        types.SampleFutureResponse(
            request_id=request_id,
            sample_sequence_ids=sequence_ids(sampler.key, keys.seq_id, count),
        )
    )
