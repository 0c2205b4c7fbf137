"""A request from OpenAI's or Anthropic's clients: its jobs, and its answer whole or as a stream.

A request becomes the same jobs as ``asample`` makes, one for each prompt, and the connection is
held until they have ended. A stream sends the text as it is sampled.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.jobs import JobKind, SampleCommand, encode
from tuneserve_engine.store.pubsub import Subscription, TokenEvents
from tuneserve_server.admission import JobKey, submit_job
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.dependencies import Caller, incoming
from tuneserve_server.errors import ApiError, InvalidField, as_api_error, openai_failure
from tuneserve_server.http.incoming import Incoming, SentJson
from tuneserve_server.openai import requests
from tuneserve_server.openai.lengths import checked_length
from tuneserve_server.openai.message_parser import MessageFormat
from tuneserve_server.openai.responses import (
    AnswerReader,
    Choice,
    Json,
    ResponseFormat,
    SampledAnswer,
    read_answer,
    usage,
)
from tuneserve_server.openai.streaming import StreamedChoices
from tuneserve_server.openai.targets import Target, resolve_target
from tuneserve_server.openai.types import GenerationRequest
from tuneserve_server.openai.waiting import check_crowd, give_up, results

logger = logging.getLogger(__name__)

G = TypeVar("G", bound=GenerationRequest)

STREAM = "text/event-stream"
_TEXT = frozenset({"prompt", "messages", "chat_template_kwargs", "tools"})


@dataclass(frozen=True)
class AnswerHead:
    """The facts about an answer that are known before it begins."""

    key: str
    model: str
    created: int
    prompt_tokens: int


class AnswerFormat(Protocol):
    """The form in which a route answers, whole or as a stream of events."""

    id_prefix: str

    def whole(self, head: AnswerHead, answers: Sequence[SampledAnswer]) -> Json:
        """Return the whole answer."""
        ...

    def begin(self, head: AnswerHead) -> list[str]:
        """Return the events before the first text."""
        ...

    def say(self, index: int, choice: Choice, *, is_first: bool) -> list[str]:
        """Return the events for a part of a choice."""
        ...

    def finish(self, answers: Sequence[SampledAnswer]) -> list[str]:
        """Return the events after the last text."""
        ...

    def fail(self, error: ApiError) -> list[str]:
        """Return the events of a request that failed after its stream began."""
        ...


class OpenAIAnswers:
    """OpenAI's answers to completions and chat completions."""

    def __init__(self, shape: ResponseFormat, request: GenerationRequest) -> None:
        self.id_prefix = shape.id_prefix
        self._shape = shape
        options = request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._head: Json = {}

    def whole(self, head: AnswerHead, answers: Sequence[SampledAnswer]) -> Json:
        choices = [choice for answer in answers for choice in answer.choices]
        return {
            **_openai_head(head, self._shape.whole),
            "choices": [self._shape.choice(index, each) for index, each in enumerate(choices)],
            "usage": usage(answers),
        }

    def begin(self, head: AnswerHead) -> list[str]:
        self._head = _openai_head(head, self._shape.chunk)
        return []

    def say(self, index: int, choice: Choice, *, is_first: bool) -> list[str]:
        unknown: Json = {"usage": None} if self._has_usage else {}
        pieces = self._shape.pieces(index, choice, is_first=is_first)
        return [data_event({**self._head, "choices": [piece], **unknown}) for piece in pieces]

    def finish(self, answers: Sequence[SampledAnswer]) -> list[str]:
        counted = {**self._head, "choices": [], "usage": usage(answers)}
        return [data_event(counted)] * self._has_usage + ["data: [DONE]\n\n"]

    def fail(self, error: ApiError) -> list[str]:
        return [data_event(openai_failure(error).model_dump())]


def _openai_head(head: AnswerHead, kind: str) -> Json:
    return {"id": head.key, "object": kind, "created": head.created, "model": head.model}


def data_event(data: Json, name: str | None = None) -> str:
    """Return a server-sent event, with a name if there is one."""
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedText:
    """The tokens of a request's prompts, and how the model writes its answers to them."""

    tokens: list[list[int]]
    form: MessageFormat


@dataclass(frozen=True)
class ReadRequest(Generic[G]):
    """A request without its text, and the target, commands and form of answer it asks for."""

    request: G
    target: Target
    samples: list[SampleCommand]
    form: MessageFormat


async def read_request(
    http: Request,
    caller: Caller,
    parse: Callable[[bytes], G],
    prepare: Callable[[G, BaseText, BaseModelInfo], PreparedText],
    names: Mapping[str, str] = MappingProxyType({}),
) -> ReadRequest[G]:
    """Read the body and return what it asks for.

    The body's memory and text are released on return, because answers take a long time. ``names``
    has the fields that the client calls by another name. Raises ``InvalidField`` under its name.
    """
    try:
        async with incoming(http, caller, Incoming.json) as sent:
            return await _read(sent, caller, parse, prepare)
    except InvalidField as error:
        raise renamed(error, names) from None


