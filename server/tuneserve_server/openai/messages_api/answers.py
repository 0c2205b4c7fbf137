"""Anthropic's answers: a message of blocks, whole or as events."""

import uuid
from collections.abc import Sequence

from tuneserve_server.error_shapes import anthropic_failure
from tuneserve_server.errors import ApiError
from tuneserve_server.openai.call_formats import ToolCall
from tuneserve_server.openai.generation import AnswerHead, data_event
from tuneserve_server.openai.message_parser import (
    MessageFormat,
    MessageParser,
    MessagePart,
    TextPart,
    joined,
)
from tuneserve_server.openai.responses import Choice, Json, SampledAnswer


class MessageAnswers:
    """The answers to one request for a message; ``form`` says how the model writes it."""

    id_prefix = "msg_"

    def __init__(self, form: MessageFormat) -> None:
        self._form = form
        self._parser = MessageParser(form)
        self._blocks = 0  # begun in the stream
        self._open: str | None = None  # the type of the block that more text would continue
        self._has_calls = False

    def whole(self, head: AnswerHead, answers: Sequence[SampledAnswer]) -> Json:
        """Return the whole message."""
        (answer,) = answers
        (choice,) = answer.choices
        parser = MessageParser(self._form)
        parts = joined([*parser.push(choice.text), *parser.end()])
        has_calls = any(isinstance(part, ToolCall) for part in parts)
        return {
            **_message(head),
            "content": [_block(part) for part in parts],
            **_stop(choice, has_calls=has_calls, is_over=parser.is_over),
            "usage": _usage(answer),
        }

    def begin(self, head: AnswerHead) -> list[str]:
        """Return the event that begins the message; cached tokens are not known yet."""
        counts = {"input_tokens": head.prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**_message(head), "content": [], **stop, "usage": counts}
        return [_event("message_start", message=message)]

    def say(self, index: int, choice: Choice, *, is_first: bool) -> list[str]:
        """Return the events for more of the message."""
        parts = self._parser.push(choice.text)
        if choice.finish_reason is not None:
            parts = joined([*parts, *self._parser.end()])
        return [event for part in parts for event in self._events(part)]

    def finish(self, answers: Sequence[SampledAnswer]) -> list[str]:
        """Return the events that end the message."""
        (answer,) = answers
        (choice,) = answer.choices
        is_over = self._parser.is_over
        stop = _stop(choice, has_calls=self._has_calls, is_over=is_over)
        last = _event("message_delta", delta=stop, usage=_usage(answer))
        return [*self._closed(), last, _event("message_stop")]

    def fail(self, error: ApiError) -> list[str]:
        """Return the event for an error in the stream."""
        body = anthropic_failure(error.status, error.code, str(error))
        return [data_event(body.model_dump(), "error")]

    def _events(self, part: MessagePart) -> list[str]:
        kind = _type(part)
        found = []
        if kind != self._open or kind == "tool_use":
            found += [*self._closed(), self._started(part)]
        if isinstance(part, ToolCall):
            self._has_calls = True
            delta = {"type": "input_json_delta", "partial_json": part.arguments_json}
        elif part.is_reasoning:
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            delta = {"type": "text_delta", "text": part.text}
        return [*found, _event("content_block_delta", index=self._blocks - 1, delta=delta)]

    def _started(self, part: MessagePart) -> str:
        self._open = _type(part)
        self._blocks += 1
        empty: Json = {"text": {"text": ""}, "thinking": {"thinking": ""}}
        block = _block(part) | empty.get(self._open, {"input": {}})
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _closed(self) -> list[str]:
        is_open, self._open = self._open is not None, None
        return [_event("content_block_stop", index=self._blocks - 1)] * is_open


def _type(part: MessagePart) -> str:
    if isinstance(part, ToolCall):
        return "tool_use"
    return "thinking" if part.is_reasoning else "text"


def _block(part: MessagePart) -> Json:
    if isinstance(part, TextPart):
        if part.is_reasoning:
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        return {"type": "text", "text": part.text}
    name, id_ = part.name, f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": id_, "name": name, "input": part.arguments}


def _message(head: AnswerHead) -> Json:
    return {"id": head.key, "type": "message", "role": "assistant", "model": head.model}


def _stop(choice: Choice, *, has_calls: bool, is_over: bool) -> Json:
    if has_calls and (choice.finish_reason == "stop" or is_over):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    reason = "end_turn" if choice.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _usage(answer: SampledAnswer) -> Json:
    """Return the token counts; cached tokens are counted apart, as at Anthropic."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _event(kind: str, **fields: object) -> str:
    return data_event({"type": kind, **fields}, kind)
