"""The routes that create and describe models."""

import time

from fastapi import APIRouter, Response

from tuneserve_client.wire import types
from tuneserve_engine.core.adapter import AdapterConfig
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import CreateModel, JobKind, encode
from tuneserve_engine.core.records import ModelRecord, SessionRecord
from tuneserve_server.admission import JobKey, submit_job, submit_rejection
from tuneserve_server.commands import common as commands
from tuneserve_server.dependencies import CallerDep, SentJsonDep, reply
from tuneserve_server.errors import (
    BadRequest,
    DiskFull,
    ModelUnavailable,
    SessionClosed,
    TooManyRequests,
    UnknownResource,
)
from tuneserve_server.http import body
from tuneserve_server.http.openapi import fails, takes

router = APIRouter()


def new_place(kind: JobKind, keys: types.SessionKey, base_model: str) -> JobKey:
    """Return the key of a request that creates a model: position 0 of the model's log."""
    model_id = f"{keys.session_id}:train:{keys.model_seq_id}"
    return JobKey(kind, keys.session_id, keys.model_seq_id, base_model, model_id, 0)


def without_model(kind: JobKind, keys: types.SessionKey) -> JobKey:
    """Return the key of a rejected creation, which has neither a model nor a log."""
    return JobKey(kind, keys.session_id, keys.model_seq_id, "")


def new_model(
    session: SessionRecord, place: JobKey, config: AdapterConfig, user_metadata: dict[str, str]
) -> ModelRecord:
    now_s = time.time()
    assert place.model_id is not None
    return ModelRecord(
        key=place.model_id,
        tenant=session.tenant,
        parent=session.key,
        base_model=place.base_model,
        config=config,
        created_s=now_s,
        last_request_s=now_s,
        user_metadata=user_metadata,
        project_id=session.project_id,
    )


@router.post(
    "/create_model",
    response_model=types.FutureResponse,
    openapi_extra=takes(types.CreateModelRequest),
    responses=fails(
        BadRequest, UnknownResource, SessionClosed, TooManyRequests, DiskFull, ModelUnavailable
    ),
)
async def create_model(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Create a model: a new adapter on a base model, LoRA unless another kind is requested."""
    keys, parsed = await sent.keyed(types.SessionKey, types.CreateModelRequest)
    session = await caller.open_session(keys.session_id)
    # Outside the try: an unknown base model, most often a typing error, is refused at once.
    served_name = ""
    if not isinstance(parsed, UserError):
        served_name = await caller.served.resolve(parsed.base_model)
    try:
        request = body.accepted(parsed)
        commands.check_optimizer(request.optimizer_config)
        config = await commands.adapter_config(caller, served_name, request)
        user_metadata = commands.metadata(request.user_metadata)
    except UserError as error:
        request_id = await submit_rejection(
            caller, without_model(JobKind.CREATE_MODEL, keys), error
        )
        return reply(types.FutureResponse(request_id=request_id))
    place = new_place(JobKind.CREATE_MODEL, keys, served_name)
    model = new_model(session, place, config, user_metadata)
    payload = encode(CreateModel(served_name, config))
    request_id = await submit_job(caller, place, payload, model)
    return reply(types.FutureResponse(request_id=request_id, model_id=model.key))


@router.post(
    "/get_info",
    response_model=types.GetInfoResponse,
    openapi_extra=takes(types.GetInfoRequest),
    responses=fails(UnknownResource),
)
async def get_info(caller: CallerDep, sent: SentJsonDep) -> Response:
    """Return a model's base model, tokenizer, kind of adapter and rank."""
    request = await sent.parsed(types.GetInfoRequest)
    model = await caller.owned(ModelRecord, request.model_id)
    info = await caller.served.info(model.base_model)
    tokenizer_id = caller.settings.client_tokenizer_id
    if info is not None:
        tokenizer_id = info.client_tokenizer_id or info.tokenizer_id
    data = types.ModelData(
        arch=info.architecture if info else None,
        model_name=model.base_model,
        tokenizer_id=tokenizer_id,
    )
    return reply(
        types.GetInfoResponse(
            model_id=model.key,
            model_data=data,
            model_name=model.base_model,
            lora_rank=model.config.rank,
            adapter=model.config.kind,
            base_model_revision=(info.revision or None) if info else None,
        )
    )
