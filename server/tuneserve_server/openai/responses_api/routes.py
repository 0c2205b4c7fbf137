"""OpenAI's responses, which this server does not store."""

from fastapi import APIRouter, Request, Response

from tuneserve_server.dependencies import CallerDep
from tuneserve_server.errors import OpenAIFailure
from tuneserve_server.http.openapi import fails, takes
from tuneserve_server.openai.conversations import prepare_conversation
from tuneserve_server.openai.generation import generate, read_request
from tuneserve_server.openai.responses import Json
from tuneserve_server.openai.responses_api.answers import ResponseAnswers, asked_fields
from tuneserve_server.openai.responses_api.requests import as_chat, parse_request
from tuneserve_server.openai.responses_api.types import ResponsesRequest
from tuneserve_server.openai.routes import ANSWERS, GENERATION_FAILS
from tuneserve_server.openai.types import ChatCompletionRequest

router = APIRouter()


@router.post(
    "/v1/responses",
    openapi_extra=takes(ResponsesRequest),
    responses={**ANSWERS, **fails(*GENERATION_FAILS, body=OpenAIFailure)},
)
async def create_response(http: Request, caller: CallerDep) -> Response:
    """Sample the answer to a conversation of items, as OpenAI's Responses API does."""
    asked: Json = {}

    def parse(raw: bytes) -> ChatCompletionRequest:
        request = parse_request(raw)
        asked.update(asked_fields(request))
        return as_chat(request)

    read = await read_request(
        http, caller, parse, prepare_conversation, names={"messages": "input"}
    )
    text = read.target.text
    answer = ResponseAnswers(asked, read.form, lambda said: len(text.encode_rendered(said)))
    return await generate(http, caller, read, answer)
