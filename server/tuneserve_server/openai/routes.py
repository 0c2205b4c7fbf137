"""OpenAI's completions, chat completions and models, for base models and checkpoints.

A request becomes the same jobs as ``asample`` makes, one for each prompt, and the connection is
held until they have ended. A stream sends the text as it is sampled.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.core.jobs import JobKind, SampleCommand, encode
from tuneserve_engine.core.records import CheckpointRecord
from tuneserve_engine.store.pubsub import Subscription, TokenEvents
from tuneserve_server.admission import JobKey, submit_job
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.base_models import is_same
from tuneserve_server.commands import chosen
from tuneserve_server.dependencies import Caller, CallerDep, incoming
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
    as_api_error,
    openai_failure,
)
from tuneserve_server.http.incoming import Incoming
from tuneserve_server.http.openapi import Declared, fails, takes
from tuneserve_server.openai import requests
from tuneserve_server.openai.lengths import checked_length
from tuneserve_server.openai.responses import (
    AnswerReader,
    ChatShape,
    CompletionShape,
    Json,
    ResponseFormat,
    SampledAnswer,
    read_answer,
    usage,
)
from tuneserve_server.openai.streaming import StreamedChoices
from tuneserve_server.openai.types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    ModelEntry,
    ModelList,
)
from tuneserve_server.openai.waiting import check_crowd, give_up, results

logger = logging.getLogger(__name__)

router = APIRouter()

_PATH = "tinker://"
_SAMPLER = re.compile(r"s-\w+:sample:\d+")
_STREAM = "text/event-stream"
_TEXT = frozenset({"prompt", "messages", "chat_template_kwargs"})
_FAILS = (
    BadRequest,
    ModelNotFound,
    SessionClosed,
    TooManyRequests,
    BudgetUsedUp,
    DiskFull,
    ModelUnavailable,
)
_GENERATES: Declared = {
    200: {"content": {"application/json": {"schema": {}}, _STREAM: {"schema": {}}}},
    **fails(*_FAILS, body=OpenAIFailure),
}


@dataclass(frozen=True)
class _Target:
    """The base model, its tokenizer and the checkpoint's file that a model's name means."""

    info: BaseModelInfo
    text: BaseText
    file_id: str | None


@dataclass(frozen=True)
class _Generation:
    """A request: its jobs, and the format of its answer."""

    caller: Caller
    request: GenerationRequest
    target: _Target
    shape: ResponseFormat
    commands: list[SampleCommand]
    request_ids: list[str]  # of the jobs whose results have not arrived
    key: str

    @property
    def reading(self) -> AnswerReader:
        request = self.request
        scored = requests.scoring(request).wanted
        text, info = self.target.text, self.target.info
        echo, kept = requests.echo(request), requests.kept(request)
        return AnswerReader(text, info.eos_token_ids, scored, echo, kept)

    async def answers(
        self, heard: Subscription | None = None
    ) -> AsyncGenerator[SampledAnswer | TokenEvents | None]:
        """Yield the answer of each prompt in order, and before it the token events heard.

        Yields None whenever no answer has arrived for a while.
        """
        reading, waiting = self.reading, iter(self.commands)
        async with aclosing(results(self.caller, list(self.request_ids), heard)) as found:
            async for result in found:
                if not isinstance(result, bytes):
                    yield result
                    continue
                del self.request_ids[0]
                yield await asyncio.to_thread(read_answer, result, next(waiting), reading)

    def speech(self) -> StreamedChoices:
        reading = self.reading
        return StreamedChoices(self.commands, reading.text, reading.eos, scored=reading.scored)

    async def submit(self) -> None:
        name = self.target.info.name
        for index, sample in enumerate(self.commands):
            place = JobKey(JobKind.SAMPLE, self.key, index, name)
            self.request_ids.append(await submit_job(self.caller, place, encode(sample)))

    async def give_up(self) -> None:
        """Cancel the jobs whose results have not arrived."""
        await give_up(self.caller, self.request_ids)

    def head(self, kind: str, created: int) -> Json:
        return {
            "id": self.key,
            "object": kind,
            "created": created,
            "model": self.request.model,
        }


@router.post(
    "/v1/completions",
    openapi_extra=takes(CompletionRequest),
    responses=_GENERATES,
)
async def completions(http: Request, caller: CallerDep) -> Response:
    """Sample continuations of one prompt or of several."""
    asked = await _asked(http, caller, CompletionRequest, requests.prompts)
    shape = CompletionShape(as_ids=requests.names_by_id(asked.request))
    return await _generate(http, caller, asked, shape)


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatCompletionRequest),
    responses=_GENERATES,
)
async def chat_completions(http: Request, caller: CallerDep) -> Response:
    """Sample the assistant's next message in a conversation."""
    asked = await _asked(http, caller, ChatCompletionRequest, requests.conversation)
    return await _generate(http, caller, asked, ChatShape())


@dataclass(frozen=True)
class _ReadRequest:
    """A request without its text, and the target and commands that it asks for."""

    request: GenerationRequest
    target: _Target
    samples: list[SampleCommand]


