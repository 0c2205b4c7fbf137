"""Requests as prompts: messages and tools in the base model's chat template.

The template also says how the model writes: its reasoning block and the format of its tool calls.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.errors import InvalidField
from tuneserve_server.openai import requests
from tuneserve_server.openai.call_formats import CallFormat, call_format
from tuneserve_server.openai.generation import PreparedText
from tuneserve_server.openai.message_parser import THINK, THOUGHT, MessageFormat
from tuneserve_server.openai.types import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    FunctionTool,
    MessageToolCall,
    NamedToolChoice,
)


def prepare_prompts(
    request: CompletionRequest, text: BaseText, info: BaseModelInfo
) -> PreparedText:
    """Return the prompts of a completion. Blocks."""
    return PreparedText(requests.prompts(request, text, info), MessageFormat())


def prepare_conversation(
    request: ChatCompletionRequest, text: BaseText, info: BaseModelInfo
) -> PreparedText:
    """Return the conversation as the only prompt. Blocks.

    If a tool must be called, the prompt ends with the start of the call.
    """
    messages = [_message(index, each) for index, each in enumerate(request.messages)]
    most = text.most_characters(info.context_length)
    use = _tool_use(request, text.chat_template or "", info.name)
    options = request.chat_template_kwargs or {}
    rendered = text.render(messages, options, most, tools=use.shown or None)
    has_reasoning = THOUGHT in (text.chat_template or "")
    is_thinking = has_reasoning and rendered.rstrip().endswith(THINK)
    if use.begun:  # a required call follows no reasoning, so an open block is closed
        if is_thinking:
            rendered = f"{rendered.rstrip()}\n\n{THOUGHT}\n\n"
        rendered += use.begun
        is_thinking = False
    is_apart = request.separate_reasoning is not False
    form = MessageFormat(
        has_reasoning and is_apart,
        is_thinking and is_apart,
        use.calls,
        frozenset(each["function"]["name"] for each in use.shown),
        use.most_calls,
        use.begun,
    )
    return PreparedText([text.encode_rendered(rendered)], form)


# --- messages ------------------------------------------------------------------------------------


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return the message in the form that chat templates read."""
    where = f"messages[{index}]"
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    if (role == "tool") != (message.tool_call_id is not None):
        raise InvalidField(
            f"{where}: a message of the role tool needs a tool_call_id, and no other has one; "
            "correct the role, or add the id of the call that this message answers",
            "messages",
        )
    if message.tool_calls and role != "assistant":
        raise InvalidField(
            f"{where} has tool_calls, which only messages of the role assistant have; leave them "
            "out",
            "messages",
        )
    others = {
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            _past_call(f"{where}.tool_calls[{number}]", each)
            for number, each in enumerate(message.tool_calls or [])
        ]
        or None,
    }
    given = {name: value for name, value in others.items() if value is not None}
    return {"role": role, "content": content or "", **given}


def _past_call(where: str, call: MessageToolCall) -> dict[str, Any]:
    """Return a call of an earlier message; templates read its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidField(
            f"{where}.function.arguments is not a JSON object; send the arguments as they were "
            "answered",
            "messages",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


# --- tools ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ToolUse:
    """The tools in the prompt, the format of their calls, and the start of a required call."""

    shown: Sequence[dict[str, Any]] = ()
    calls: CallFormat | None = None
    most_calls: int | None = None
    begun: str = ""


def _tool_use(request: ChatCompletionRequest, template: str, model: str) -> _ToolUse:
    choice = request.tool_choice or "auto"
    tools = request.tools or []
    _check_tools(tools)
    if not tools and choice not in ("none", "auto"):
        raise InvalidField(
            "tool_choice requires a call, and the request has no tools; send tools, or leave "
            "tool_choice out",
            "tool_choice",
        )
    if not tools or choice == "none":
        return _ToolUse()
    found = call_format(template)
    if found is None:
        raise InvalidField(
            f"the chat template of {model!r} shows no tools, or shows calls in a format that this "
            "server does not read (it reads that of Hermes and Qwen, <tool_call>, and the JSON of "
            "Llama 3); leave tools out, or describe them in a message",
            "tools",
        )
    one_call = 1 if request.parallel_tool_calls is False else None
    shown = [_shown(each) for each in tools]
    if choice == "auto":
        return _ToolUse(shown, found, one_call)
    if choice == "required":
        return _ToolUse(shown, found, one_call, found.begin(None))
    assert isinstance(choice, NamedToolChoice)
    name = choice.function.name
    if name not in {each.function.name for each in tools}:
        raise InvalidField(
            "tool_choice names a tool that is not in tools; send one of their names", "tool_choice"
        )
    return _ToolUse(shown, found, 1, found.begin(name))


def _shown(tool: FunctionTool) -> dict[str, Any]:
    """Return the tool as the template shows it: the fields that describe it, in OpenAI's order."""
    given = tool.function
    described = {"description": given.description, "parameters": given.parameters}
    fields = {name: value for name, value in described.items() if value is not None}
    return {"type": "function", "function": {"name": given.name, **fields}}


def _check_tools(tools: Sequence[FunctionTool]) -> None:
    names = [each.function.name for each in tools]
    if len(set(names)) < len(names):
        raise InvalidField("two tools have the same name; give each its own", "tools")
    for index, each in enumerate(tools):
        if each.function.strict:
            raise InvalidField(
                f"tools[{index}].function.strict is true, and this server does not hold a model to "
                "a schema of arguments; send strict: false, and check the arguments",
                "tools",
            )