async def _read(
    sent: SentJson,
    caller: Caller,
    parse: Callable[[bytes], G],
    prepare: Callable[[G, BaseText, BaseModelInfo], PreparedText],
) -> ReadRequest[G]:
    request = await sent.read(parse)
    check_crowd(caller)
    target = await resolve_target(caller, request.model)
    text, info = target.text, target.info
    characters = checked_length(request, text, info, caller.tokenizers.most_characters)
    prepared = await caller.tokenizers.tokens(
        caller.tenant, characters, partial(prepare, request, text, info)
    )
    samples = requests.samples(request, prepared.tokens, target.file_id, info)
    fields = type(request).model_fields.keys() - _TEXT
    kept = {name: getattr(request, name) for name in fields}
    bare = type(request).model_construct(**kept)
    return ReadRequest(bare, target, samples, prepared.form)


def renamed(error: InvalidField, names: Mapping[str, str]) -> InvalidField:
    """Return the error with the field at fault under the name that the client knows."""
    param = error.param or ""
    if param not in names:
        return error
    text, name = str(error), names[param]
    return InvalidField(name + text.removeprefix(param) if text.startswith(param) else text, name)


@dataclass(frozen=True)
class _Generation:
    """A request: its jobs, and the format of its answer."""

    caller: Caller
    read: ReadRequest[Any]
    answer: AnswerFormat
    commands: list[SampleCommand]
    request_ids: list[str]  # of the jobs whose results have not arrived
    key: str

    @property
    def reading(self) -> AnswerReader:
        request: GenerationRequest = self.read.request
        target = self.read.target
        scored = requests.scoring(request).wanted
        echo, kept = requests.echo(request), requests.kept(request)
        return AnswerReader(target.text, target.info.eos_token_ids, scored, echo, kept)

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
        name = self.read.target.info.name
        for index, sample in enumerate(self.commands):
            place = JobKey(JobKind.SAMPLE, self.key, index, name)
            self.request_ids.append(await submit_job(self.caller, place, encode(sample)))

    async def give_up(self) -> None:
        """Cancel the jobs whose results have not arrived."""
        await give_up(self.caller, self.request_ids)

    def head(self) -> AnswerHead:
        prompt = sum(len(each.prompt) for each in self.commands)
        return AnswerHead(self.key, self.read.request.model, int(time.time()), prompt)


async def generate(
    http: Request, caller: Caller, read: ReadRequest[G], answer: AnswerFormat
) -> Response:
    """Submit the request's jobs and answer it, whole or as a stream."""
    samples = read.samples
    key = answer.id_prefix + uuid.uuid4().hex
    if read.request.stream:
        samples = [replace(each, stream=f"{key}/{index}") for index, each in enumerate(samples)]
    generation = _Generation(caller, read, answer, samples, [], key)
    heard = caller.store.subscribe(each.stream for each in samples if each.stream)
    try:
        await generation.submit()
        if not read.request.stream:
            return await _whole(http, generation)
    except BaseException:
        await generation.give_up()
        raise
    return _Events(generation, heard)


async def _whole(http: Request, generation: _Generation) -> Response:
    answers = []
    async with aclosing(generation.answers()) as found:
        async for answer in found:
            if isinstance(answer, SampledAnswer):
                answers.append(answer)
            elif await http.is_disconnected():
                raise ClientDisconnect  # the client no longer waits for the answer
    body = await asyncio.to_thread(generation.answer.whole, generation.head(), answers)
    return JSONResponse(body)


class _Events(StreamingResponse):
    """A stream that cancels its unfinished jobs when its client disconnects."""

    def __init__(self, generation: _Generation, heard: Subscription) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_stream(generation, heard), media_type=STREAM, headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # not in ``_stream``: a generator that never started runs no ``finally``
            await self._generation.give_up()


async def _stream(generation: _Generation, heard: Subscription) -> AsyncGenerator[str]:
    """Yield events as soon as there is text to send, and comments while no result has arrived."""
    form, answers = generation.answer, list[SampledAnswer]()
    speech = generation.speech()
    try:
        for event in form.begin(generation.head()):
            yield event
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
                    for event in form.say(index, choice, is_first=is_first):
                        yield event
        last = await asyncio.to_thread(form.finish, answers)
    except Exception as error:
        failed = as_api_error(error)
        caller = generation.caller
        caller.recent.record_error(caller.tenant, failed.code, str(failed), "stream")
        if failed.status >= 500:
            logger.error("a stream failed: %s", error, exc_info=failed is not error)
        last = form.fail(failed)
    for event in last:
        yield event
