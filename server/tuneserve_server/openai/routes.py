"""OpenAI's completions, chat completions and models, for base models and checkpoints."""

import time
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.records import CheckpointRecord
from tuneserve_server.dependencies import CallerDep
from tuneserve_server.errors import (
    BadRequest,
    BudgetUsedUp,
    DiskFull,
    ModelNotFound,
    ModelUnavailable,
    OpenAIFailure,
    SessionClosed,
    TooManyRequests,
    UnknownResource,
)
from tuneserve_server.http.openapi import Declared, fails, takes
from tuneserve_server.openai import requests
from tuneserve_server.openai.chat_shape import ChatShape
from tuneserve_server.openai.conversations import prepare_conversation, prepare_prompts
from tuneserve_server.openai.generation import STREAM, OpenAIAnswers, generate, read_request
from tuneserve_server.openai.responses import CompletionShape
from tuneserve_server.openai.targets import is_checkpoint, named_checkpoint
from tuneserve_server.openai.types import (
    ChatCompletionRequest,
    CompletionRequest,
    ModelEntry,
    ModelList,
)

router = APIRouter()

GENERATION_FAILS = (
    BadRequest,
    ModelNotFound,
    SessionClosed,
    TooManyRequests,
    BudgetUsedUp,
    DiskFull,
    ModelUnavailable,
)
"""The errors of every route that samples."""
ANSWERS: Declared = {200: {"content": {"application/json": {"schema": {}}, STREAM: {"schema": {}}}}}
"""The answer of these routes: JSON or a stream."""
_GENERATES = {**ANSWERS, **fails(*GENERATION_FAILS, body=OpenAIFailure)}


@router.post(
    "/v1/completions",
    openapi_extra=takes(CompletionRequest),
    responses=_GENERATES,
)
async def completions(http: Request, caller: CallerDep) -> Response:
    """Sample continuations of one prompt or of several."""
    parse = partial(requests.parse, CompletionRequest)
    read = await read_request(http, caller, parse, prepare_prompts)
    shape = CompletionShape(as_ids=requests.names_by_id(read.request))
    return await generate(http, caller, read, OpenAIAnswers(shape, read.request))


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatCompletionRequest),
    responses=_GENERATES,
)
async def chat_completions(http: Request, caller: CallerDep) -> Response:
    """Sample the assistant's next message in a conversation."""
    parse = partial(requests.parse, ChatCompletionRequest)
    read = await read_request(http, caller, parse, prepare_conversation)
    shape = ChatShape(read.form)
    return await generate(http, caller, read, OpenAIAnswers(shape, read.request))


# --- models --------------------------------------------------------------------------------------


@router.get("/v1/models", response_model=ModelList)
async def list_models(caller: CallerDep) -> Response:
    """List the base models, and the caller's checkpoints to sample from, newest first."""
    entries = [_base_entry(each.info.name) for each in await caller.served.offered()]
    entries = entries or [_base_entry(caller.settings.served_name)]
    page = await caller.store.page_of_records(CheckpointRecord, tenant=caller.tenant)
    now_s = time.time()
    entries += [
        _checkpoint_entry(each)
        for each in page.items
        if not each.is_export and not each.has_expired(now_s)
    ]
    return JSONResponse(ModelList(data=entries).model_dump())


@router.get(
    "/v1/models/{model:path}",
    response_model=ModelEntry,
    responses=fails(ModelNotFound, body=OpenAIFailure),
)
async def get_model(model: str, caller: CallerDep) -> Response:
    """Return one base model or checkpoint."""
    try:
        if is_checkpoint(model):
            entry = _checkpoint_entry(await named_checkpoint(caller, model))
        else:
            entry = _base_entry(await caller.served.resolve(model))
    except (UnknownResource, UserError) as error:
        raise ModelNotFound(f"{error} (GET /v1/models lists the models)") from None
    return JSONResponse(entry.model_dump())


def _base_entry(name: str) -> ModelEntry:
    return ModelEntry(id=name, created=0)  # the time of creation is not known


def _checkpoint_entry(checkpoint: CheckpointRecord) -> ModelEntry:
    return ModelEntry(
        id=checkpoint.key, created=int(checkpoint.created_s), parent=checkpoint.base_model
    )
