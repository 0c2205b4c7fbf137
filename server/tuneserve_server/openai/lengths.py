"""The length limits of texts from OpenAI clients, checked before the texts are tokenized."""

from typing import Any

from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_server.base_model_text import BaseText
from tuneserve_server.errors import InvalidField
from tuneserve_server.openai.types import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
)


def checked_length(
    request: GenerationRequest,
    text: BaseText,
    info: BaseModelInfo,
    most_here: int,
) -> int:
    """Return the characters of the longest text of the request.

    Raises ``InvalidField`` for more than the base model's context can hold, or more than
    ``most_here``, the number that fits in memory.
    """
    context = info.context_length
    if isinstance(request, CompletionRequest):
        field, characters = "prompt", _of_prompts(request.prompt)
    else:
        assert isinstance(request, ChatCompletionRequest)
        field, characters = "messages", sum(map(_of_message, request.messages))
        characters += sum(_of_tool(each.model_dump()) for each in request.tools or [])
        if len(request.messages) > context:
            raise InvalidField(
                f"messages has {len(request.messages)} entries; {info.name} has a context of "
                f"{context} tokens; leave the oldest out",
                field,
            )
    most = text.most_characters(context)
    if characters > most:
        raise InvalidField(
            f"{field} has {characters} characters; {info.name} has a context of {context} tokens, "
            f"which cannot hold more than {most} characters; shorten it",
            field,
        )
    if characters > most_here:
        raise InvalidField(
            f"{field} has {characters} characters; this server tokenizes up to {most_here} at once "
            "(text_memory_bytes); shorten it, or send tokens",
            field,
        )
    return characters


def _of_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> int:
    each = [prompt] if isinstance(prompt, str) else prompt
    return max((len(one) for one in each if isinstance(one, str)), default=0)


def _of_message(message: ChatMessage) -> int:
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [part.text for part in content]
    others = (message.name or "", message.reasoning_content or message.reasoning or "")
    calls = [each.function for each in message.tool_calls or []]
    written = [text for each in calls for text in (each.name, each.arguments)]
    return sum(map(len, (*parts, *others, *written)))


def _of_tool(value: Any) -> int:
    """Return the characters of the texts in a tool."""
    if isinstance(value, dict):
        return sum(len(name) + _of_tool(each) for name, each in value.items())
    if isinstance(value, list):
        return sum(map(_of_tool, value))
    return len(value) if isinstance(value, str) else 1