async def _asked(
    http: Request,
    caller: Caller,
    body_type: type[GenerationRequest],
    tokens_of: Callable[[Any, BaseText, BaseModelInfo], list[list[int]]],
) -> _ReadRequest:
    """Read the body and return what it asks for.

    The body's memory and text are released on return, because answers take a long time.
    """
    async with incoming(http, caller, Incoming.json) as sent:
        request = await sent.read(partial(requests.parse, body_type))
        check_crowd(caller)
        target = await _target(caller, request.model)
        text, info = target.text, target.info
        characters = checked_length(request, text, info, caller.tokenizers.most_characters)
        tokens = await caller.tokenizers.tokens(
            caller.tenant, characters, partial(tokens_of, request, text, info)
        )
        samples = requests.samples(request, tokens, target.file_id, info)
        kept = {name: getattr(request, name) for name in body_type.model_fields.keys() - _TEXT}
        return _ReadRequest(body_type.model_construct(**kept), target, samples)


async def _generate(
    http: Request, caller: Caller, asked: _ReadRequest, shape: ResponseFormat
) -> Response:
    request, target, samples = asked.request, asked.target, asked.samples
    key = shape.id_prefix + uuid.uuid4().hex
    if request.stream:
        samples = [replace(each, stream=f"{key}/{index}") for index, each in enumerate(samples)]
    generation = _Generation(caller, request, target, shape, samples, [], key)
    heard = caller.store.subscribe(each.stream for each in samples if each.stream)
    try:
        await generation.submit()
        if not request.stream:
            return await _whole(http, generation)
    except BaseException:
        await generation.give_up()
        raise
    return _Events(generation, heard)


async def _target(caller: Caller, asked: str) -> _Target:
    """Return the target that a model's name means.

    Raises ``ModelNotFound``, ``ModelUnavailable``.
    """
    file_id = None
    try:
        if _PATH in asked:
            checkpoint = await _checkpoint(caller, asked)
            file_id = checkpoint.file_id
            name = await caller.served.resolve(checkpoint.base_model)
        elif _SAMPLER.fullmatch(asked):
            sampler = await caller.sampler(asked)
            file_id = (await caller.weights_of(sampler)).file_id
            name = await caller.served.resolve(sampler.base_model)
        else:
            name = await caller.served.resolve(asked)
    except (UnknownResource, UserError) as error:
        raise ModelNotFound(f"{error} (GET /v1/models lists the models)") from None
    info = await caller.served.info(name)
    if info is None:
        raise ModelUnavailable(
            f"no worker has served {name!r} yet; send the request again when a worker is ready"
        )
    return _Target(info, await caller.tokenizers.load_base_text(info), file_id)


async def _checkpoint(caller: Caller, asked: str) -> CheckpointRecord:
    """Return the checkpoint named ``<path>`` or, as on the hosted service, ``<base model>;<path>``.

    Raises ``UnknownResource``, and ``UserError`` for another base model than the checkpoint's.
    """
    base, _, path = asked.rpartition(";")
    checkpoint = await chosen.sampled_checkpoint(caller, path)
    if base and not is_same(base, checkpoint.base_model):
        raise UserError(
            f"{path} is a checkpoint of {checkpoint.base_model!r}, not of {base[:256]!r}; put the "
            "checkpoint's base model before the semicolon, or send the path alone"
        )
    return checkpoint


async def _whole(http: Request, generation: _Generation) -> Response:
    answers = []
    async with aclosing(generation.answers()) as found:
        async for answer in found:
            if isinstance(answer, SampledAnswer):
                answers.append(answer)
            elif await http.is_disconnected():
                raise ClientDisconnect  # the client no longer waits for the answer
    choices = [choice for answer in answers for choice in answer.choices]
    shape = generation.shape
    return JSONResponse(
        {
            **generation.head(shape.whole, int(time.time())),
            "choices": [shape.choice(index, each) for index, each in enumerate(choices)],
            "usage": usage(answers),
        }
    )


class _Events(StreamingResponse):
    """A stream that cancels its unfinished jobs when its client disconnects."""

    def __init__(self, generation: _Generation, heard: Subscription) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_stream(generation, heard), media_type=_STREAM, headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # not in ``_stream``: a generator that never started runs no ``finally``
            await self._generation.give_up()


async def _stream(generation: _Generation, heard: Subscription) -> AsyncGenerator[str]:
    """Yield events as soon as there is text to send, and comments while no result has arrived."""
    shape, options = generation.shape, generation.request.stream_options
    with_usage = options is not None and options.include_usage
    head = generation.head(shape.chunk, int(time.time()))
    answers: list[SampledAnswer] = []
    speech = generation.speech()
    unknown: Json = {"usage": None} if with_usage else {}
    try:
        async with aclosing(generation.answers(heard)) as found:
            async for news in found:
                if news is None:
                    yield ": waiting\n\n"
                    continue
                if isinstance(news, SampledAnswer):
                    answers.append(news)
                    said = speech.end(news)
                else:
                    said = await asyncio.to_thread(speech.add_deltas, news)
                for index, choice, is_first in said:
                    for piece in shape.pieces(index, choice, is_first=is_first):
                        yield _event({**head, "choices": [piece], **unknown})
    except Exception as error:
        failed = as_api_error(error)
        caller = generation.caller
        caller.recent.record_error(caller.tenant, failed.code, str(failed), "stream")
        if failed.status >= 500:
            logger.error("a stream failed: %s", error, exc_info=failed is not error)
        yield _event(openai_failure(failed).model_dump())
        return
    if with_usage:
        yield _event({**head, "choices": [], "usage": usage(answers)})
    yield "data: [DONE]\n\n"


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


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
        if _PATH in model:
            entry = _checkpoint_entry(await _checkpoint(caller, model))
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
