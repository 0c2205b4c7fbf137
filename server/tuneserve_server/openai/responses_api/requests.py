"""The conversion of requests for responses into chat completions.

Neighbouring items of the assistant (its reasoning, messages and calls) become one message.
"""

from typing import Any, TypeVar

from tuneserve_server.errors import InvalidField, Malformed
from tuneserve_server.http import body
from tuneserve_server.openai.requests import check_rest, named
from tuneserve_server.openai.responses_api.types import (
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponseTool,
)
from tuneserve_server.openai.types import ChatCompletionRequest, media

_HARMLESS = frozenset(
    {
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_OF_ITEM = frozenset({"phase"})
_UNSUPPORTED_OF_PART: dict[str, tuple[Any, ...]] = {"annotations": ([],), "logprobs": ([],)}
_TEXTS = {
    "system": "input_text",
    "developer": "input_text",
    "user": "input_text",
    "assistant": "output_text",
}


def parse_request(raw: bytes) -> ResponsesRequest:
    """Return the parsed body. Raises ``InvalidField`` for a field that cannot be carried out."""
    try:
        request = body.parse(ResponsesRequest, raw, notices_unknown=False)
    except Malformed as error:
        raise named(ResponsesRequest, str(error)) from None
    extra = request.model_extra or {}
    if request.store or extra.get("previous_response_id") is not None:
        field = "store" if request.store else "previous_response_id"
        raise InvalidField(
            f"{field} is set, and this server stores no responses; send store: false, and the "
            "whole conversation as input",
            field,
        )
    check_rest(request, "", _HARMLESS, _UNSUPPORTED)
    for index, tool in enumerate(request.tools or []):
        check_rest(tool, f"tools[{index}].")
    _check_text(request)
    return request


def as_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """Return the request as a chat completion. Raises ``InvalidField``."""
    choice = request.tool_choice
    if choice is not None and not isinstance(choice, str):
        choice_given: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        choice_given = choice
    return ChatCompletionRequest.model_validate(
        {
            "model": request.model,
            "messages": _messages(request),
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "tools": [_tool(index, each) for index, each in enumerate(request.tools or [])],
            "tool_choice": choice_given,
            "parallel_tool_calls": request.parallel_tool_calls,
            "stream": request.stream,
            "chat_template_kwargs": request.chat_template_kwargs,
        }
    )


def _check_text(request: ResponsesRequest) -> None:
    """Raise ``InvalidField`` for a format of the text other than plain text."""
    for name, value in (request.text or {}).items():
        if name == "format" and value in (None, {"type": "text"}):
            continue
        if name == "verbosity" and value is None:
            continue
        raise InvalidField(
            f"text.{name[:64]} is not supported by this server, and it would change the answer; "
            'leave it out, or send text: {"format": {"type": "text"}}',
            "text",
        )


# --- items ---------------------------------------------------------------------------------------


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    given = request.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = []
    system = [request.instructions] if request.instructions else []
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        if message["role"] == "system" and not messages:
            system.append(message["content"])  # templates take one, at the start
        elif message["role"] == "assistant" and messages and _continues(messages[-1], message):
            _add(messages[-1], message)
        else:
            messages.append(message)
    first = {"role": "system", "content": "\n\n".join(system)}
    return [first, *messages] if system else messages


def _continues(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether an item belongs to the assistant's message before it."""
    has_text = "content" in message and ("content" in last or "tool_calls" in last)
    has_thought = "reasoning_content" in message and len(last) > 1
    return last["role"] == "assistant" and not has_text and not has_thought


def _add(last: dict[str, Any], message: dict[str, Any]) -> None:
    calls = last.get("tool_calls", []) + message.get("tool_calls", [])
    last.update(message)
    if calls:
        last["tool_calls"] = calls


def _message(item: InputItem, where: str) -> dict[str, Any]:
    _check_item(item, where)
    if item.type == "message":
        role = _needed(item.role, "role", where)
        content = _text(item.content, _TEXTS[role], f"{where}.content")
        return {"role": "system" if role == "developer" else role, "content": content}
    if item.type == "function_call":
        name = _needed(item.name, "name", where)
        function = {"name": name, "arguments": _needed(item.arguments, "arguments", where)}
        call = {"id": _needed(item.call_id, "call_id", where), "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if item.type == "function_call_output":
        output = _text(item.output, "input_text", f"{where}.output")
        answered = _needed(item.call_id, "call_id", where)
        return {"role": "tool", "tool_call_id": answered, "content": output}
    thought = _text(item.content or "", "reasoning_text", f"{where}.content")
    return {"role": "assistant", "reasoning_content": thought}


def _check_item(item: InputItem, where: str) -> None:
    """Raise ``InvalidField`` for an item that this server does not read."""
    if item.type not in ("message", "function_call", "function_call_output", "reasoning"):
        raise InvalidField(
            f"{where} is of a type that this server does not read; it reads message, "
            "function_call, function_call_output and reasoning; leave it out",
            "input",
        )
    if item.type == "reasoning" and item.summary:
        raise InvalidField(
            f"{where} has a summary, and this server made none; send the reasoning as content, or "
            "leave the item out",
            "input",
        )
    check_rest(item, f"{where}.", _OF_ITEM)


def _text(content: str | list[InputPart] | None, kind: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidField(f"{where} is missing, which the item's type needs; add it", "input")
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if part.type not in (kind, "text") or part.text is None:
            raise InvalidField(
                f"{place} is {media(part.type)}; the models of this server read text only, so "
                f"send parts of the type {kind}, with text",
                "input",
            )
        check_rest(part, f"{place}.", frozenset(), _UNSUPPORTED_OF_PART)
    return "\n".join(part.text or "" for part in content)


V = TypeVar("V")


def _needed(value: V | None, name: str, where: str) -> V:
    if value is None:
        raise InvalidField(f"{where} has no {name}, which its type needs; add it", "input")
    return value


def _tool(index: int, tool: ResponseTool) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        raise InvalidField(
            f"tools[{index}] is not a function with a name, and this server has no tools of its "
            "own; send functions that you call yourself",
            "tools",
        )
    if tool.strict:
        raise InvalidField(
            f"tools[{index}].strict is true, and this server does not hold a model to a schema of "
            "arguments; send strict: false, and check the arguments",
            "tools",
        )
    given = tool.model_dump(include={"description", "parameters"}, exclude_none=True)
    return {"type": "function", "function": {"name": tool.name, **given}}
