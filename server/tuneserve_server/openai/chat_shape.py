"""OpenAI's chat completions: a message's text, reasoning, tool calls and logprobs."""

import uuid
from collections.abc import Sequence

from tuneserve_server.openai.call_formats import ToolCall
from tuneserve_server.openai.message_parser import (
    MessageFormat,
    MessageParser,
    MessagePart,
    TextPart,
    joined,
)
from tuneserve_server.openai.responses import Choice, Json, is_whole


class ChatShape:
    """The format of chat completions; ``form`` says how the model writes its messages."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, form: MessageFormat | None = None) -> None:
        self._form = form or MessageFormat()
        self._streams: dict[int, _Stream] = {}

    def choice(self, index: int, choice: Choice) -> Json:
        """Return the whole message of a choice."""
        stream = _Stream(self._form)
        parts = stream.parts(choice)
        text = "".join(_texts(parts, is_reasoning=False))
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if thought := "".join(_texts(parts, is_reasoning=True)):
            message |= {"reasoning_content": thought, "reasoning": thought}
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if calls:
            message["tool_calls"] = [_call(each) for each in calls]
            message["content"] = text or None
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(choice),
            "finish_reason": stream.finish_reason(choice),
        }

    def pieces(self, index: int, choice: Choice, *, is_first: bool) -> list[Json]:
        """Return the deltas of a stream for a part of a choice."""
        stream = self._streams.setdefault(index, _Stream(self._form))
        deltas: list[Json] = [stream.delta(part) for part in stream.parts(choice)]
        if choice.scored and not deltas:
            deltas = [{"content": ""}]  # the logprobs of text that is held back
        logprobs = _logprobs(choice)
        found = [_piece(index, {"role": "assistant", "content": ""}, None, None)] * is_first
        for delta in deltas:
            found.append(_piece(index, delta, logprobs, None))
            logprobs = None if choice.scored is None else {"content": [], "refusal": None}
        if choice.finish_reason is not None:
            found.append(_piece(index, {}, None, stream.finish_reason(choice)))
        return found


class _Stream:
    """The message of one choice, as far as it is known."""

    def __init__(self, form: MessageFormat) -> None:
        self._parser = MessageParser(form)
        self._calls = self._told = 0

    def parts(self, choice: Choice) -> list[MessagePart]:
        found = self._parser.push(choice.text)
        if choice.finish_reason is not None:
            found = joined([*found, *self._parser.end()])
        self._calls += sum(isinstance(part, ToolCall) for part in found)
        return found

    def finish_reason(self, choice: Choice) -> str | None:
        is_stopped = choice.finish_reason == "stop" or self._parser.is_over
        return "tool_calls" if self._calls and is_stopped else choice.finish_reason

    def delta(self, part: MessagePart) -> Json:
        if isinstance(part, ToolCall):
            self._told += 1
            return {"tool_calls": [{"index": self._told - 1, **_call(part)}]}
        if part.is_reasoning:
            return {"reasoning_content": part.text, "reasoning": part.text}
        return {"content": part.text}


def _texts(parts: Sequence[MessagePart], *, is_reasoning: bool) -> list[str]:
    return [
        part.text
        for part in parts
        if isinstance(part, TextPart) and part.is_reasoning == is_reasoning
    ]


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _piece(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(choice: Choice) -> Json | None:
    if choice.scored is None:
        return None
    content = [
        {
            **_token(token.text, token.logprob),
            "top_logprobs": [_token(each.text, each.logprob) for each in token.top],
        }
        for token in choice.scored
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float | None) -> Json:
    """Return a token's entry; ``bytes`` is null for a token that is part of a character."""
    whole = is_whole(text)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
