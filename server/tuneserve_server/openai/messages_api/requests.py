"""The conversion of Anthropic's requests into chat completions.

Thinking becomes the reasoning of a message, tool uses its calls, and tool results messages of the
role ``tool``. Texts beside each other are joined by line ends.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tuneserve_engine.core.errors import UserError
from tuneserve_server.commands.sampling import checked_stops
from tuneserve_server.errors import InvalidField, Malformed
from tuneserve_server.http import body
from tuneserve_server.openai.messages_api.types import (
    ClientTool,
    ClientToolChoice,
    CountTokensRequest,
    MessageBlock,
    MessagesRequest,
    MessageTurn,
)
from tuneserve_server.openai.requests import check_rest, named
from tuneserve_server.openai.types import ChatCompletionRequest, media

R = TypeVar("R", bound=CountTokensRequest)

_HARMLESS = frozenset(
    {
        "cache_control",
        "diagnostics",
        "eager_input_streaming",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that describe the request. Prompts are cached without being marked for it."""
_KEEPS_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "citations": ({"enabled": False}, []),
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [_KEEPS_THINKING]}),
    "defer_loading": (False,),
    "display": ("summarized",),
    "input_examples": ([],),
    "mcp_servers": ([],),
    "output_config": ({"effort": "high"}, {}),  # high is the default
    "output_format": (),
    "speed": ("standard",),
}
_ERROR = "Error: "  # templates have no other place for ``is_error``


def parse_message(raw: bytes) -> ChatCompletionRequest:
    """Return the request for a message as a chat completion. Raises ``InvalidField``."""
    request = _parsed(MessagesRequest, raw)
    try:  # under its own name
        checked_stops("stop_sequences", request.stop_sequences or None)
    except UserError as error:
        raise InvalidField(str(error), "stop_sequences") from None
    return _chat(
        request,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def parse_count(raw: bytes) -> ChatCompletionRequest:
    """Return the request for a count of tokens as a chat completion. Raises ``InvalidField``."""
    return _chat(_parsed(CountTokensRequest, raw))


def _parsed(body_type: type[R], raw: bytes) -> R:
    try:
        request = body.parse(body_type, raw, notices_unknown=False)
    except Malformed as error:
        raise named(body_type, str(error)) from None
    _check(request, "")
    for part, name in ((request.thinking, "thinking"), (request.tool_choice, "tool_choice")):
        if part is not None:
            _check(part, f"{name}.")
    for index, turn in enumerate(request.messages):
        _check(turn, f"messages[{index}].")
    for index, tool in enumerate(request.tools or []):
        _check(tool, f"tools[{index}].")
    return request


def _check(part: Any, where: str) -> None:
    check_rest(part, where, _HARMLESS, _UNSUPPORTED)


def _chat(request: CountTokensRequest, **options: Any) -> ChatCompletionRequest:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, turn in enumerate(request.messages):
        messages += _messages(turn, f"messages[{index}]")
    if messages[-1]["role"] == "assistant":
        raise InvalidField(
            "messages ends with a message of the assistant, and this server continues none; end "
            "with a message of the user",
            "messages",
        )
    choice = request.tool_choice
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    return ChatCompletionRequest.model_validate(
        {
            "model": request.model,
            "messages": messages,
            "tools": [_tool(index, each) for index, each in enumerate(request.tools or [])],
            "tool_choice": _tool_choice(choice),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "chat_template_kwargs": {"enable_thinking": thinks},
            **options,
        }
    )


# --- messages ------------------------------------------------------------------------------------


def _messages(turn: MessageTurn, where: str) -> Iterator[dict[str, Any]]:
    blocks = turn.content
    if isinstance(blocks, str) or turn.role == "system":
        yield {"role": turn.role, "content": _text(blocks, f"{where}.content")}
        return
    places = [f"{where}.content[{number}]" for number in range(len(blocks))]
    given = list(zip(blocks, places, strict=True))
    for block, place in given:
        _check_block(block, place, turn.role)
    if turn.role == "assistant":
        yield _assistant(given)
        return
    texts: list[str] = []
    for block, place in given:
        if block.type == "text":
            texts.append(_needed(block.text, "text", place))
            continue
        if texts:
            yield {"role": "user", "content": "\n".join(texts)}
            texts = []
        answered = _needed(block.tool_use_id, "tool_use_id", place)
        content = _ERROR * bool(block.is_error) + _text(block.content or "", f"{place}.content")
        yield {"role": "tool", "tool_call_id": answered, "content": content}
    if texts or not blocks:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(blocks: Sequence[tuple[MessageBlock, str]]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, place in blocks:
        if block.type == "text":
            texts.append(_needed(block.text, "text", place))
        elif block.type == "thinking":
            thoughts.append(_needed(block.thinking, "thinking", place))
        else:
            name = _needed(block.name, "name", place)
            arguments = json.dumps(_needed(block.input, "input", place))
            call = {"name": name, "arguments": arguments}
            calls.append({"id": _needed(block.id, "id", place), "function": call})
    return {
        "role": "assistant",
        "content": "\n".join(texts),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}


def _check_block(block: MessageBlock, place: str, role: str) -> None:
    """Raise ``InvalidField`` for a block that messages of this role cannot have here."""
    if block.type not in _BLOCKS[role]:
        raise InvalidField(
            f"{place} is {_kind(block)}; in a message of the {role} this server takes blocks of "
            f"the types {', '.join(_BLOCKS[role])}; leave it out",
            "messages",
        )
    _check(block, f"{place}.")


def _kind(block: MessageBlock) -> str:
    known = {*_BLOCKS["user"], *_BLOCKS["assistant"], "redacted_thinking"}
    return f"of the type {block.type}" if block.type in known else media(block.type)


def _text(content: str | list[MessageBlock], where: str) -> str:
    """Return the text of a content that may have text only."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            raise InvalidField(
                f"{where}[{index}] is {_kind(block)}; this server takes text only; send blocks of "
                "the type text",
                where.split("[")[0],
            )
        _check(block, f"{where}[{index}].")
    return "\n".join(_needed(each.text, "text", where) for each in content)


V = TypeVar("V")


def _needed(value: V | None, name: str, place: str) -> V:
    if value is None:
        raise InvalidField(f"{place} has no {name}, which its type needs; add it", "messages")
    return value


# --- tools ---------------------------------------------------------------------------------------


def _tool(index: int, tool: ClientTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidField(
            f"tools[{index}] is a tool of the server, and this server has none; send tools that "
            "you run yourself, with name, description and input_schema",
            "tools",
        )
    if tool.input_schema is None:
        raise InvalidField(f"tools[{index}] has no input_schema; add a JSON schema", "tools")
    if tool.strict:
        raise InvalidField(
            f"tools[{index}].strict is true, and this server does not hold a model to a schema of "
            "inputs; send strict: false, and check the inputs",
            "tools",
        )
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: ClientToolChoice | None) -> Any:
    """Return the choice as OpenAI names it. Raises ``InvalidField``."""
    if choice is None:
        return None
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidField("tool_choice has no name; send the name of a tool", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}
