"""The routes that save, load and describe checkpoints."""

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Response

from tuneserve_client.wire import types
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import JobKind, LoadWeights, SaveWeights, encode
from tuneserve_engine.core.records import ModelRecord
from tuneserve_server.admission import JobKey, submit_command, submit_job, submit_rejection
from tuneserve_server.cleanup.unnamed_saves import delete_saves, in_the_way
from tuneserve_server.commands import chosen
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import Caller, CallerDep, SentJsonDep, reply
from tuneserve_server.errors import DiskFull, SessionClosed, TooManyRequests, UnknownResource
from tuneserve_server.http import body
from tuneserve_server.http.incoming import SentJson
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.routes.models import new_model, new_place, without_model

router = APIRouter()

S = TypeVar("S", bound=types.ModelKey)


async def _save(
    caller: Caller,
    sent: SentJson,
    body_type: type[S],
    build: Callable[[ModelRecord, S], SaveWeights],
) -> Response:
    keys, parsed = await sent.keyed(types.ModelKey, body_type)
    model = await caller.owned(ModelRecord, keys.model_id)

    async def command() -> SaveWeights:
        save = build(model, body.accepted(parsed))
        info = await caller.served.info(model.base_model)
        save = commands.with_size(save, model.config, info)
        record = save.sampler or save.checkpoint
        assert record is not None, "a save names a checkpoint or a sampling session"
        old = await in_the_way(
            *(caller.store, caller.settings, caller.tenant, record.key), unnamed=save.sampler
        )
        await delete_saves(caller.store, old)
        return save

    place = JobKey.after(JobKind.SAVE_WEIGHTS, model, keys.seq_id)
    request_id = await submit_command(caller, place, command)
    return reply(types.FutureResponse(request_id=request_id, model_id=model.key))


@router.post(
    "/save_weights",
    response_model=types.FutureResponse,
    openapi_extra=takes(types.SaveWeightsRequest),
    responses=fails(UnknownResource, TooManyRequests, DiskFull),
)
async def save_weights(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Save the training state, optimizer included, as ``tinker://<model>/weights/<name>``."""
    return await _save(caller, sent, types.SaveWeightsRequest, commands.save_training)


@router.post(
    "/save_weights_for_sampler",
    response_model=types.FutureResponse,
    openapi_extra=takes(types.SaveWeightsForSamplerRequest),
    responses=fails(UnknownResource, TooManyRequests, DiskFull),
)
async def save_weights_for_sampler(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Save weights to sample from, under a name or as a sampling session.

    With kind `inflight`, all such sessions of the model sample the newest of these saves.
    """
    request_type = types.SaveWeightsForSamplerRequest
    return await _save(caller, sent, request_type, commands.save_for_sampler)


@router.post(
    "/save_weights_external",
    response_model=types.FutureResponse,
    openapi_extra=takes(types.SaveWeightsExternalRequest),
    responses=fails(UnknownResource, TooManyRequests, DiskFull),
)
async def save_weights_external(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Save weights in PEFT's layout, for download."""
    return await _save(caller, sent, types.SaveWeightsExternalRequest, commands.save_external)


@router.post(
    "/load_weights",
    response_model=types.FutureResponse,
    openapi_extra=takes(types.LoadIntoRequest, types.LoadNewRequest),
    responses=fails(UnknownResource, SessionClosed, TooManyRequests, DiskFull),
)
async def load_weights(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Load a checkpoint into a new model or into an existing one."""
    if (await sent.parsed(types.LoadWeightsForm)).session_id is not None:
        return await _load_new(caller, sent)
    keys, parsed = await sent.keyed(types.ModelKey, types.LoadIntoRequest)
    model = await caller.owned(ModelRecord, keys.model_id)

    async def command() -> LoadWeights:
        request = body.accepted(parsed)
        token = request.weights_access_token
        checkpoint = await chosen.training_checkpoint(caller, request.path, token)
        commands.check_base_model(checkpoint, model.base_model)
        return commands.load(checkpoint, optimizer=request.optimizer)

    place = JobKey.after(JobKind.LOAD_WEIGHTS, model, keys.seq_id)
    request_id = await submit_command(caller, place, command)
    return reply(types.FutureResponse(request_id=request_id, model_id=model.key))


async def _load_new(caller: Caller, sent: SentJson) -> Response:
    keys, parsed = await sent.keyed(types.SessionKey, types.LoadNewRequest)
    session = await caller.open_session(keys.session_id)
    try:
        request = body.accepted(parsed)
        commands.check_optimizer(request.optimizer_config)
        token = request.weights_access_token
        checkpoint = await chosen.training_checkpoint(caller, request.path, token)
        served_name = await caller.served.resolve(request.base_model or checkpoint.base_model)
        commands.check_base_model(checkpoint, served_name)
        user_metadata = commands.metadata(request.user_metadata)
        commands.check_adapter(checkpoint, user_metadata)
    except UserError as error:
        request_id = await submit_rejection(
            caller, without_model(JobKind.LOAD_WEIGHTS, keys), error
        )
        return reply(types.FutureResponse(request_id=request_id))
    place = new_place(JobKind.LOAD_WEIGHTS, keys, served_name)
    model = new_model(session, place, checkpoint.config, user_metadata)
    payload = encode(commands.load(checkpoint, optimizer=request.optimizer, creates=True))
    request_id = await submit_job(caller, place, payload, model)
    return reply(types.FutureResponse(request_id=request_id, model_id=model.key))


@router.post(
    "/weights_info",
    response_model=types.WeightsInfoResponse,
    openapi_extra=takes(types.WeightsInfoRequest),
    responses=fails(UnknownResource),
)
async def weights_info(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Return the shape of the adapter in a checkpoint."""
    request = await sent.parsed(types.WeightsInfoRequest)
    checkpoint = await caller.readable(request.tinker_path)
    return reply(
        types.WeightsInfoResponse(
            base_model=checkpoint.base_model,
            lora_rank=checkpoint.config.rank,
            adapter=checkpoint.config.kind,
            train_unembed=checkpoint.config.train_unembed,
            train_mlp=checkpoint.config.train_mlp,
            train_attn=checkpoint.config.train_attn,
        )
    )
