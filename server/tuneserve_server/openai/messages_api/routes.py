"""Anthropic's messages, and the count of a message's tokens."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tuneserve_server.dependencies import CallerDep
from tuneserve_server.error_shapes import AnthropicFailure
from tuneserve_server.errors import (
    BadRequest,
    ModelNotFound,
    ModelUnavailable,
    SessionClosed,
    TooManyRequests,
)
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.openai.conversations import prepare_conversation
from tuneserve_server.openai.generation import generate, read_request
from tuneserve_server.openai.messages_api.answers import MessageAnswers
from tuneserve_server.openai.messages_api.requests import parse_count, parse_message
from tuneserve_server.openai.messages_api.types import CountTokensRequest, MessagesRequest
from tuneserve_server.openai.routes import ANSWERS, GENERATION_FAILS

router = APIRouter()


@router.post(
    "/v1/messages",
    openapi_extra=takes(MessagesRequest),
    responses={**ANSWERS, **fails(*GENERATION_FAILS, body=AnthropicFailure)},
)
async def create_message(http: Request, caller: CallerDep) -> Response:
    """Sample the assistant's next message in a conversation, as Anthropic's API does."""
    read = await read_request(http, caller, parse_message, prepare_conversation)
    return await generate(http, caller, read, MessageAnswers(read.form))


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=takes(CountTokensRequest),
    responses=fails(
        *(BadRequest, ModelNotFound, SessionClosed, TooManyRequests, ModelUnavailable),
        body=AnthropicFailure,
    ),
)
async def count_tokens(http: Request, caller: CallerDep) -> Response:
    """Return the tokens of a conversation in the base model's chat template."""
    read = await read_request(http, caller, parse_count, prepare_conversation)
    (sample,) = read.samples
    return JSONResponse({"input_tokens": len(sample.prompt)})
